"""The Kubernetes manifests, offline: every field against Kubernetes' own schemas (those of the kubernetes-validate
package), LeaderWorkerSet's few fields against the table below, and the flags against the parser."""

import math
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from serving.api.http.auth import OPEN_PATHS
from serving.distributed.follower import EXTRA_GRACE_SECONDS
from serving.flags import parse_flags
from sharding.mesh import parse_mesh

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
GROUP = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "pageloom-0.pageloom.ns"}
VERSION = kubernetes_validate.latest_version()


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
# leaderworkerset.x-k8s.io/v1, as its CRD has it (v0.7 and later). Pod templates are Kubernetes' own.
LEADER_WORKER_SET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=_object(("name",), name=TEXT, labels={"type": "object", "additionalProperties": TEXT},
                     annotations=_object(**{"leaderworkerset.sigs.k8s.io/exclusive-topology": TEXT})),
    spec=_object(
        ("leaderWorkerTemplate",),
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_object(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        leaderWorkerTemplate=_object(
            ("workerTemplate",),
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
)


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    group = spec.get("leaderWorkerTemplate", {})
    return [t for t in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")) if t]


def validate(document: dict[str, Any]) -> None:
    if document["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    jsonschema.validate(document, LEADER_WORKER_SET)
    for template in pod_templates(document):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(pods, VERSION, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path):
    for document in documents(path):
        validate(document)


def _break(document: dict[str, Any], *place: str | int) -> None:
    *parents, last = place
    at: Any = document
    for key in parents:
        at = at[key]
    at[f"{last}s"] = at.pop(last)


@pytest.mark.parametrize("place", [
    ("spec", "leaderWorkerTemplate", "size"),
    ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "nodeSelector"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec", "containers", 0, "startupProbe", "failureThreshold"),
])  # fmt: skip
def test_the_check_sees_a_misspelt_field(place: tuple[str | int, ...]):
    workers, _ = documents(DEPLOY / "tpu-leaderworkerset.yaml")
    _break(workers, *place)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(workers)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_mean_what_the_server_does(path: Path):
    workload, service = documents(path)
    for template in pod_templates(workload):
        pod = template["spec"]
        (container,) = pod["containers"]
        config = parse_flags(container["args"], GROUP if workload["kind"] == "LeaderWorkerSet" else {})
        assert config.host == "0.0.0.0", "others must reach it"
        assert pod["terminationGracePeriodSeconds"] >= config.shutdown_grace_seconds + EXTRA_GRACE_SECONDS
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        for folder in (config.engine.model, config.engine.compilation_cache_dir):
            assert folder and any(folder.startswith(mount) for mount in mounts), folder
        probes = [container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")
                  if kind in container]  # fmt: skip
        assert all(probe["path"] in OPEN_PATHS for probe in probes)
        selected = service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert selected == (len(probes) == 3), "who answers is who is asked"
        if selected:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert (ports["http"], ports["grpc"]) == (config.port, config.grpc_port)
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()


def test_all_chips_of_the_gpu_machine_are_in_the_mesh():
    deployment, _ = documents(DEPLOY / "gpu-deployment.yaml")
    (template,) = pod_templates(deployment)
    (container,) = template["spec"]["containers"]
    mesh = parse_mesh(parse_flags(container["args"]).engine.mesh)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(mesh.num_devices)
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_hosts_of_a_slice_agree():
    workers, _ = documents(DEPLOY / "tpu-leaderworkerset.yaml")
    assert "cloud.google.com/gke-nodepool" in workers["metadata"]["annotations"].values(), "one slice, not two halves"
    size = workers["spec"]["leaderWorkerTemplate"]["size"]
    leader, follower = pod_templates(workers)
    (first,), (second,) = leader["spec"]["containers"], follower["spec"]["containers"]
    assert first["args"] == second["args"], "or they would refuse each other"
    for pod in (leader, follower):
        chips = int(pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"])
        topology = pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        mesh = parse_mesh(parse_flags(first["args"], GROUP).engine.mesh)
        assert chips * size == math.prod(map(int, topology.split("x"))) == mesh.num_devices
    hosts = parse_flags(second["args"], {**GROUP, "LWS_GROUP_SIZE": str(size)}).engine.hosts
    assert hosts is not None and (hosts.count, hosts.rank, hosts.leader) == (size, 3, "pageloom-0.pageloom.ns")
    ports = {port["name"]: port["containerPort"] for port in first["ports"]}
    assert (ports["coordinator"], ports["steps"]) == (hosts.port, hosts.channel_port)
