"""The backend for pods as the service's settings make it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from makeway_quota.backends.base import Backend
from makeway_quota.backends.choice import make_backend
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.backends.kubernetes.cluster.nodes import Toleration
from makeway_quota.main import main
from makeway_quota.policy import Document
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


def made(folder: Path, **given: str) -> Backend:
    """Return the backend of these settings."""
    environ = {
        "MAKEWAY_STATE_DIR": str(folder),
        "MAKEWAY_BACKEND": "kubernetes",
        "MAKEWAY_KUBECONFIG": str(kubeconfig(folder)),
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "makeway:1",
        "MAKEWAY_WORKER_URL": "http://makeway.example:8765/services/makeway",
        **given,
    }
    return make_backend(load(environ=environ))


@pytest.mark.parametrize(("given", "seconds"), [({}, 3600.0), ({"MAKEWAY_LOST_AFTER_SECONDS": "600"}, 600.0)])
def test_how_long_pods_go_on_without_the_service_is_a_setting(
    tmp_path: Path, given: dict[str, str], seconds: float
) -> None:
    backend = made(tmp_path, **given)
    assert isinstance(backend, KubernetesBackend)
    assert backend.lost_after == seconds


@pytest.mark.parametrize(
    "given",
    [
        {"MAKEWAY_WORKER_URL": ""},
        {"MAKEWAY_WORKER_URL": "", "JUPYTERHUB_SERVICE_URL": "http://0.0.0.0:8765"},
        {"MAKEWAY_WORKER_URL": "", "MAKEWAY_URL": "http://localhost:8765/services/makeway"},
        {"MAKEWAY_WORKER_URL": "http://127.0.0.53:8765"},
        {"MAKEWAY_WORKER_URL": "http://[::1]:8765"},
        {"MAKEWAY_WORKER_URL": "http://[::]:8765"},
        {"MAKEWAY_WORKER_URL": "http://me.localhost:8765"},
        {"MAKEWAY_WORKER_URL": "makeway.example:8765"},
        {"MAKEWAY_WORKER_URL": "/services/makeway"},
    ],
)
def test_an_address_that_leads_pods_to_themselves_is_refused(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"do not reach the service at .*: set MAKEWAY_WORKER_URL to its address"):
        made(tmp_path, **given)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8765", "https://[fd00::1]/services/makeway", "http://makeway.jobs.svc:8765/x"]
)
def test_an_address_in_the_cluster_is_what_pods_are_given(tmp_path: Path, url: str) -> None:
    backend = made(tmp_path, MAKEWAY_WORKER_URL=url)
    assert isinstance(backend, KubernetesBackend)
    assert backend.settings.address == url


def test_the_command_for_nodes_has_the_settings_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def nodes_command(*given: object) -> str:
        asked.append(given)
        return ""

    monkeypatch.setattr("makeway_quota.backends.kubernetes.cluster.nodes_table.nodes_command", nodes_command)
    monkeypatch.setenv("MAKEWAY_KUBECONFIG", str(tmp_path / "of-the-service"))
    monkeypatch.setenv("MAKEWAY_KUBE_TOLERATIONS", "batch=yes:NoSchedule")
    assert main(["nodes", "--tolerate", "night", "--context", "c"]) == 0
    text = json.dumps({"version": 1, "pools": [{"name": "a"}], "profiles": [], "policies": []})
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["nodes", "--kubeconfig", str(tmp_path / "another"), "--policy", "-"]) == 0
    batch, night = Toleration("batch", "Equal", "yes", "NoSchedule"), Toleration("night", "Exists")
    assert asked[0] == (None, "nvidia.com/gpu", tmp_path / "of-the-service", "c", [batch, night])
    document, *rest = asked[1]
    assert isinstance(document, Document)
    assert [pool.name for pool in document.pools] == ["a"]
    assert rest == ["nvidia.com/gpu", tmp_path / "another", "", [batch]]
