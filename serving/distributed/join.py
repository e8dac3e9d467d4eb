"""All hosts become one jax program: they find each other, compare themselves, and only then start jax.distributed."""

import socket
from collections.abc import Mapping

import jax

from serving.config import HostPlan
from serving.distributed.abort import explain_aborts
from serving.distributed.cache import write_own_cache
from serving.distributed.following import join_leader
from serving.distributed.hosts import Alone, Hosts
from serving.distributed.leading import listen, wait_for_followers
from serving.errors import ConfigError

JAX_HEARTBEAT_SECONDS = 30  # ours is faster, and says more


def join_hosts(plan: HostPlan | None, fingerprint: Mapping[str, str]) -> Hosts:
    """Before anything asks jax for its devices. Raises ConfigError on every host for what is wrong with one."""
    if plan is None:
        return Alone()
    if plan.rank == 0:
        _check_port(plan)
        hosts: Hosts = wait_for_followers(plan, listen(plan), fingerprint)
    else:
        hosts = join_leader(plan, fingerprint)
    _start_jax(hosts)
    if plan.rank > 0:
        write_own_cache(plan.rank)
    return hosts


def _check_port(plan: HostPlan) -> None:
    """The coordinator would only log that its port is taken."""
    try:
        socket.create_server(("", plan.port)).close()
    except OSError as error:
        raise ConfigError(f"cannot bind --master-port {plan.port}: {error.strerror}; choose another") from error


def _start_jax(hosts: Hosts) -> None:
    plan = hosts.plan
    explain_aborts(hosts.over)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPUs have none of their own across processes
    host = f"[{plan.leader}]" if ":" in plan.leader else plan.leader
    try:
        jax.distributed.initialize(
            f"{host}:{plan.port}", plan.count, plan.rank,
            cluster_detection_method="deactivate",  # ours has decided
            initialization_timeout=int(max(plan.timeout_seconds, 1)),
            heartbeat_timeout_seconds=JAX_HEARTBEAT_SECONDS,
        )  # fmt: skip
    except RuntimeError as error:
        message = f"jax.distributed does not start on {plan.name(plan.rank)}: {str(error).splitlines()[0]}"
        hosts.fail(message)
        raise ConfigError(message) from error
