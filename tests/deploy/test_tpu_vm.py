"""The TPU VM script, offline: with a `gcloud` that runs what it is given on three "hosts" of this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serving.flags import parse_flags

SCRIPT = Path(__file__).parents[2] / "deploy" / "tpu_vm.sh"
FAKES = {
    # Every host is a shell with a rank.
    "gcloud": 'echo "$*" | head -1 >> "$LOG"; shift 4; command=${@: -1}\n'
              'case $* in *"--worker all"*) ranks="0 1 2" ;; *) ranks=0 ;; esac\n'
              'for rank in $ranks; do RANK=$rank bash -c "$command" || exit; done',
    "curl": 'case ${@: -1} in */agent-worker-number) echo "$RANK" ;; */worker-network-endpoints) echo "$ENDPOINTS" ;;\n'
            "*) exit 22 ;; esac",
    "sudo": '"$@"',
    "systemd-run": 'printf "%s\\n" RUN "$@" >> "$LOG"',
    "systemctl": 'echo "systemctl $*" >> "$LOG"',
    "journalctl": 'echo "journalctl $*" >> "$LOG"',
}  # fmt: skip


def run(folder: Path, *arguments: str, endpoints: str = "10.0.0.1,10.0.0.2,10.0.0.3") -> tuple[int, str, str]:
    """Exit code, what the fakes wrote down, standard error."""
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "ENDPOINTS": endpoints}
    done = subprocess.run([str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, log.read_text() if log.exists() else "", done.stderr


@pytest.mark.parametrize("arguments", [(), ("serve",), ("serve", "name"), ("dance", "name", "zone"),
                                       ("install", "name", "zone")])  # fmt: skip
def test_it_does_nothing_without_being_told(arguments: tuple[str, ...], tmp_path: Path):
    code, log, error = run(tmp_path, *arguments)
    assert (code, log) == (2, "") and "deploy/tpu_vm.sh install NAME ZONE SOURCE" in error and "set -eu" not in error


FLAGS = ("--model", "/models/a b", "--mesh", "tensor=4,data=3", "--api-key", "it's $SECRET")


@pytest.mark.parametrize("endpoints", ["10.0.0.1,10.0.0.2,10.0.0.3", "n:0:10.0.0.1,n:1:10.0.0.2,n:2:10.0.0.3"])
def test_each_host_learns_its_place(endpoints: str, tmp_path: Path):
    code, log, error = run(tmp_path, "serve", "name", "zone", *FLAGS, endpoints=endpoints)
    assert code == 0, error
    runs = log.split("RUN\n")[1:]
    assert len(runs) == 3
    for rank, text in enumerate(runs):
        arguments = text.splitlines()
        flags = arguments[arguments.index("serve") + 1 :]
        flags = flags[: flags.index(FLAGS[-1]) + 1]
        config = parse_flags(flags)
        hosts = config.engine.hosts
        assert hosts is not None and (hosts.count, hosts.rank, hosts.leader) == (3, rank, "10.0.0.1")
        assert config.engine.model == "/models/a b" and config.api_keys == ("it's $SECRET",), "quoting"


def test_a_slice_of_one_host(tmp_path: Path):
    code, log, error = run(tmp_path, "serve", "name", "zone", "--mesh", "8x1", endpoints="10.0.0.1")
    assert code == 0, error
    assert "--mesh" in log and "--nnodes" not in log


def test_the_other_actions(tmp_path: Path):
    _, log, _ = run(tmp_path, "stop", "name", "zone")
    assert re.search(r"--worker all .*\n(systemctl stop pageloom\n){3}$", log, re.S)
    assert "journalctl --unit pageloom --follow" in run(tmp_path, "logs", "name", "zone")[1]


def test_shellcheck():
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
