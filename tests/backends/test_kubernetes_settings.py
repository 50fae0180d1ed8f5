"""The backend for pods as the service's settings make it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.main import make_backend
from makeway_quota.settings import load


def kubeconfig(folder: Path, server: str = "http://127.0.0.1:1") -> Path:
    """Write a kubeconfig of a cluster that does not answer."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "jobs"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    return folder / "kubeconfig"


@pytest.mark.parametrize(("given", "seconds"), [({}, 3600.0), ({"MAKEWAY_LOST_AFTER_SECONDS": "600"}, 600.0)])
def test_how_long_pods_go_on_without_the_service_is_a_setting(
    tmp_path: Path, given: dict[str, str], seconds: float
) -> None:
    environ = {
        "MAKEWAY_STATE_DIR": str(tmp_path),
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBECONFIG": str(kubeconfig(tmp_path)),
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "makeway:1",
        **given,
    }
    backend = make_backend(load(environ=environ))
    assert isinstance(backend, KubernetesBackend)
    assert backend.lost_after == seconds
