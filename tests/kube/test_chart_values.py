"""Values that sites have: large numbers, odd names, texts of all kinds, and what Helm renders of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from charts import CHART, NAMESPACE, RELEASE, STANDALONE, Object, of_kind, pod_specs, rendered, written

from kube_cluster.helm import Helm
from kube_cluster.problems import KubeProblem

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


def as_release(helm: Helm, folder: Path, release: str, namespace: str, values: Object = STANDALONE) -> list[Object]:
    """Return the manifests of a release of another name, in another namespace."""
    text = helm.template(CHART, release, namespace, ("--values", written(folder, values)))
    return [one for one in yaml.safe_load_all(text) if one]


def variables(manifests: list[Object], deployment: str = "makeway-service") -> dict[str, str]:
    """Return the variables of a Deployment's first container that have a plain value."""
    (container,) = pod_specs(manifests)[deployment]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_numbers_of_a_million_and_more_stay_as_they_are(helm: Helm, tmp_path: Path) -> None:
    values = {
        "service": {"settings": {"keepEvents": 5_000_000, "tickSeconds": 0.5}},
        "priorityClasses": {"portal": 3_000_000, "guaranteed": 2_000_000, "preemptible": 1_000_000},
    }
    manifests = rendered(helm, tmp_path, values)
    given = variables(manifests)
    assert (given["MAKEWAY_KEEP_EVENTS"], given["MAKEWAY_TICK_SECONDS"]) == ("5000000", "0.5")
    text = helm.template(CHART, "makeway", NAMESPACE, ("--values", written(tmp_path, values)))
    assert re.findall(r"^value: (.*)$", text, re.MULTILINE) == ["3000000", "2000000", "1000000"]


def test_names_that_yaml_would_read_as_numbers_stay_texts(helm: Helm, tmp_path: Path) -> None:
    manifests = as_release(helm, tmp_path, "123", "2026", {"jobs": {"namespace": "99"}})
    for one in manifests:
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "123"
        assert one["metadata"].get("namespace", "99") in ("99", "2026")
    for binding in of_kind(manifests, "ClusterRoleBinding"):
        assert binding["subjects"][0]["namespace"] == "2026"
    assert variables(manifests, "123-makeway-service")["MAKEWAY_KUBE_NAMESPACE"] == "99"


def test_names_are_short_enough_and_without_dots(helm: Helm, tmp_path: Path) -> None:
    for release in ("a" * 53, "gpu.portal", "makeway.two"):
        for one in as_release(helm, tmp_path, release, "n" * 58):
            name = one["metadata"]["name"]
            assert len(name) <= (
                63 if one["kind"] not in ("PriorityClass", "ClusterRole", "ClusterRoleBinding") else 253
            )
            assert "." not in name
            assert all(len(label) <= 63 for label in one["metadata"]["labels"].values())


def test_installations_of_one_long_namespace_have_different_names(helm: Helm, tmp_path: Path) -> None:
    releases = ("makeway-one", "makeway-two")
    result = {
        variables(as_release(helm, tmp_path, name, "n" * 58), f"{name}-service")["MAKEWAY_KUBE_INSTANCE"]
        for name in releases
    }
    assert len(result) == 2
    assert all(len(name) <= 63 for name in result)


def test_an_ingress_takes_a_wildcard_and_a_secret_with_dots(helm: Helm, tmp_path: Path) -> None:
    ingress = {"enabled": True, "host": "*.example.com", "tlsSecret": "wildcard.example.com"}
    (made,) = of_kind(rendered(helm, tmp_path, {"proxy": {"ingress": ingress}}), "Ingress")
    assert made["spec"]["rules"][0]["host"] == "*.example.com"
    assert made["spec"]["tls"] == [{"hosts": ["*.example.com"], "secretName": "wildcard.example.com"}]


def test_an_empty_storage_class_is_another_than_none(helm: Helm, tmp_path: Path) -> None:
    values = {
        "database": {"storage": {"storageClass": ""}},
        "hub": {"database": {"storage": {"storageClass": "fast"}}},
    }
    claims = {
        one["metadata"]["name"]: one["spec"]
        for one in of_kind(rendered(helm, tmp_path, values), "PersistentVolumeClaim")
    }
    assert claims["makeway-service"]["storageClassName"] == ""
    assert claims["makeway-hub"]["storageClassName"] == "fast"
    assert "storageClassName" not in claims["makeway-checkpoints"]


@pytest.mark.parametrize("text", ["version: 1\n\npools: []\n", "  version: 1\n  pools: []\t# ü “…”\n"])
def test_a_policy_arrives_as_it_was_written(helm: Helm, tmp_path: Path, text: str) -> None:
    (made,) = of_kind(rendered(helm, tmp_path, {"policy": text}), "ConfigMap", "makeway-policy")
    assert made["data"]["policy.yaml"] == text


@pytest.mark.parametrize("text", ["pools: [", "[a, b]", "just words"])
def test_a_policy_that_is_no_yaml_mapping_is_refused(helm: Helm, tmp_path: Path, text: str) -> None:
    with pytest.raises(KubeProblem, match="policy: this is no YAML mapping"):
        rendered(helm, tmp_path, {"policy": text})


def test_the_documented_secret_has_the_keys_of_the_generated_one(helm: Helm, tmp_path: Path) -> None:
    (secret,) = of_kind(rendered(helm, tmp_path, STANDALONE), "Secret", "makeway")
    page = (CHART.parents[1] / "docs/reference/chart.md").read_text(encoding="utf-8")
    command = page.partition("create secret generic makeway-keys")[2].partition("```")[0]
    (listed,) = re.findall(r"for key in ([a-z -]+);", command)
    assert {*listed.split(), "cookie-secret"} == set(secret["data"])
    assert not of_kind(rendered(helm, tmp_path, {"existingSecret": "makeway-keys"}), "Secret", "makeway")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "port-forward service/makeway-proxy 8000:http"),
        ({"proxy": {"ingress": {"enabled": True, "host": "a.example"}}}, "Open the portal: http://a.example/\n"),
        ({"proxy": {"publicUrl": "https://b.example"}}, "Open the portal: https://b.example\n"),
        ({"mode": "addOn"}, "helm/makeway/z2jh-values.yaml"),
        ({"mode": "addOn", "priorityClasses": {"create": False}}, "guaranteed_priority_class"),
    ],
)
def test_the_notes_say_how_to_open_the_portal(helm: Helm, tmp_path: Path, values: Object, said: str) -> None:
    options = ("--namespace", NAMESPACE, "--dry-run=client", "--values", written(tmp_path, values))
    assert said in helm.run("install", RELEASE, CHART, *options).partition("\nNOTES:\n")[2]


# -- upgrades with --reuse-values, which takes the defaults of the earlier chart for those of the later one

LATER = ("jobs.home", "networkPolicy.extraEgress", "priorityClasses.portal", "prePuller.resources", "hub.extraEnv")
"""Values that charts before did not have, in each part that has some."""


def earlier(folder: Path, change: Callable[[Object], None]) -> Path:
    """Return a copy of the chart whose defaults are those of an earlier one."""
    chart = Path(shutil.copytree(CHART, folder / "chart"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    change(values)
    (chart / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return chart


def upgraded(helm: Helm, chart: Path, folder: Path, values: Object) -> list[Object]:
    """Return the manifests of an upgrade."""
    text = helm.template(chart, RELEASE, NAMESPACE, ("--is-upgrade", "--values", written(folder, values)))
    return [one for one in yaml.safe_load_all(text) if one]


def without_later(values: Object) -> None:
    """Remove what charts before did not have."""
    for path in LATER:
        part, _, name = path.partition(".")
        del values[part][name]


@pytest.mark.parametrize("mode", ["standalone", "addOn"])
def test_values_that_an_earlier_chart_did_not_have_are_not_needed(helm: Helm, tmp_path: Path, mode: str) -> None:
    chart = earlier(tmp_path, without_later)
    before, after = (upgraded(helm, one, tmp_path, {"mode": mode}) for one in (CHART, chart))
    kept = [one for one in before if one["kind"] not in ("DaemonSet", "Secret")]
    assert [one for one in after if one["kind"] not in ("DaemonSet", "Secret")] == kept


def test_an_add_on_with_the_defaults_of_an_earlier_chart_is_told_how_to_upgrade(helm: Helm, tmp_path: Path) -> None:
    def change(values: Object) -> None:
        values["images"]["hub"]["tag"] = "0"

    with pytest.raises(KubeProblem, match=r"images\.hub has no effect.*--reset-then-reuse-values"):
        upgraded(helm, earlier(tmp_path, change), tmp_path, {"mode": "addOn"})
