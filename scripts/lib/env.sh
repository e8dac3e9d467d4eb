# Sourced by the scripts beside it: finds a Python, keeps .venv installed. Expects to be run from the project's root.

fail() {
  echo "error: $*" >&2
  exit 2
}

# Prints "minor path" of the interpreter when it runs, is 3.11 or newer and can make virtual environments.
probe_python() {
  "$1" -c '
import sys
assert sys.version_info >= (3, 11) and sys.version_info.releaselevel == "final"
import ensurepip, venv
print(sys.version_info.minor, sys.executable)' 2>/dev/null
}

# The newest suitable Python up to 3.13 (jax is tested there), wherever it sits; a pyenv shim may exist and not run.
find_python() {
  local candidate found
  for candidate in python3.13 python3.12 python3.11 python3 "$HOME"/.pyenv/versions/3.1[123]*/bin/python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    found=$(probe_python "$candidate") || continue
    if ((${found%% *} <= 13)); then echo "$found"; fi
  done | sort -n | tail -n 1 | cut -d' ' -f2-
}

# Turns pip's output into one line that grows a counter (on a terminal) or a line every 20 packages (in a log file).
show_progress() {
  local line count=0
  while IFS= read -r line; do
    case $line in
      Collecting* | Obtaining*)
        count=$((count + 1))
        if [[ -t 1 ]]; then
          printf '\r\033[K  %d packages found, now %s' "$count" "$(cut -d' ' -f2 <<<"$line")"
        elif ((count % 20 == 0)); then
          echo "  $count packages found"
        fi ;;
      *Downloading\ *)
        if [[ -t 1 ]]; then printf '\r\033[K %s' "${line:0:100}"; fi ;;
      "Installing collected packages"*)
        if [[ -t 1 ]]; then printf '\r\033[K'; fi
        echo "  installing $(wc -w <<<"${line#*: }") packages" ;;
    esac
  done
}

# ensure_env EXTRA [FOLDER]: FOLDER (.venv) holds the project and its EXTRA ("" for none). Does nothing when
# pyproject.toml is unchanged.
ensure_env() {
  local extra=$1 folder=${2:-.venv}
  local stamp=$folder/.installed-${1:-base} log=$folder/install.log python wanted
  if [[ ! -x $folder/bin/python ]] || ! probe_python "$folder/bin/python" >/dev/null; then
    python=$(find_python)
    [[ -n $python ]] || fail "no Python 3.11, 3.12 or 3.13 with the venv module was found on PATH or under ~/.pyenv/versions"
    echo "Making $folder with $("$python" --version) ($python)"
    "$python" -m venv --clear "$folder" || fail "could not make $folder with $python"
  fi
  wanted="$("$folder/bin/python" --version) $(cksum <pyproject.toml)"
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then return; fi
  echo "Installing the project${extra:+ with its $extra extra} into $folder (once; minutes)"
  if ! "$folder/bin/python" -m pip install --disable-pip-version-check -e ".${extra:+[$extra]}" 2>&1 |
      tee "$log" | show_progress; then
    grep '^ERROR' "$log" | tail -n 1 >&2 || true
    fail "the installation failed; all of its output is in $log"
  fi
  echo "$wanted" >"$stamp"
}
