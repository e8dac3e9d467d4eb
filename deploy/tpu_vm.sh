#!/usr/bin/env bash
# Serves one model on all hosts of a TPU slice that exists already. Run it on your own machine, where gcloud is set up.
#
#   deploy/tpu_vm.sh install NAME ZONE SOURCE      SOURCE: what pip installs on every host, "pageloom[tpu] @ git+https://..."
#   deploy/tpu_vm.sh serve   NAME ZONE FLAGS...    FLAGS: those of `python -m serve`
#   deploy/tpu_vm.sh logs    NAME ZONE             of host 0, until you interrupt it
#   deploy/tpu_vm.sh stop    NAME ZONE
#
# The service is a systemd unit called pageloom on every host: it outlives your connection, and starts again when a
# host has failed. Nothing is created, and nothing deleted, but that unit and ~/pageloom on the hosts.
set -euo pipefail

usage() {
    sed -n 's/^# \{0,1\}//; 2,10p' "$0" >&2
    exit 2
}

# --- What runs on the hosts. Sent there as text.

install_here() {
    local python
    for python in python3.13 python3.12 python3.11 python3 none; do
        if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
    done
    if [ "$python" = none ]; then
        echo "$(hostname): no Python of 3.11 or newer with the module venv; install one first" >&2
        return 2
    fi
    "$python" -m venv ~/pageloom
    ~/pageloom/bin/pip install --quiet --upgrade "$1"
}

attribute() {
    curl --silent --fail --header "Metadata-Flavor: Google" \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

serve_here() {
    local rank endpoints leader hosts=()
    rank=$(attribute agent-worker-number)
    endpoints=$(attribute worker-network-endpoints) # an address for each host, or NAME:ID:ADDRESS
    IFS=, read -r -a hosts <<<"$endpoints"
    leader=${hosts[0]##*:}
    if [ "${#hosts[@]}" -gt 1 ]; then
        set -- --nnodes "${#hosts[@]}" --node-rank "$rank" --master-addr "$leader" "$@"
    fi
    sudo systemctl reset-failed pageloom 2>/dev/null || true
    sudo systemd-run --unit pageloom --uid "$(id -u)" --setenv "HOME=$HOME" \
        --property Restart=on-failure --property RestartPreventExitStatus=2 --property RestartSec=5 \
        --property TimeoutStopSec=60 \
        "$HOME/pageloom/bin/python" -m serve "$@"
}

logs_here() {
    sudo journalctl --unit pageloom --follow --lines 100 --output cat
}

stop_here() {
    sudo systemctl stop pageloom
}

# --- What runs here.

on_hosts() {
    local workers=$1 command=$2
    shift 2
    [ $# -eq 0 ] || command+=$(printf ' %q' "$@")
    gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker "$workers" \
        --command "$(declare -f attribute install_here serve_here logs_here stop_here); set -eu; $command"
}

[ $# -ge 3 ] || usage
action=$1 name=$2 zone=$3
shift 3
case $action in
install)
    [ $# -eq 1 ] || usage
    on_hosts all install_here "$1"
    ;;
serve) on_hosts all serve_here "$@" ;;
logs) on_hosts 0 logs_here ;;
stop) on_hosts all stop_here ;;
*) usage ;;
esac
