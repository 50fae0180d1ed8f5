"""What sites add to the pods of the chart: places, volumes, variables, identities, images by digest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from charts import ADD_ON, CHART, EVERYTHING, STANDALONE, Object, of_kind, pod_specs, rendered
from makeway_api.taints import toleration

from kube_cluster.helm import Helm

pytestmark = pytest.mark.kube

PARTS = ("hub", "service", "proxy")
CA = {"name": "ca", "configMap": {"name": "site-ca"}}
MOUNT = {"name": "ca", "mountPath": "/etc/ssl/site", "readOnly": True}
CERTIFICATES = {"name": "SSL_CERT_FILE", "value": "/etc/ssl/site/ca.pem"}
AFFINITY: Object = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


def test_each_part_of_the_portal_takes_its_place(helm: Helm, tmp_path: Path) -> None:
    place = {
        "affinity": AFFINITY,
        "podLabels": {"team": "ml"},
        "podAnnotations": {"a": "b"},
        "priorityClassName": "high",
    }
    manifests = rendered(helm, tmp_path, dict.fromkeys(PARTS, place))
    for part in PARTS:
        (deployment,) = of_kind(manifests, "Deployment", f"makeway-{part}")
        template = deployment["spec"]["template"]
        assert (template["spec"]["affinity"], template["spec"]["priorityClassName"]) == (AFFINITY, "high")
        labels = template["metadata"]["labels"]
        assert labels["team"] == "ml"
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert template["metadata"]["annotations"]["a"] == "b"


def test_the_portal_outlives_the_work_on_a_node_that_is_short_of_memory(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, STANDALONE)
    values = {one["metadata"]["name"]: one["value"] for one in of_kind(manifests, "PriorityClass")}
    assert max(values, key=lambda name: values[name]) == "makeway-makeway-portal"
    specs = pod_specs(manifests)
    assert {specs[f"makeway-{part}"]["priorityClassName"] for part in PARTS} == {"makeway-makeway-portal"}
    none = pod_specs(rendered(helm, tmp_path, {"priorityClasses": {"create": False}}))
    assert not any("priorityClassName" in spec for spec in none.values())


@pytest.mark.parametrize("part", ["hub", "service"])
def test_a_site_brings_its_certificates_and_identities(helm: Helm, tmp_path: Path, part: str) -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/makeway"}
    added = {"extraEnv": [CERTIFICATES], "extraVolumes": [CA], "extraVolumeMounts": [MOUNT]}
    manifests = rendered(helm, tmp_path, {part: {**added, "serviceAccountAnnotations": role}})
    spec = pod_specs(manifests)[f"makeway-{part}"]
    assert CA in spec["volumes"]
    assert MOUNT in spec["containers"][0]["volumeMounts"]
    assert CERTIFICATES in spec["containers"][0]["env"]
    accounts = {one["metadata"]["name"]: one for one in of_kind(manifests, "ServiceAccount")}
    annotated = {name for name, one in accounts.items() if one["metadata"].get("annotations") == role}
    assert annotated == {f"makeway-{part}"}
    assert {one["automountServiceAccountToken"] for one in accounts.values()} == {False}


def test_jobs_have_an_identity_of_the_cloud_where_a_site_says_so(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(
        helm, tmp_path, {"jobs": {"serviceAccountAnnotations": {"iam.gke.io/gcp-service-account": "j@p"}}}
    )
    (account,) = of_kind(manifests, "ServiceAccount", "makeway-job")
    assert account["metadata"]["annotations"] == {"iam.gke.io/gcp-service-account": "j@p"}


def test_images_are_named_by_tag_or_by_digest(helm: Helm, tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    images = {"hub": {"repository": "registry.example:5000/hub", "digest": digest}, "service": {"tag": ""}}
    specs = pod_specs(rendered(helm, tmp_path, {"images": images}))
    assert specs["makeway-hub"]["containers"][0]["image"] == f"registry.example:5000/hub@{digest}"
    assert specs["makeway-service"]["containers"][0]["image"] == "makeway.test/quota-service:0.1.0"


@pytest.mark.parametrize("values", [STANDALONE, ADD_ON, EVERYTHING], ids=["standalone", "add-on", "everything"])
def test_no_default_image_is_of_a_registry_where_others_could_take_its_name(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    specs = pod_specs(rendered(helm, tmp_path, values))
    images = {one["image"] for spec in specs.values() for one in (*spec.get("initContainers", ()), *spec["containers"])}
    assert {image.partition("/")[0] for image in images} <= {"makeway.test", "quay.io", "example.com"}


def test_images_are_pulled_to_nodes_with_gpus_within_the_limits_of_a_namespace(helm: Helm, tmp_path: Path) -> None:
    resources = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}
    specs = pod_specs(rendered(helm, tmp_path, {"prePuller": {"resources": resources}}))
    pulling = [one for name, one in specs.items() if name.startswith("makeway-images")]
    assert pulling
    for spec in pulling:
        assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["resources"] == resources


def test_images_are_pulled_to_the_nodes_whose_taints_jobs_and_notebooks_tolerate(helm: Helm, tmp_path: Path) -> None:
    texts = ["spot", "dedicated=gpus:NoSchedule", "batch:NoExecute", "team=x"]
    specs = pod_specs(rendered(helm, tmp_path, {"jobs": {"tolerations": texts}}))
    usual = {"key": "nvidia.com/gpu", "operator": "Exists"}
    pulling = [one["tolerations"] for name, one in specs.items() if name.startswith("makeway-images")]
    assert pulling
    assert all(result == [usual, *(toleration(text) for text in texts)] for result in pulling)


def test_null_removes_a_limit(helm: Helm, tmp_path: Path) -> None:
    values = {"service": {"resources": {"limits": None}}, "hub": {"resources": None}}
    specs = pod_specs(rendered(helm, tmp_path, values))
    assert set(specs["makeway-service"]["containers"][0]["resources"]) == {"requests"}
    assert specs["makeway-hub"]["containers"][0]["resources"] is None


@pytest.mark.covers("N19")
def test_alerts_come_with_the_chart_as_their_file_has_them(helm: Helm, tmp_path: Path) -> None:
    enabled = {"metrics": {"rules": {"enabled": True, "labels": {"release": "prometheus"}}}}
    [rules] = of_kind(rendered(helm, tmp_path, enabled), "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text(encoding="utf-8"))
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert not of_kind(rendered(helm, tmp_path, STANDALONE), "PrometheusRule")
