"""Which host this is, and of how many: from flags and from what the cluster's launcher has left in the environment.

    LeaderWorkerSet   LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS        Kubernetes
    TPU pod slice     TPU_WORKER_HOSTNAMES, TPU_WORKER_ID                          GKE, or set by hand
    SLURM             SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST      or the job's: SLURM_JOB_...

Flags win: with `--nnodes 1`, or all three of them, the environment is not even looked at. Two launchers in one
environment (LeaderWorkerSet on TPUs sets both) must say the same. `plan_hosts` is a pure function of both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from serving.config import HostPlan
from serving.errors import ConfigError

DEFAULT_PORT = 29501
DEFAULT_TIMEOUT_SECONDS = 300.0
_LONGEST_TIMEOUT_SECONDS = 1e6  # 11 days; clocks of sockets and threads do not take infinity
Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """As given; None: not given."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    distributed_timeout_seconds: float | None = None

    def given(self) -> dict[str, int | float | str]:
        return {"--" + name.replace("_", "-"): value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Found:
    """What one launcher says. `addresses` are by rank; unknown ones are empty."""

    count: int
    rank: int
    addresses: tuple[str, ...]
    source: str


def plan_hosts(flags: HostFlags, environment: Environment) -> HostPlan | None:
    """None: one host. Raises `ConfigError` for what is contradictory or incomplete."""
    given = flags.given()
    if flags.nnodes is not None and flags.nnodes < 1:
        raise ConfigError(f"--nnodes {flags.nnodes} must be at least 1")
    if flags.nnodes == 1:
        alone = flags.node_rank in (None, 0) and flags.master_addr is None
        if not alone:
            raise ConfigError(f"{_listed(given)}: with one host, --node-rank and --master-addr say nothing")
        return None
    complete = None not in (flags.nnodes, flags.node_rank, flags.master_addr)
    found = None if complete else detect(environment)
    if flags.nnodes is None and found is None:
        if given:
            raise ConfigError(f"{_listed(given)} needs --nnodes too: neither a flag nor {_KNOWN} tells how many hosts")
        return None
    if flags.nnodes is not None and found is not None and found.count != flags.nnodes:
        found = None  # its ranks belong to another set of hosts
    count = flags.nnodes if flags.nnodes is not None else found.count if found else 1
    if count == 1:
        if given:
            source = found.source if found else ""
            raise ConfigError(f"{_listed(given)} needs --nnodes too: {source} knows of one host")
        return None
    return _complete(flags, found, count)


def _complete(flags: HostFlags, found: Found | None, count: int) -> HostPlan:
    rank = flags.node_rank if flags.node_rank is not None else found.rank if found else None
    addresses = list(found.addresses) if found else [""] * count
    if flags.master_addr is not None:
        addresses[0] = flags.master_addr
    missing = ["--node-rank"] * (rank is None) + ["--master-addr"] * (not addresses[0])
    if rank is None or missing:
        raise ConfigError(f"--nnodes {count} needs {' and '.join(missing)} too: {_KNOWN} do not tell for {count} hosts")
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank {rank} must be in 0 to {count - 1}: --nnodes is {count}")
    port = DEFAULT_PORT if flags.master_port is None else flags.master_port
    if not 1 <= port <= 65534:
        raise ConfigError(f"--master-port {port} must be in 1 to 65534: the port after it is used too")
    timeout = flags.distributed_timeout_seconds
    timeout = DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout
    if not 0 < timeout <= _LONGEST_TIMEOUT_SECONDS:
        raise ConfigError(f"--distributed-timeout-seconds {timeout:g} must be above 0 and at most "
                          f"{_LONGEST_TIMEOUT_SECONDS:.0f}")
    return HostPlan(count=count, rank=rank, addresses=tuple(addresses), port=port, timeout_seconds=timeout)


def detect(environment: Environment) -> Found | None:
    """What the environment says, one host or more; None if it says nothing."""
    found = [one for one in (look(environment) for look in _LAUNCHERS) if one is not None]
    for other in found[1:]:
        if (other.count, other.rank) != (found[0].count, found[0].rank):
            raise ConfigError(
                f"{found[0].source} makes this host {found[0].rank} of {found[0].count}, {other.source} host "
                f"{other.rank} of {other.count}; decide with --nnodes, --node-rank and --master-addr"
            )
    return found[0] if found else None


def _leader_worker_set(environment: Environment) -> Found | None:
    count = _number(environment, "LWS_GROUP_SIZE")
    if count is None:
        return None
    source = f"LWS_GROUP_SIZE={count}"
    if count == 1:
        return Found(1, 0, ("",), source)
    rank = _rank(environment, "LWS_WORKER_INDEX", source)
    leader = _needed(environment, "LWS_LEADER_ADDRESS", source)
    # The leader's pod is NAME.SERVICE.NAMESPACE, its workers' pods are NAME-1, NAME-2, ...
    name, dot, domain = leader.partition(".")
    addresses = (leader, *(f"{name}-{index}{dot}{domain}" for index in range(1, count)))
    return _checked(Found(count, rank, addresses, source), "LWS_WORKER_INDEX")


def _tpu(environment: Environment) -> Found | None:
    names = environment.get("TPU_WORKER_HOSTNAMES", "").strip()
    if not names:
        return None
    addresses = tuple(name.strip() for name in names.split(","))
    source = f"TPU_WORKER_HOSTNAMES={names}"
    if len(addresses) == 1:
        return Found(1, 0, addresses, source)
    slices = _number(environment, "MEGASCALE_NUM_SLICES") or 1
    if slices > 1:
        raise ConfigError(f"MEGASCALE_NUM_SLICES={slices}: the hosts of several slices are not found by themselves; "
                          "give --nnodes, --node-rank and --master-addr")
    rank = _rank(environment, "TPU_WORKER_ID", source)
    return _checked(Found(len(addresses), rank, addresses, source), "TPU_WORKER_ID")


def _slurm(environment: Environment) -> Found | None:
    """The step's own nodes where there is a step (`srun -N1` within a larger job is alone)."""
    kind = "STEP" if environment.get("SLURM_STEP_NUM_NODES") else "JOB"
    count = _number(environment, f"SLURM_{kind}_NUM_NODES")
    if count is None:
        return None
    source = f"SLURM_{kind}_NUM_NODES={count}"
    if count == 1:
        return Found(1, 0, ("",), source)
    if local := _number(environment, "SLURM_LOCALID"):
        raise ConfigError(f"SLURM_LOCALID={local}: a host runs one process for all its devices; "
                          "use srun --ntasks-per-node=1")
    rank = _rank(environment, "SLURM_NODEID", source)
    addresses = expand_hostlist(_needed(environment, f"SLURM_{kind}_NODELIST", source))
    if len(addresses) != count:
        raise ConfigError(f"{source}, but SLURM_{kind}_NODELIST={environment[f'SLURM_{kind}_NODELIST']} names "
                          f"{len(addresses)} nodes")
    return _checked(Found(count, rank, addresses, source), "SLURM_NODEID")


_LAUNCHERS = (_leader_worker_set, _tpu, _slurm)
_KNOWN = "LeaderWorkerSet's, a TPU slice's or SLURM's variables"


def expand_hostlist(text: str) -> tuple[str, ...]:
    """SLURM's short form: `tpu[01-03,07],login` is tpu01, tpu02, tpu03, tpu07, login."""
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text):
        raise ConfigError(f"SLURM's list of nodes {text!r} cannot be read; give --master-addr and --node-rank")
    names: list[str] = []
    for entry in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        parts = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", entry)
        choices = [_numbers(numbers) if numbers else [plain] for numbers, plain in parts]
        names += ["".join(parts) for parts in product(*choices)]
    return tuple(names)


def _numbers(text: str) -> list[str]:
    """`08-10,12` is 08, 09, 10, 12: leading zeros stay."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"SLURM's list of nodes has the range {part!r}, which cannot be read; give --master-addr")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} is not a number; correct it, or give --nnodes 1 to serve on this host alone")
    return int(text)


def _needed(environment: Environment, name: str, source: str) -> str:
    text = environment.get(name, "").strip()
    if not text:
        raise ConfigError(f"{source}, but {name} is not set; set it, give --nnodes, --node-rank and --master-addr, "
                          "or --nnodes 1 to serve on this host alone")
    return text


def _rank(environment: Environment, name: str, source: str) -> int:
    _needed(environment, name, source)
    rank = _number(environment, name)
    assert rank is not None
    return rank


def _checked(found: Found, name: str) -> Found:
    if found.rank >= found.count:
        raise ConfigError(f"{name}={found.rank} must be in 0 to {found.count - 1}: {found.source}")
    return found


def _listed(given: Mapping[str, int | float | str]) -> str:
    return " ".join(f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
                    for flag, value in given.items())  # fmt: skip
