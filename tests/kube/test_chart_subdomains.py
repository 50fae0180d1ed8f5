"""Names of users in the chart: ingress, certificate, proxy, service and Hub, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from charts import Object, of_kind, pod_specs, rendered
from makeway_quota.settings import load
from makeway_quota.web.settings import WebSettings

from kube_cluster.helm import Helm
from kube_cluster.problems import KubeProblem

pytestmark = [pytest.mark.kube, pytest.mark.covers("N21")]
NAME = "gpus.example.com"


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


def values(given: Any, **ingress: Any) -> Object:
    return {"hub": {"config": {"JupyterHub": {"subdomain_host": given}}}, "proxy": {"ingress": ingress}}


def variables(manifests: list[Object]) -> dict[str, str]:
    (container,) = pod_specs(manifests)["makeway-service"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


@pytest.mark.parametrize("given", [NAME, f"https://{NAME}", f"https://{NAME}/"])
def test_the_ingress_has_the_wildcard_and_the_service_its_name(helm: Helm, tmp_path: Path, given: str) -> None:
    manifests = rendered(helm, tmp_path, values(given, enabled=True, host=NAME, tlsSecret="wildcard.example.com"))
    (ingress,) = of_kind(manifests, "Ingress")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == [NAME, f"*.{NAME}"]
    assert {json.dumps(rule["http"]) for rule in ingress["spec"]["rules"]} == {
        json.dumps(ingress["spec"]["rules"][0]["http"])
    }
    assert ingress["spec"]["tls"] == [{"hosts": [NAME, f"*.{NAME}"], "secretName": "wildcard.example.com"}]
    (proxy,) = pod_specs(manifests)["makeway-proxy"]["containers"]
    assert "--host-routing" in proxy["command"]
    result = variables(manifests)
    callback = f"https://makeway--service.{NAME}/services/makeway/oauth_callback"
    assert (result["JUPYTERHUB_HOST"], result["JUPYTERHUB_OAUTH_CALLBACK_URL"]) == (f"https://{NAME}", callback)
    told = WebSettings.of(load(environ=result))
    assert told.hub == f"https://{NAME}/hub/"


def test_a_port_and_a_path_are_kept(helm: Helm, tmp_path: Path) -> None:
    given = values(f"https://{NAME}:8443", enabled=True, host=NAME)
    given["hub"]["config"]["JupyterHub"]["base_url"] = "/lab/"
    result = variables(rendered(helm, tmp_path, given))
    origin = f"https://makeway--service.{NAME}:8443"
    assert result["JUPYTERHUB_OAUTH_CALLBACK_URL"] == f"{origin}/lab/services/makeway/oauth_callback"
    assert result["MAKEWAY_URL"] == "http://makeway-proxy/lab/services/makeway", "notebooks stay inside"


def test_an_add_on_follows_the_other_chart(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, {"mode": "addOn", "zeroToJupyterHub": {"subdomainHost": f"https://{NAME}"}})
    result = variables(manifests)
    assert result["JUPYTERHUB_HOST"] == f"https://{NAME}"
    assert result["JUPYTERHUB_OAUTH_CALLBACK_URL"].startswith(f"https://makeway--service.{NAME}/")


@pytest.mark.parametrize("given", ["", None])
def test_without_a_host_nothing_changes(helm: Helm, tmp_path: Path, given: str | None) -> None:
    manifests = rendered(helm, tmp_path, values(given, enabled=True, host=NAME))
    (ingress,) = of_kind(manifests, "Ingress")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == [NAME]
    assert not {"JUPYTERHUB_HOST", "JUPYTERHUB_OAUTH_CALLBACK_URL"} & set(variables(manifests))
    assert "--host-routing" not in pod_specs(manifests)["makeway-proxy"]["containers"][0]["command"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (values(f"https://{NAME}", enabled=True, host="other.example.com"), f"proxy.ingress.host: .* it is {NAME}"),
        (values(f"https://{NAME}", enabled=True, host=f"*.{NAME}"), f"the chart adds ..{NAME} to it"),
        (values(f"http://{NAME}", enabled=True, host=NAME, tlsSecret="tls"), f"by https: write https://{NAME}"),
    ],
)
def test_what_cannot_work_is_refused(helm: Helm, tmp_path: Path, given: Object, words: str) -> None:
    with pytest.raises(KubeProblem, match=words):
        rendered(helm, tmp_path, given)


def test_another_hook_is_refused(helm: Helm, tmp_path: Path) -> None:
    given = values(f"https://{NAME}")
    given["hub"]["config"]["JupyterHub"]["subdomain_hook"] = "legacy"
    with pytest.raises(KubeProblem, match="the chart knows the names of the default, idna, only"):
        rendered(helm, tmp_path, given)
