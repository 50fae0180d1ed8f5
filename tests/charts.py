"""The chart and what Helm renders of it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from kube_cluster.helm import Helm

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "makeway"
RELEASE, NAMESPACE, JOBS = "makeway", "makeway", "makeway-jobs"

Object = dict[str, Any]
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C, which reads a rendered chart ten times as fast"""

STANDALONE: Object = {}
TWO_REPLICAS: Object = {"database": {"existingSecret": "postgres"}, "hub": {"database": {"existingSecret": "postgres"}}}
ADD_ON: Object = {"mode": "addOn"}
EVERYTHING: Object = {
    **TWO_REPLICAS,
    "artifacts": {"s3": "s3://bucket/makeway", "existingSecret": "s3-keys"},
    "service": {"settings": {"tickSeconds": 2, "keepEvents": 600_000}, "podAnnotations": {"example.com/a": "b"}},
    "proxy": {"ingress": {"enabled": True, "host": "gpus.example.com", "tlsSecret": "tls", "className": "nginx"}},
    "jobs": {"tolerations": ["dedicated=gpus:NoSchedule", "spot"]},
    "prePuller": {"images": ["example.com/torch:2.9", "example.com/torch:2.9"]},
    "metrics": {"serviceMonitor": {"enabled": True}, "dashboard": {"enabled": True}},
}
ALL = {"standalone": STANDALONE, "two replicas": TWO_REPLICAS, "add-on": ADD_ON, "everything": EVERYTHING}


def written(folder: Path, values: Object) -> Path:
    """Write values into a file of their own and return it."""
    file = folder / f"values-{len(list(folder.glob('values-*')))}.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


class StrictLoader(LOADER):  # type: ignore[misc]
    """A loader that refuses a mapping with a key twice, as kustomize and `kubectl apply` do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, whose keys are texts here."""
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in a mapping: {sorted(key for key in keys if keys.count(key) > 1)}"
        return super().construct_mapping(node, deep)


def rendered(helm: Helm, folder: Path, values: Object) -> list[Object]:
    """Return the manifests that Helm makes of the chart with these values."""
    text = helm.template(CHART, RELEASE, NAMESPACE, ("--values", written(folder, values)))
    return [one for one in yaml.load_all(text, StrictLoader) if one]


def of_kind(manifests: list[Object], kind: str, name: str = "") -> list[Object]:
    """Return the manifests of a kind, or the one with a name."""
    return [one for one in manifests if one["kind"] == kind and name in ("", one["metadata"]["name"])]


def pod_specs(manifests: list[Object]) -> dict[str, Object]:
    """Return the pod specs of Deployments and DaemonSets by their names."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests
        if one["kind"] in ("Deployment", "DaemonSet")
    }


def hub_files(manifests: list[Object]) -> dict[str, str]:
    """Return the files of the Hub's configuration."""
    (secret,) = of_kind(manifests, "Secret", "makeway-hub")
    return {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
