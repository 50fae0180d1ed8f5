"""The images run on a real node in a namespace that enforces `restricted`, with a read-only root file system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pods import phase, wait_until

from kube_cluster import image_build
from kube_cluster.api import Api, ApiProblem, Object

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

NAMESPACE = "restricted"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PORT = 8765
POLICY = Path(__file__).parents[2] / "hub_config" / "policy.yaml"
SETTINGS = {"JUPYTERHUB_SERVICE_URL": f"http://0.0.0.0:{PORT}", "MAKEWAY_POLICY_FILE": "/etc/makeway/policy.yaml"}
LOOK = "id -u; touch /usr/x || echo refused; touch /opt/makeway/x || echo refused; touch /data/x && echo written"


@pytest.fixture
def api(images: dict[str, Path], api: Api) -> Iterator[Api]:
    """Return the API with a namespace that admits restricted pods only; afterwards its pods are gone."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{NAMESPACE}"
    if not api.items("/api/v1/namespaces", fieldSelector=f"metadata.name={NAMESPACE}"):
        api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE, "labels": labels}})
        policy = {"policy.yaml": POLICY.read_text(encoding="utf-8")}
        api.create(f"{path}/configmaps", {"metadata": {"name": "policy"}, "data": policy})
    wait_until(lambda: api.items(f"{path}/serviceaccounts", fieldSelector="metadata.name=default"), "pods are admitted")
    yield api
    api.delete(PODS, gracePeriodSeconds="0")
    wait_until(lambda: not api.items(PODS), "no pod is left")


def pod(image: str, command: list[str] | None = None) -> Object:
    """Return a pod that the standard `restricted` admits, with a read-only root file system."""
    container: Object = {
        "name": "main",
        "image": image_build.name_of(image),
        "imagePullPolicy": "Never",
        "env": [{"name": name, "value": value} for name, value in SETTINGS.items()],
        "volumeMounts": [
            {"name": "policy", "mountPath": "/etc/makeway"},
            *({"name": "data", "mountPath": path} for path in ("/data", "/tmp", "/home/jovyan")),
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if command:
        container["command"] = command
    return {
        "metadata": {"name": image},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "nodeSelector": {"makeway.test/real": "true"},
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "policy", "configMap": {"name": "policy"}}],
        },
    }


def log_of(api: Api, made: Object) -> str:
    """Run a pod to its end and return its log."""
    name = str(api.create(PODS, made)["metadata"]["name"])
    wait_until(lambda: phase(api, name, PODS) in ("Succeeded", "Failed"), "the pod has ended")
    return api.text(f"{PODS}/{name}/log")


def test_the_quota_service_answers_that_it_is_healthy_and_decides(api: Api) -> None:
    api.create(PODS, pod("quota-service"))

    def health(path: str) -> Object:
        try:
            result: Object = api.get(f"{PODS}/http:quota-service:{PORT}/proxy/{path}")
        except ApiProblem:  # not listening yet
            return {}
        return result

    wait_until(lambda: health("healthz").get("ok"), "the service says that it is healthy")
    wait_until(lambda: health("readyz").get("ok"), "the service says that it decides")
    (status,) = api.get(f"{PODS}/quota-service")["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    assert "Serving at http://0.0.0.0" in api.text(f"{PODS}/quota-service/log")


def test_it_runs_as_a_user_that_may_write_its_volumes_only(api: Api) -> None:
    message = log_of(api, pod("quota-service", ["sh", "-c", LOOK])).splitlines()
    assert [line for line in message if "Read-only" not in line] == ["10001", "refused", "refused", "written"]
    assert len(message) == 6


@pytest.mark.parametrize(
    ("image", "command"),
    [
        ("hub", ["jupyterhub", "--version"]),
        ("hub", ["python", "-c", "import makeway_hub, makeway_spawner.kube; print(6)"]),
        ("notebook", ["jupyterhub-singleuser", "--version"]),
        ("notebook", ["python", "-c", "import jupyterlab, ipykernel, makeway.magics; print(6)"]),
    ],
)
def test_the_hub_and_the_notebook_find_their_programs(api: Api, image: str, command: list[str]) -> None:
    assert log_of(api, pod(image, command)).splitlines()[-1][:1].isdigit()


def test_an_image_that_has_not_changed_is_not_built_again(images: dict[str, Path]) -> None:
    before = {image: archive.stat().st_ino for image, archive in images.items()}
    again = image_build.build(list(images))
    assert {image: archive.stat().st_ino for image, archive in again.items()} == before
