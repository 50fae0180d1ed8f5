"""Make claims of folders of this machine, by which jobs in an empty image run the programs that are installed here."""

from __future__ import annotations

from pathlib import Path

from .api import Api, Object

WIDGETS = Path(__file__).parents[1] / "widgets"
"""The package with the launcher."""


def make_claim(api: Api, namespace: str, name: str, path: Path, mode: str = "ReadWriteMany") -> None:
    """Make a PersistentVolumeClaim bound to a folder of this machine, which pods of all nodes may write to."""
    common: Object = {"accessModes": [mode], "storageClassName": ""}
    size = {"storage": "1Gi"}
    volume: Object = {"capacity": size, "hostPath": {"path": str(path)}}
    volume |= {"claimRef": {"namespace": namespace, "name": name}, **common}
    api.create("/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
    claim: Object = {"volumeName": name, "resources": {"requests": size}, **common}
    api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", {"metadata": {"name": name}, "spec": claim})


def job_template(api: Api, namespace: str) -> Object:
    """Make claims of `/usr` and of Makeway's launcher; return the pod spec, for a profile, that mounts both."""
    make_claim(api, namespace, "usr", Path("/usr"))
    make_claim(api, namespace, "widgets", WIDGETS)
    mounted = {"usr": "/usr", "widgets": "/widgets"}
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in mounted.items()]
    here = {"env": [{"name": "PYTHONPATH", "value": "/widgets"}], "volumeMounts": mounts}
    return {
        "volumes": [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in mounted],
        "containers": [{"name": "worker", **here}],
        "initContainers": [{"name": "launcher", **here}],
    }
