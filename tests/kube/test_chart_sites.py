"""What the chart makes of the values of other clusters: users, rights, certificates, proxies, routes, names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import (
    ADD_ON,
    ALL,
    CHART,
    EVERYTHING,
    JOBS,
    NAMESPACE,
    STANDALONE,
    Object,
    hub_files,
    of_kind,
    pod_specs,
    rendered,
    written,
)
from makeway_quota.backends.base import StartOrder
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, WorkerResources, user_and_group, worker_pod
from makeway_quota.backends.kubernetes.pods.template import resources_setting, template_setting
from makeway_quota.values import Place
from traitlets.config import Config, LazyConfigValue

from kube_cluster.helm import Helm
from kube_cluster.problems import KubeProblem

pytestmark = pytest.mark.kube

CLUSTER_KINDS = ("ClusterRole", "ClusterRoleBinding", "Namespace", "PriorityClass")
"""Kinds of the chart's objects that are in no namespace"""

ORDER = StartOrder(
    "j1", 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, (Place("n", (0,), (1000,)),), 30.0, cpu=1000, memory=512
)


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


def pods(manifests: list[Object]) -> dict[str, Object]:
    """Return metadata and spec of all pods that the chart makes itself, by what makes them."""
    kinds = ("Deployment", "DaemonSet", "Job")
    result = {one["metadata"]["name"]: one["spec"]["template"] for one in manifests if one["kind"] in kinds}
    return result | {one["metadata"]["name"]: one for one in of_kind(manifests, "Pod")}


def environment(manifests: list[Object]) -> dict[str, Any]:
    (container,) = pod_specs(manifests)["makeway-service"]["containers"]
    return {one["name"]: one.get("value") for one in container["env"]}


def job_pod(manifests: list[Object]) -> Object:
    """Return the pod of a job as the service makes it with the chart's variables."""
    given = environment(manifests)
    settings = PodSettings(
        *(JOBS, "here", given["MAKEWAY_WORKER_URL"], "makeway:1", "notebook:1"),
        run_as=user_and_group(given["MAKEWAY_KUBE_RUN_AS"]),
        cpu_limits=given.get("MAKEWAY_KUBE_CPU_LIMITS") == "1",
        launcher_resources=resources_setting(given.get("MAKEWAY_KUBE_LAUNCHER_RESOURCES") or ""),
        template=template_setting(given.get("MAKEWAY_KUBE_POD") or ""),
    )
    return worker_pod(settings, ORDER, 0, "a", "t", WorkerResources())


def spawner_traits(manifests: list[Object], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Config:
    """Return what the Hub's configuration sets of KubeSpawner."""
    for name, text in hub_files(manifests).items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("DUMMY_PASSWORD", "SERVICE_TOKEN", "SPAWNER_TOKEN"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("POD_NAMESPACE", NAMESPACE)
    c = Config()
    file = folder / "jupyterhub_config.py"
    code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    exec(code, {"get_config": lambda: c, "__file__": str(file)})
    result = c.KubeSpawner
    assert not [one for one in result.values() if isinstance(one, LazyConfigValue)]
    return result


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_where_the_platform_assigns_users_no_pod_names_one(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Object
) -> None:
    manifests = rendered(helm, tmp_path, values | {"podSecurity": {"users": "platform"}})
    for name, template in pods(manifests).items():
        text = json.dumps(template)
        assert not [field for field in ("runAsUser", "runAsGroup", "fsGroup") if f'"{field}' in text], name
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True, name
    text = json.dumps(job_pod(manifests))
    assert "runAsUser" not in text
    assert "fsGroup" not in text
    if values != ADD_ON:
        traits = spawner_traits(manifests, monkeypatch, tmp_path)
        assert "uid" not in traits
        assert "fs_gid" not in traits
        assert "runAsUser" not in traits["container_security_context"]
        assert "fsGroup" not in traits["pod_security_context"]
        assert traits["environment"]["USER"] == "jovyan"


PEM = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("given", [{"pem": PEM}, {"configMap": "trusted", "key": "bundle.pem"}], ids=["pem", "map"])
@pytest.mark.parametrize("values", [STANDALONE, ADD_ON, EVERYTHING], ids=["standalone", "add-on", "everything"])
def test_one_value_brings_certificate_authorities_to_every_part(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Object, given: Object
) -> None:
    manifests = rendered(helm, tmp_path, values | {"certificateAuthorities": given})
    maps = {(one["metadata"].get("namespace"), one["metadata"]["name"]) for one in of_kind(manifests, "ConfigMap")}
    specs = {name: pod_specs(manifests)[name] for name in ("makeway-service", "makeway-hub") if values != ADD_ON}
    doctor = pods(manifests)["makeway-test"]["spec"]
    for name, spec in {**specs, "doctor": doctor, "job": job_pod(manifests)["spec"]}.items():
        (container,) = spec["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        paths = {variables[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")}
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert paths == {f"{mounts['certificates']}/ca.crt"}, name
        (volume,) = [one["configMap"] for one in spec["volumes"] if one["name"] == "certificates"]
        assert [one["key"] for one in volume["items"]] == [given.get("key", "ca.crt")]
        space = JOBS if name == "job" else NAMESPACE
        assert "configMap" in given or (space, volume["name"]) in maps, name
    if values != ADD_ON:
        more = {"hub": {"config": {"KubeSpawner": {"environment": {"A": "b"}, "volumes": {"data": {"name": "data"}}}}}}
        traits = spawner_traits(
            rendered(helm, tmp_path, {"certificateAuthorities": given} | more), monkeypatch, tmp_path
        )
        assert traits["environment"].items() >= {"A": "b", "SSL_CERT_FILE": "/etc/makeway-certificates/ca.crt"}.items()
        assert set(traits["volumes"]) == {"data", "certificates"}
        assert traits["volume_mounts"]["certificates"]["mountPath"] == "/etc/makeway-certificates"


def test_one_value_brings_the_http_proxy_to_every_part_and_not_between_them(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: Object = {
        "httpProxy": {"url": "http://proxy.example.com:3128", "noProxy": "10.0.0.0/8"},
        "clusterDomain": "k8s.example",
        "service": {"extraEnv": [{"name": "NO_PROXY", "value": "mine"}]},
    }
    manifests = rendered(helm, tmp_path, values)
    for name in ("makeway-service", "makeway-hub"):
        names = [one["name"] for one in pod_specs(manifests)[name]["containers"][0]["env"]]
        assert len(names) == len(set(names)), "a variable that is there twice is refused by a server-side apply"
        assert {"HTTPS_PROXY", "https_proxy"} <= set(names)
    assert environment(manifests)["NO_PROXY"] == "mine"
    traits = spawner_traits(manifests, monkeypatch, tmp_path)
    job = {one["name"]: one.get("value") for one in job_pod(manifests)["spec"]["containers"][0]["env"]}
    for result in (traits["environment"], job):
        assert result["http_proxy"] == result["HTTPS_PROXY"] == "http://proxy.example.com:3128"
        direct = result["NO_PROXY"].split(",")
        assert {"makeway-hub", "makeway-proxy", ".svc", ".k8s.example", "10.0.0.0/8"} <= set(direct)


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_labels_and_annotations_of_all_pods_reach_every_pod(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Object
) -> None:
    given = {"podLabels": {"cost": "12"}, "podAnnotations": {"sidecar.istio.io/inject": "false"}}
    manifests = rendered(helm, tmp_path, values | given)
    result = {**pods(manifests), "job": job_pod(manifests)}
    assert {"makeway-uninstall", "makeway-service", "job"} <= set(result)
    for name, pod in result.items():
        assert pod["metadata"]["labels"]["cost"] == "12", name
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false", name
    if values != ADD_ON:
        traits = spawner_traits(manifests, monkeypatch, tmp_path)
        assert traits["extra_labels"] == given["podLabels"]
        assert traits["extra_annotations"] == given["podAnnotations"]


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_hook_of_an_uninstallation_runs_under_a_mesh_and_default_deny_policies(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    manifests = rendered(helm, tmp_path, values)
    hook = pods(manifests)["makeway-uninstall"]
    assert hook["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert hook["metadata"]["annotations"]["linkerd.io/inject"] == "disabled"
    (policy,) = of_kind(manifests, "NetworkPolicy", "makeway-uninstall")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= hook["metadata"]["labels"].items()
    ports = {(one["port"], one["protocol"]) for rule in policy["spec"]["egress"] for one in rule["ports"]}
    assert ports == {(53, "UDP"), (53, "TCP"), (443, "TCP"), (6443, "TCP")}
    weights = {
        one["kind"]: int(one["metadata"]["annotations"].get("helm.sh/hook-weight", 0))
        for one in manifests
        if one["metadata"]["name"] == "makeway-uninstall"
    }
    assert weights["NetworkPolicy"] < weights["Job"]


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_no_sidecar_keeps_the_test_of_a_release_from_ending(helm: Helm, tmp_path: Path, values: Object) -> None:
    own = {"service": {**values.get("service", {}), "podLabels": {"cost": "12"}}}
    test = pods(rendered(helm, tmp_path, values | own))["makeway-test"]
    assert test["metadata"]["labels"].items() >= {"sidecar.istio.io/inject": "false", "cost": "12"}.items()
    assert test["metadata"]["annotations"]["linkerd.io/inject"] == "disabled"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_kubectl_means_the_own_container_of_each_pod_where_a_sidecar_comes_first(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    manifests = rendered(helm, tmp_path, values)
    result = {name: pod for name, pod in pods(manifests).items() if name[8:] in ("hub", "proxy", "service")}
    assert len(result) == (1 if values == ADD_ON else 3)
    for name, pod in {**result, "makeway-worker": job_pod(manifests)}.items():
        assert pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] == name[8:]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_an_annotation_or_label_of_a_site_is_in_no_pod_twice(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Object, everywhere: bool
) -> None:
    container = "kubectl.kubernetes.io/default-container"
    given = {
        "podAnnotations": {container: "mesh", "checksum/config": "1"},
        "podLabels": {"app.kubernetes.io/part-of": "ml", "app.kubernetes.io/component": "x", "helm.sh/chart": "mine"},
    }
    parts = ("service",) if values == ADD_ON else ("service", "hub", "proxy")
    own = given if everywhere else {part: {**values.get(part, {}), **given} for part in parts}
    manifests = rendered(helm, tmp_path, values | own)
    result = {f"makeway-{part}": pods(manifests)[f"makeway-{part}"] for part in parts}
    for name, pod in result.items():
        assert pod["metadata"]["annotations"][container] == "mesh", name
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == name[8:]
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "ml"
    if "hub" in parts:
        assert len(result["makeway-hub"]["metadata"]["annotations"]["checksum/config"]) == 64
    if everywhere:
        assert job_pod(manifests)["metadata"]["annotations"][container] == "mesh"
        if values != ADD_ON:
            assert spawner_traits(manifests, monkeypatch, tmp_path)["extra_annotations"][container] == "mesh"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_an_administrator_of_two_namespaces_makes_nothing_elsewhere(helm: Helm, tmp_path: Path, values: Object) -> None:
    mine: Object = {"rbac": {"createClusterRole": False}, "priorityClasses": {"create": False}}
    jobs = {**values.get("jobs", {}), "createNamespace": False}
    for one in rendered(helm, tmp_path, values | mine | {"jobs": jobs}):
        assert one["kind"] not in ("ClusterRole", "ClusterRoleBinding", "PriorityClass", "Namespace")
        assert one["metadata"].get("namespace", NAMESPACE) in (NAMESPACE, JOBS)


@pytest.mark.parametrize(("values", "verbs"), [({}, ["create", "list"]), ({"readEvents": False}, ["create"])])
def test_a_site_may_keep_the_events_of_its_jobs_from_the_service(
    helm: Helm, tmp_path: Path, values: Object, verbs: list[str]
) -> None:
    roles = of_kind(rendered(helm, tmp_path, {"rbac": values}), "Role")
    (result,) = [
        rule["verbs"]
        for role in roles
        if role["metadata"].get("namespace") == JOBS
        for rule in role["rules"]
        if "events" in rule["resources"]
    ]
    assert result == verbs


@pytest.mark.parametrize("length", [40, 58, 59, 63])
def test_the_jobs_namespace_of_a_long_one_has_a_valid_name_of_its_own(helm: Helm, tmp_path: Path, length: int) -> None:
    def name(namespace: str) -> str:
        text = helm.template(CHART, "makeway", namespace, ("--values", written(tmp_path, STANDALONE)))
        manifests = [one for one in yaml.safe_load_all(text) if one]
        (result,) = of_kind(manifests, "Namespace")
        assert {one["metadata"].get("namespace", namespace) for one in manifests} == {
            namespace,
            result["metadata"]["name"],
        }
        assert environment(manifests)["MAKEWAY_KUBE_NAMESPACE"] == result["metadata"]["name"]
        return str(result["metadata"]["name"])

    one, other = "n" * length, "n" * (length - 1) + "m"
    assert len(name(one)) <= 63
    assert name(one) != name(other)
    assert name(one).endswith("-jobs")
    assert length > 58 or name(one) == f"{one}-jobs", "an upgrade keeps it"


def test_the_pre_puller_leaves_nodes_of_other_systems_alone(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, STANDALONE)
    (puller,) = of_kind(manifests, "DaemonSet")
    assert puller["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
    more = {"prePuller": {"nodeSelector": {"kubernetes.io/arch": "amd64"}}}
    (puller,) = of_kind(rendered(helm, tmp_path, more), "DaemonSet")
    assert puller["spec"]["template"]["spec"]["nodeSelector"] == {
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }


def test_dns_on_another_port_and_more_egress_of_the_proxy_are_values(helm: Helm, tmp_path: Path) -> None:
    more = {"ports": [{"port": 15012, "protocol": "TCP"}]}
    values = {"networkPolicy": {"dnsPorts": [53, 5353], "extraEgress": {"proxy": [more]}}}
    manifests = rendered(helm, tmp_path, values)
    for policy in of_kind(manifests, "NetworkPolicy"):
        ports = {one["port"] for rule in policy["spec"]["egress"] for one in rule.get("ports", ())}
        assert {53, 5353} <= ports, policy["metadata"]["name"]
    (proxy,) = of_kind(manifests, "NetworkPolicy", "makeway-proxy")
    assert more in proxy["spec"]["egress"]


def test_an_ingress_and_a_route_take_the_prefix_of_the_portal_only(helm: Helm, tmp_path: Path) -> None:
    values: Object = {
        "hub": {"config": {"JupyterHub": {"base_url": "/gpus"}}},
        "proxy": {
            "ingress": {
                "enabled": True,
                "host": "example.com",
                "tlsSecret": "gpus-tls",
                "annotations": {"cert-manager.io/cluster-issuer": "letsencrypt"},
            },
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway", "namespace": "infra"}]},
        },
    }
    manifests = rendered(helm, tmp_path, values)
    (ingress,) = of_kind(manifests, "Ingress")
    assert ingress["metadata"]["annotations"] == {"cert-manager.io/cluster-issuer": "letsencrypt"}
    assert ingress["spec"]["tls"] == [{"hosts": ["example.com"], "secretName": "gpus-tls"}]
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/gpus", "Prefix")
    (route,) = of_kind(manifests, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/gpus"}}]
    assert rule["timeouts"] == {"request": "0s"}
    assert route["spec"]["parentRefs"] == [{"name": "gateway", "namespace": "infra"}]
    (backend,) = rule["backendRefs"]
    (service,) = of_kind(manifests, "Service", backend["name"])
    assert backend["port"] in [one["port"] for one in service["spec"]["ports"]]


def test_services_take_the_family_policy_of_a_dual_stack(helm: Helm, tmp_path: Path) -> None:
    for policy in ("", "PreferDualStack"):
        services = of_kind(rendered(helm, tmp_path, {"ipFamilyPolicy": policy}), "Service")
        assert {one["spec"].get("ipFamilyPolicy", "") for one in services} == {policy}
    blocked = {"networkPolicy": {"blocked": ["10.0.0.0/8", "fd00::/8"]}}
    (jobs,) = of_kind(rendered(helm, tmp_path, blocked), "NetworkPolicy", "makeway-jobs")
    blocks = [peer["ipBlock"] for rule in jobs["spec"]["egress"] for peer in rule.get("to", ()) if "ipBlock" in peer]
    assert blocks == [
        {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]},
        {"cidr": "::/0", "except": ["fd00::/8"]},
    ], "Kubernetes refuses an exception of another family"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_with_a_secret_of_the_site_a_chart_that_is_rendered_twice_is_the_same(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    """Else Argo CD and Flux would find a difference at each synchronization."""
    file = written(tmp_path, values | {"existingSecret": "keys"})
    first, second = (helm.template(CHART, "makeway", NAMESPACE, ("--values", file)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
@pytest.mark.parametrize("name", ["makeway", "portal"])
def test_releases_in_two_namespaces_have_no_object_in_common(
    helm: Helm, tmp_path: Path, values: Object, name: str
) -> None:
    """Else an upgrade of one would change the other, and its uninstallation would take it away."""
    file = written(tmp_path, values)

    def objects(release: str, namespace: str) -> set[tuple[str, str, str]]:
        text = helm.template(CHART, release, namespace, ("--values", file))
        result = [one for one in yaml.safe_load_all(text) if one]
        own = {one["kind"]: "" if one["kind"] in CLUSTER_KINDS else namespace for one in result}
        places = [(one["kind"], one["metadata"].get("namespace", own[one["kind"]])) for one in result]
        return {(*place, one["metadata"]["name"]) for place, one in zip(places, result, strict=True)}

    first, second = objects("makeway", "a"), objects(name, "b")
    assert any(place == "" for _, place, _ in first)
    assert first & second == set()


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
@pytest.mark.parametrize("database", [{}, {"database": {"existingSecret": "postgresql"}}], ids=["sqlite", "postgresql"])
def test_a_new_version_that_never_starts_ends_no_replica_on_postgresql(
    helm: Helm, tmp_path: Path, values: Object, database: Object
) -> None:
    """As after a rollback to a version that refuses the database: one service of SQLite has to end first."""
    (service,) = of_kind(rendered(helm, tmp_path, values | database), "Deployment", "makeway-service")
    own = service["spec"]["template"]["spec"]["volumes"]
    sqlite = any("persistentVolumeClaim" in one for one in own if one["name"] == "state")
    surge = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert service["spec"]["strategy"] == ({"type": "Recreate"} if sqlite else surge)
    assert not (database and sqlite)
    probes = service["spec"]["template"]["spec"]["containers"][0]
    assert probes["readinessProbe"]["httpGet"]["path"].endswith("/readyz"), "which a service that refuses never answers"


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_every_pod_pulls_with_the_secrets_of_the_site(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: Object
) -> None:
    manifests = rendered(helm, tmp_path, values | {"images": {"pullSecrets": ["login"]}})
    for name, template in pods(manifests).items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "login"}], name
    (account,) = of_kind(manifests, "ServiceAccount", "makeway-job")
    assert account["imagePullSecrets"] == [{"name": "login"}], "which admission adds to the pods of jobs"
    if values != ADD_ON:
        assert spawner_traits(manifests, monkeypatch, tmp_path)["image_pull_secrets"] == ["login"]


@pytest.mark.parametrize("name", ["registry.example/Makeway/hub", "hub:1", "registry/hub@sha256:1", "a b"])
def test_a_name_that_no_image_can_have_is_refused(helm: Helm, tmp_path: Path, name: str) -> None:
    with pytest.raises(KubeProblem, match="repository"):
        rendered(helm, tmp_path, {"images": {"hub": {"repository": name}}})


@pytest.mark.parametrize("name", ["hub", "Registry.Example:5000/a/b-c__d.e", "localhost:5000/hub", "quay.io/x/y"])
def test_a_name_that_an_image_can_have_is_taken(helm: Helm, tmp_path: Path, name: str) -> None:
    assert rendered(helm, tmp_path, {"images": {"hub": {"repository": name}}})
