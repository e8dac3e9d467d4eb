"""Which host this is, from flags and environments: all pure."""

from math import inf

import pytest

from serving.distributed.plan import HostFlags, expand_hostlist, plan_hosts
from serving.errors import ConfigError
from serving.flags import parse_flags

LWS = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "llm-0.llm.default"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "1"}
SLURM = {"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu[08-10]", "SLURM_LOCALID": "0"}
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[09-10]", "SLURM_NODEID": "1"}

FOUND = {
    "nothing": ({}, {}, None),
    "LeaderWorkerSet": ({}, LWS, (3, 2, ("llm-0.llm.default", "llm-0-1.llm.default", "llm-0-2.llm.default"))),
    "a TPU slice": ({}, TPU, (4, 1, ("t0", "t1", "t2", "t3"))),
    "a TPU slice of one host": ({}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    "a SLURM job": ({}, SLURM, (3, 2, ("gpu08", "gpu09", "gpu10"))),
    "a SLURM step within a larger job": ({}, {**SLURM, **STEP}, (2, 1, ("gpu09", "gpu10"))),
    "a SLURM step of one node": ({}, {**SLURM, "SLURM_STEP_NUM_NODES": "1"}, None),
    "LeaderWorkerSet on TPUs": (
        {}, {**LWS, "TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"},
        (3, 2, ("llm-0.llm.default", "llm-0-1.llm.default", "llm-0-2.llm.default"))),
    "flags": ({"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}, {}, (2, 1, ("10.0.0.1", ""))),
    "flags beside an environment": (
        {"nnodes": 2, "node_rank": 0, "master_addr": "x"}, TPU, (2, 0, ("x", ""))),
    "flags beside a broken environment": (
        {"nnodes": 2, "node_rank": 0, "master_addr": "x"}, {**TPU, **LWS}, (2, 0, ("x", ""))),
    "some flags, the rest from the environment": (
        {"nnodes": 4, "master_addr": "x"}, TPU, (4, 1, ("x", "t1", "t2", "t3"))),
    "opting out": ({"nnodes": 1}, {**TPU, "TPU_WORKER_ID": "pancake"}, None),
    "opting out, rank 0": ({"nnodes": 1, "node_rank": 0}, LWS, None),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_found(case: str):
    flags, environment, want = FOUND[case]
    plan = plan_hosts(HostFlags(**flags), environment)
    assert (plan and (plan.count, plan.rank, plan.addresses)) == want


REFUSED = {
    "no rank": ({"nnodes": 2, "master_addr": "x"}, {}, ("--nnodes 2", "--node-rank")),
    "no address": ({"nnodes": 2, "node_rank": 1}, {}, ("--nnodes 2", "--master-addr")),
    "neither": ({"nnodes": 2}, {}, ("--node-rank and --master-addr",)),
    "no count": ({"node_rank": 1, "master_addr": "x"}, {}, ("--node-rank 1 --master-addr x", "--nnodes")),
    "a count that the environment does not have": ({"nnodes": 2}, TPU, ("--nnodes 2", "--node-rank")),
    "a rank beyond": ({"nnodes": 2, "node_rank": 2, "master_addr": "x"}, {}, ("--node-rank 2", "0 to 1")),
    "a rank below": ({"nnodes": 2, "node_rank": -1, "master_addr": "x"}, {}, ("--node-rank -1", "0 to 1")),
    "no hosts": ({"nnodes": 0}, {}, ("--nnodes 0", "at least 1")),
    "a rank of one": ({"nnodes": 1, "node_rank": 1}, {}, ("--nnodes 1", "--node-rank 1")),
    "a port that has no next": (
        {"nnodes": 2, "node_rank": 0, "master_addr": "x", "master_port": 65535}, {}, ("65535", "65534")),
    "no patience": ({"nnodes": 4, "distributed_timeout_seconds": 0.0}, TPU, ("--distributed-timeout-seconds 0",)),
    "no end of it": ({"nnodes": 4, "distributed_timeout_seconds": inf}, TPU, ("seconds inf", "at most 1000000")),
    "a port for one host": ({"master_port": 5}, {}, ("--master-port 5", "--nnodes")),
    "two launchers": ({}, {**LWS, **TPU}, ("LWS_GROUP_SIZE=3", "TPU_WORKER_HOSTNAMES", "host 2 of 3", "host 1 of 4")),
    "LWS without an index": (
        {}, {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "x"}, ("LWS_GROUP_SIZE=2", "LWS_WORKER_INDEX")),
    "LWS without a leader": (
        {}, {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, ("LWS_LEADER_ADDRESS", "--nnodes 1")),
    "an index that is no number": ({}, {**LWS, "LWS_WORKER_INDEX": "two"}, ("LWS_WORKER_INDEX=two",)),
    "an index beyond": ({}, {**LWS, "LWS_WORKER_INDEX": "3"}, ("LWS_WORKER_INDEX=3", "0 to 2")),
    "a slice without an id": ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, ("TPU_WORKER_HOSTNAMES=a,b", "TPU_WORKER_ID")),
    "several slices": ({}, {**TPU, "MEGASCALE_NUM_SLICES": "2"}, ("MEGASCALE_NUM_SLICES=2", "--nnodes")),
    "several processes on a node": ({}, {**SLURM, "SLURM_LOCALID": "1"}, ("SLURM_LOCALID=1", "--ntasks-per-node=1")),
    "a list of another length": (
        {}, {**SLURM, "SLURM_JOB_NODELIST": "gpu[1-2]"}, ("NUM_NODES=3", "gpu[1-2]", "2 nodes")),
    "a list that cannot be read": ({}, {**SLURM, "SLURM_JOB_NODELIST": "gpu[1-"}, ("gpu[1-", "--master-addr")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    flags, environment, parts = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        plan_hosts(HostFlags(**flags), environment)
    line = str(refused.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_hostlists():
    assert expand_hostlist("a") == ("a",)
    assert expand_hostlist("n[1-3]") == ("n1", "n2", "n3")
    assert expand_hostlist("n[08-10,12],login-1") == ("n08", "n09", "n10", "n12", "login-1")
    assert expand_hostlist("r[1-2]n[1-2].x") == ("r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x")


def test_flags_and_environment_meet():
    hosts = parse_flags(["--master-port", "7000", "--distributed-timeout-seconds", "9"], TPU).engine.hosts
    assert hosts is not None
    assert (hosts.rank, hosts.leader, hosts.port, hosts.channel_port, hosts.timeout_seconds) == (1, "t0", 7000, 7001, 9)
    assert parse_flags(["--mesh", "8x1"], TPU).engine.is_follower
    assert not parse_flags(["--nnodes", "1"], TPU).engine.is_follower
    assert parse_flags([]).engine.hosts is None, "without an environment there is none"
