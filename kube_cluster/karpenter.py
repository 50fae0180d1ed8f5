"""Build Karpenter with its kwok provider once from its Go modules, and run it against a test cluster.

It adds simulated nodes for pods that fit nowhere, by the NodePools that a test creates, and removes those that nothing
needs. Everything but the cloud is real: the nodes are simulated by kwok, so the cluster has to simulate some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from . import processes, programs
from .api import GPU, Api, ApiProblem, Object
from .cluster import Cluster

VERSION = "1.13.0"
MODULE = "sigs.k8s.io/karpenter"
SOURCES = Path(__file__).parent / "karpenter_binary"
FLAGS = ("-trimpath", "-buildvcs=false", "-ldflags", f"-s -w -X {MODULE}/pkg/operator.Version={VERSION}")
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOLS, CLAIMS = "/apis/karpenter.sh/v1/nodepools", "/apis/karpenter.sh/v1/nodeclaims"
NODE_CLASSES = "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses"
NODES, OF_POOL = "/api/v1/nodes", "karpenter.sh/nodepool"
READY_SECONDS = 60.0
ZONE = "test-zone-a"


def is_built() -> bool:
    """Whether Karpenter is in the cache."""
    return (programs.tool_folder("karpenter", SOURCES, FLAGS) / "karpenter").exists()


def karpenter() -> Path:
    """Return Karpenter with the kwok provider; build it first if it is not in the cache."""
    return programs.tool("karpenter", "Karpenter", "0.5 GB on disk", SOURCES, FLAGS, f"{MODULE}/kwok")


def definitions() -> list[Object]:
    """Return the kinds of Karpenter and of its kwok provider."""
    module = programs.module_folder(MODULE, SOURCES)
    files = [*(module / "pkg/apis/crds").glob("*.yaml"), *(module / "kwok/apis/crds").glob("*.yaml")]
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(files)]


@contextmanager
def running(cluster: Cluster, types: Mapping[str, int]) -> Iterator[None]:
    """Run Karpenter with these instance types, by their GPUs, until the end of the block; then remove its kinds."""
    api, folder = cluster.api, cluster.folder
    kinds = [api.create(DEFINITIONS, one)["metadata"]["name"] for one in definitions()]
    process = None
    try:
        processes.wait_until(
            lambda: all(_is_served(api.get(f"{DEFINITIONS}/{name}")) for name in kinds), "A kind", READY_SECONDS
        )
        file = folder.path / "instance-types.json"
        file.write_text(json.dumps([_instance_type(name, gpus) for name, gpus in types.items()]), encoding="utf-8")
        environ = {
            "KUBECONFIG": str(cluster.kubeconfig),
            "INSTANCE_TYPES_FILE_PATH": str(file),
            "DISABLE_LEADER_ELECTION": "true",
            "METRICS_PORT": "0",
            "HEALTH_PROBE_PORT": "0",
            "KARPENTER_SERVICE": "karpenter",
            "SYSTEM_NAMESPACE": "kube-system",
        }
        process = processes.start(folder, "karpenter", [karpenter()], environ)
        yield
        processes.check(folder)
    finally:
        if process is not None:
            process.kill()
            process.wait()
            del folder.started["karpenter"]
            _remove_all(api)
        for name in kinds:
            api.delete(f"{DEFINITIONS}/{name}")
        processes.wait_until(
            lambda: not set(kinds) & set(_kinds(api)), "The removal of Karpenter's kinds", READY_SECONDS
        )


def _kinds(api: Api) -> list[str]:
    return [one["metadata"]["name"] for one in api.items(DEFINITIONS)]


def _remove_all(api: Api) -> None:
    """Remove the objects of a Karpenter that does not run any more, and would have to finish their deletion."""
    for path, chosen in ((POOLS, {}), (CLAIMS, {}), (NODE_CLASSES, {}), (NODES, {"labelSelector": OF_POOL})):
        for one in api.items(path, **chosen):
            where = f"{path}/{one['metadata']['name']}"
            api.merge(where, {"metadata": {"finalizers": None}})
            with suppress(ApiProblem):  # it was being deleted
                api.delete(where)


def _is_served(definition: Object) -> bool:
    conditions = (definition.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _instance_type(name: str, gpus: int) -> Object:
    requirements = [
        _requirement("karpenter.sh/capacity-type", ["on-demand"]),
        _requirement("topology.kubernetes.io/zone", [ZONE]),
    ]
    return {
        "name": name,
        "offerings": [{"Price": float(max(gpus, 1)), "Available": True, "Requirements": requirements}],
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": {"cpu": "96", "memory": "1Ti", "pods": "110", "ephemeral-storage": "1Ti", GPU: str(gpus)},
    }


def _requirement(key: str, values: Iterable[str]) -> Object:
    return {"key": key, "operator": "In", "values": list(values)}
