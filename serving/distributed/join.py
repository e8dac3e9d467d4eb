"""All hosts become one jax program: they find each other, compare themselves, and only then start jax.distributed."""

import sys
from collections.abc import Mapping

import jax

from serving.config import HostPlan
from serving.distributed.abort import explain_aborts
from serving.distributed.cache import write_own_cache
from serving.distributed.following import join_leader
from serving.distributed.hosts import Alone, Hosts
from serving.distributed.leading import bind, listen, own_address, refuse_followers, wait_for_followers
from serving.errors import ConfigError, EngineDead

JAX_HEARTBEAT_SECONDS = 30  # ours is faster, and says more


def join_hosts(plan: HostPlan | None, fingerprint: Mapping[str, str]) -> Hosts:
    """Before anything asks jax for its devices. Raises ConfigError on every host for what is wrong with one."""
    if plan is None:
        return Alone()
    address = None
    if plan.rank == 0:
        try:
            address = _coordinator_address(plan)
        except ConfigError as error:
            refuse_followers(plan, str(error))
            raise
        listener = listen(plan)
        _say(f"Host 0 waits for {plan.count - 1} more on port {plan.channel_port}")
        hosts: Hosts = wait_for_followers(plan, listener, fingerprint)
    else:
        _say(f"Host {plan.rank} waits for {plan.name(0)}, port {plan.channel_port}")
        hosts = join_leader(plan, fingerprint)
    _start_jax(hosts, address)
    if plan.rank > 0:
        write_own_cache(plan.rank)
    return hosts


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _coordinator_address(plan: HostPlan) -> str:
    """Where the coordinator listens. A taken port shows here: jax would only log it."""
    host = own_address(plan)
    try:
        bind(host, plan.port).close()
    except OSError as error:
        raise ConfigError(f"cannot bind --master-port {plan.port}: {error.strerror}; choose another") from error
    return f"[{host}]:{plan.port}" if ":" in host else f"{host}:{plan.port}"


def _start_jax(hosts: Hosts, address: str | None) -> None:
    plan = hosts.plan
    explain_aborts(hosts.over)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPUs have none of their own across processes
    host = f"[{plan.leader}]" if ":" in plan.leader else plan.leader
    try:
        jax.distributed.initialize(
            f"{host}:{plan.port}", plan.count, plan.rank,
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",  # ours has decided
            initialization_timeout=int(max(plan.timeout_seconds, 1)),
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )  # fmt: skip
    except RuntimeError as error:
        failure = EngineDead(f"jax.distributed does not start on {plan.name(plan.rank)}: {str(error).splitlines()[0]}")
        hosts.fail(failure)
        raise failure from error
