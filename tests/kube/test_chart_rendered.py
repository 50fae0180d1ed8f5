"""What Helm renders of the chart: safe pods, network policies, and refusals in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
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
from makeway_quota.backends.kubernetes.cluster.cluster_lease import lease_name
from makeway_quota.backends.kubernetes.pods.gang import network_policy
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings, WorkerResources, worker_pod
from makeway_quota.values import Place
from reachability import Outside, Pod, Policies

from kube_cluster.helm import Helm
from kube_cluster.problems import KubeProblem

pytestmark = pytest.mark.kube

WITHOUT_TRAIT = {"MAKEWAY_TICKET_SECRET", "MAKEWAY_METRICS_TOKEN", "MAKEWAY_URL"}
"""Variables that `load` reads without a trait."""


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_helm_finds_nothing_to_complain_about(helm: Helm, tmp_path: Path, values: Object) -> None:
    message = helm.run("lint", "--strict", CHART, "--values", written(tmp_path, values))
    assert "0 chart(s) failed" in message


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_each_pod_is_restricted_and_writes_to_volumes_only(helm: Helm, tmp_path: Path, values: Object) -> None:
    specs = pod_specs(rendered(helm, tmp_path, values))
    assert len(specs) >= 2
    for name, spec in specs.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")), name
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), name
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_only_the_service_and_the_hub_have_a_token_of_the_api_server(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    specs = pod_specs(rendered(helm, tmp_path, values))
    with_token = {name for name, spec in specs.items() if spec["automountServiceAccountToken"]}
    assert with_token == {"makeway-service"} | ({"makeway-hub"} & set(specs))


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_every_long_running_container_is_probed(helm: Helm, tmp_path: Path, values: Object) -> None:
    for deployment in of_kind(rendered(helm, tmp_path, values), "Deployment"):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            assert {"livenessProbe", "readinessProbe"} <= set(container), deployment["metadata"]["name"]


def hook_of(manifest: Object) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get("helm.sh/hook", ""))


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_test_of_a_release_sees_the_cluster_as_the_service_does(helm: Helm, tmp_path: Path, values: Object) -> None:
    manifests = rendered(helm, tmp_path, values)
    (pod,) = [one for one in of_kind(manifests, "Pod") if hook_of(one) == "test"]
    (service,) = of_kind(manifests, "Deployment", "makeway-service")
    like, spec = service["spec"]["template"], pod["spec"]
    assert pod["metadata"]["labels"].items() >= like["metadata"]["labels"].items(), "network policies take it for it"
    assert spec["containers"][0]["command"][-1] == "doctor"
    for field in ("serviceAccountName", "securityContext", "imagePullSecrets", "tolerations", "nodeSelector"):
        assert spec.get(field) == like["spec"].get(field), field
    for field in ("image", "env", "securityContext", "volumeMounts"):
        assert spec["containers"][0][field] == like["spec"]["containers"][0][field], field
    assert "ports" not in spec["containers"][0], "the Service sends it no requests"
    assert not any("persistentVolumeClaim" in volume for volume in spec["volumes"]), "the service has them"
    assert spec["activeDeadlineSeconds"] < 300, "Helm waits for five minutes"
    policy = pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert set(policy.split(",")) == {"before-hook-creation", "hook-succeeded", "hook-failed"}


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_test_of_a_release_and_each_replica_reach_the_service(helm: Helm, tmp_path: Path, values: Object) -> None:
    manifests = rendered(helm, tmp_path, values)
    (pod,) = [one for one in of_kind(manifests, "Pod") if hook_of(one) == "test"]
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    policies, test = Policies(manifests, NAMESPACE), Pod(NAMESPACE, pod["metadata"]["labels"])
    (service,) = of_kind(manifests, "Deployment", "makeway-service")
    replica = Pod(NAMESPACE, service["spec"]["template"]["metadata"]["labels"])
    port = urlsplit(variables["MAKEWAY_WORKER_URL"]).port or 80
    for source in (test, replica):
        assert policies.may_reach(source, replica, port)
        assert not policies.may_reach(source, replica, port + 1)


@pytest.mark.parametrize("cluster_wide", [True, False])
def test_the_service_may_read_what_doctor_looks_at_while_helm_test_runs(
    helm: Helm, tmp_path: Path, cluster_wide: bool
) -> None:
    values = {"images": {"pullSecrets": ["login"]}, "rbac": {"createClusterRole": cluster_wide}}
    hooks = [one for one in rendered(helm, tmp_path, values) if hook_of(one) == "test"]
    (pod,) = of_kind(hooks, "Pod")
    roles = [*of_kind(hooks, "Role"), *of_kind(hooks, "ClusterRole")]
    bindings = [*of_kind(hooks, "RoleBinding"), *of_kind(hooks, "ClusterRoleBinding")]
    assert [one["kind"] for one in roles] == ["Role", "ClusterRole"][: 1 + cluster_wide]
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (pod["spec"]["serviceAccountName"], NAMESPACE)
        for one in (role, binding):
            notes = one["metadata"]["annotations"]
            assert "hook-failed" in notes["helm.sh/hook-delete-policy"]
            assert int(notes["helm.sh/hook-weight"]) < 0, "before the pod, which has none"
        for rule in role["rules"]:
            assert set(rule["verbs"]) <= {"get", "list"}
            assert "secrets" not in rule["resources"] or rule["resourceNames"] == ["login"]
    assert {one["metadata"].get("namespace") for one in (roles[0], bindings[0])} == {JOBS}


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_hook_that_ends_the_work_is_restricted_and_has_rights_only_for_as_long(
    helm: Helm, tmp_path: Path, values: Object
) -> None:
    manifests = rendered(helm, tmp_path, values)
    hooks = [one for one in manifests if hook_of(one) == "pre-delete"]
    kinds = sorted(one["kind"] for one in hooks)
    assert kinds == ["Job", "NetworkPolicy", "Role", "Role", "RoleBinding", "RoleBinding", "ServiceAccount"]
    assert {one["metadata"]["name"] for one in hooks} == {"makeway-uninstall"}
    for one in hooks:
        policy = one["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert set(policy.split(",")) == {"before-hook-creation", "hook-succeeded", "hook-failed"}
    (job,) = of_kind(hooks, "Job")
    assert job["spec"]["activeDeadlineSeconds"] < 300, "Helm waits for five minutes"
    spec = job["spec"]["template"]["spec"]
    assert (spec["securityContext"]["runAsNonRoot"], spec["restartPolicy"]) == (True, "Never")
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["containers"][0]["resources"]["requests"] == {"cpu": 0, "memory": 0}, "a full node has room for it"
    given = {
        (verb, kind, one["metadata"].get("namespace", NAMESPACE))
        for one in of_kind(hooks, "Role")
        for rule in one["rules"]
        for verb in rule["verbs"]
        for kind in rule["resources"]
    }
    notebooks = {("delete", "pods", NAMESPACE)} if values != ADD_ON else set()
    listed = {("list", "pods", NAMESPACE), ("list", "pods", JOBS), ("delete", "pods", JOBS)}
    lease = {("delete", "leases", JOBS)}
    assert given == listed | {("delete", "deployments", NAMESPACE)} | notebooks | lease
    command = " ".join(spec["containers"][0]["command"])
    name = lease_name(variables(manifests)["MAKEWAY_KUBE_INSTANCE"])
    assert f"--lease={JOBS}/{name}" in command, "the Lease in the name of the database goes, too"
    assert [
        rule["resourceNames"]
        for one in of_kind(hooks, "Role")
        for rule in one["rules"]
        if "leases" in rule["resources"]
    ] == [[name]]
    assert ("makeway-hub" in command) == ("component=notebook" in command) == (values != ADD_ON)


def test_pods_of_notebooks_have_names_of_their_release_and_homes_those_of_earlier_charts(
    helm: Helm, tmp_path: Path
) -> None:
    values = json.loads(hub_files(rendered(helm, tmp_path, STANDALONE))["values.json"])
    assert values["podName"] == "makeway-nb-{user_server}"
    assert (
        'pvc_name_template = "home-{user_server}"'
        in hub_files(rendered(helm, tmp_path, STANDALONE))["jupyterhub_config.py"]
    )


def variables(manifests: list[Object]) -> dict[str, Any]:
    spec = pod_specs(manifests)["makeway-service"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in spec["containers"][0]["env"]}


@pytest.mark.parametrize("values", ALL.values(), ids=ALL)
def test_the_service_knows_every_variable_that_it_gets(helm: Helm, tmp_path: Path, values: Object) -> None:
    from makeway_api.settings import declared
    from makeway_quota.settings import ServiceSettings

    known = {setting.variable for setting in declared(ServiceSettings).values()}
    given = {name for name in variables(rendered(helm, tmp_path, values)) if name.startswith("MAKEWAY_")}
    assert given <= known | WITHOUT_TRAIT


def test_the_service_reads_its_variables(helm: Helm, tmp_path: Path) -> None:
    from makeway_quota.settings import load

    given = variables(rendered(helm, tmp_path, EVERYTHING))
    plain = {name: value for name, value in given.items() if isinstance(value, str)}
    settings = load(environ=plain | {"MAKEWAY_DB_URL": "postgresql+psycopg://postgres/makeway\n"})
    assert settings.db_url == "postgresql+psycopg://postgres/makeway", "a file that became a Secret ends with a newline"
    assert (settings.host, settings.port, settings.prefix) == ("::", 8765, "/services/makeway/")
    assert (settings.tick_seconds, settings.keep_events, settings.keep) == (2, 600_000, True)
    assert settings.artifacts_s3 == "s3://bucket/makeway"
    assert settings.public_url == "http://makeway-proxy/services/makeway"
    pods = settings.kubernetes
    assert (settings.backend, pods.namespace, pods.instance) == ("kubernetes", JOBS, "makeway.makeway")
    assert pods.worker_url == "http://makeway-service.makeway.svc:8765/services/makeway"
    assert (pods.launcher_image, pods.image) == ("makeway.test/quota-service:1", "makeway.test/notebook:1")
    assert (pods.service_account, pods.checkpoint_claim) == ("makeway-job", "makeway-checkpoints")
    assert (pods.run_as, pods.tolerations) == ("1000:100", ("dedicated=gpus:NoSchedule", "spot"))


def test_the_service_reads_claims_only_where_jobs_have_homes(helm: Helm, tmp_path: Path) -> None:
    def read(values: Object) -> tuple[list[str], Any]:
        manifests = rendered(helm, tmp_path, values)
        (role,) = [
            one for one in of_kind(manifests, "Role", "makeway-service") if one["metadata"].get("namespace") == JOBS
        ]
        verbs = [rule["verbs"] for rule in role["rules"] if "persistentvolumeclaims" in rule["resources"]]
        return [verb for some in verbs for verb in some], variables(manifests).get("MAKEWAY_KUBE_HOME_CLAIM")

    assert read(STANDALONE) == ([], None)
    assert read({**STANDALONE, "jobs": {"home": {"claim": "homes/{user}"}}}) == (["get"], "homes/{user}")


def test_sqlite_has_one_replica_and_a_volume_and_postgresql_two_and_none(helm: Helm, tmp_path: Path) -> None:
    for values, replicas, claims in ((STANDALONE, 1, 1), (EVERYTHING, 2, 0)):
        manifests = rendered(helm, tmp_path, values)
        (deployment,) = of_kind(manifests, "Deployment", "makeway-service")
        assert deployment["spec"]["replicas"] == replicas
        for name in ("makeway-service", "makeway-files"):
            assert len(of_kind(manifests, "PersistentVolumeClaim", name)) == claims


def test_large_files_have_a_volume_of_their_own_unless_the_site_says_otherwise(helm: Helm, tmp_path: Path) -> None:
    def read(values: Object) -> tuple[dict[str, str], dict[str, str]]:
        manifests = rendered(helm, tmp_path, values)
        spec = pod_specs(manifests)["makeway-service"]
        mounts = {one["name"]: one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
        claims = {
            one["name"]: one["persistentVolumeClaim"]["claimName"]
            for one in spec["volumes"]
            if "persistentVolumeClaim" in one
        }
        sizes = {
            one["metadata"]["name"]: one["spec"]["resources"]["requests"]["storage"]
            for one in of_kind(manifests, "PersistentVolumeClaim")
        }
        assert set(claims.values()) <= set(sizes)
        folder = variables(manifests).get("MAKEWAY_ARTIFACTS_DIR")
        assert folder == ("/files/artifacts" if "files" in claims else None)
        return {mounts[name]: claim for name, claim in claims.items()}, sizes

    one = {"/data": "makeway-service"}
    for mode in ({}, {"mode": "addOn"}):
        result, sizes = read({**mode, "artifacts": {"storage": {"size": "7Gi"}}})
        assert result == {**one, "/files": "makeway-files"}
        assert (sizes["makeway-service"], sizes["makeway-files"]) == ("10Gi", "7Gi")
    for values in ({"artifacts": {"storage": {"size": ""}}}, {"artifacts": {"s3": "s3://bucket"}}):
        result, sizes = read(values)
        assert result == one
        assert "makeway-files" not in sizes


def test_images_are_pulled_once_each_beside_each_other_and_the_launchers_with_each(helm: Helm, tmp_path: Path) -> None:
    offered = "images: [{name: one, image: 'example.com/lab:1'}, {name: two, image: 'example.com/lab:2'}]"
    policy = f"profiles: [{{name: a, image: 'example.com/jax:1'}}, {{name: b, {offered}}}]"
    sets = of_kind(rendered(helm, tmp_path, EVERYTHING | {"policy": policy}), "DaemonSet")
    templates = [one["spec"]["template"] for one in sets]
    pulled = [[container["image"] for container in one["spec"]["initContainers"]] for one in templates]
    offered = ["example.com/jax:1", "example.com/lab:1", "example.com/lab:2"]
    assert pulled == [[image] for image in ("makeway.test/notebook:1", *offered, "example.com/torch:2.9")]
    assert {one["spec"]["containers"][0]["image"] for one in templates} == {"makeway.test/quota-service:1"}
    selectors = [json.dumps(one["spec"]["selector"]["matchLabels"], sort_keys=True) for one in sets]
    assert len(set(selectors)) == len({one["metadata"]["name"] for one in sets}) == len(sets)
    for one, template in zip(sets, templates, strict=True):
        assert one["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_scheduler_preempts_nothing_for_makeways_pods(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, STANDALONE)
    classes = {one["metadata"]["name"]: one for one in of_kind(manifests, "PriorityClass")}
    assert set(classes) == {f"makeway-makeway-{kind}" for kind in ("portal", "guaranteed", "preemptible")}
    assert {one["preemptionPolicy"] for one in classes.values()} == {"Never"}
    assert variables(manifests)["MAKEWAY_KUBE_PRIORITY_CLASS"] == "makeway-makeway-preemptible"
    of_notebooks = set(json.loads(hub_files(manifests)["values.json"])["priorityClasses"].values())
    assert of_notebooks == set(classes) - {"makeway-makeway-portal"}
    none = rendered(helm, tmp_path, {"priorityClasses": {"create": False}})
    assert not of_kind(none, "PriorityClass")
    assert "MAKEWAY_KUBE_PRIORITY_CLASS" not in variables(none)


@pytest.mark.covers("F71")
def test_the_clusters_autoscaler_is_asked_for_nodes_only_where_the_values_say_so(helm: Helm, tmp_path: Path) -> None:
    def records(manifests: list[Object]) -> list[Object]:
        roles = [one for one in of_kind(manifests, "Role") if one["metadata"]["name"] == "makeway-service"]
        return [rule for role in roles for rule in role["rules"] if "configmaps" in rule["resources"]]

    usual = rendered(helm, tmp_path, STANDALONE)
    assert (variables(usual)["MAKEWAY_BACKEND"], records(usual)) == ("kubernetes", [])
    manifests = rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": True}})
    given = variables(manifests)
    assert given["MAKEWAY_BACKEND"] == "kubernetes,machines"
    assert given["MAKEWAY_KUBE_PLACEHOLDER_CLASS"] == "makeway-makeway-placeholder"
    (placeholders,) = [one for one in of_kind(manifests, "PriorityClass") if one["value"] < 0]
    assert (placeholders["value"], placeholders["preemptionPolicy"]) == (-5, "Never")
    (rule,) = records(manifests)
    assert rule["verbs"] == ["create", "get", "list", "update", "delete"]
    assert "MAKEWAY_DEPLOYMENT_FILE" not in given
    assert not _rights(manifests, "provisioningrequests")
    asks = rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": True, "provisioningRequests": True}})
    assert _rights(asks, "provisioningrequests") == ["create", "get", "list", "delete"]
    assert _rights(asks, "podtemplates") == ["create", "get", "delete"]
    without = rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": True}, "priorityClasses": {"create": False}})
    assert "MAKEWAY_KUBE_PLACEHOLDER_CLASS" not in variables(without)


def _rights(manifests: list[Object], resource: str) -> list[str]:
    """Return what the service may do with a resource in the namespace of jobs."""
    roles = [one for one in of_kind(manifests, "Role") if one["metadata"]["name"] == "makeway-service"]
    return [verb for role in roles for rule in role["rules"] if resource in rule["resources"] for verb in rule["verbs"]]


@pytest.mark.covers("F60", "F61")
def test_what_asks_for_nodes_is_a_part_of_the_service_that_starts_by_itself_on_no_gpu(
    helm: Helm, tmp_path: Path
) -> None:
    usual, grows = (rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": on}}) for on in (False, True))
    assert pod_specs(grows).keys() == pod_specs(usual).keys(), "no further pod to start"
    [service] = pod_specs(grows)["makeway-service"]["containers"]
    assert service["name"] == pod_specs(usual)["makeway-service"]["containers"][0]["name"]
    for name, spec in pod_specs(grows).items():
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            asked = {*container["resources"].get("limits", ()), *container["resources"].get("requests", ())}
            assert asked <= {"cpu", "memory", "ephemeral-storage"}, name
    [deployment] = [one for one in of_kind(grows, "Deployment") if one["metadata"]["name"] == "makeway-service"]
    assert deployment["spec"]["replicas"] >= 1


@pytest.mark.covers("F71")
def test_a_deployment_of_the_values_is_that_which_an_empty_database_starts_with(helm: Helm, tmp_path: Path) -> None:
    text = "version: 1\nname: cluster\nprovider: kubernetes\n"
    manifests = rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": True, "deployment": text}})
    (files,) = [one["data"] for one in of_kind(manifests, "ConfigMap") if one["metadata"]["name"] == "makeway-policy"]
    place = Path(variables(manifests)["MAKEWAY_DEPLOYMENT_FILE"])
    assert (str(place.parent), files[place.name]) == ("/etc/makeway", text)
    off = rendered(helm, tmp_path, {"clusterAutoscaler": {"enabled": False, "deployment": text}})
    assert "MAKEWAY_DEPLOYMENT_FILE" not in variables(off), "no backend would launch it"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"service": {"replicas": 2}}, "several replicas share a PostgreSQL"),
        ({"artifacts": {"existingSecret": "s3-keys"}}, "artifacts.s3 names no bucket"),
        ({"jobs": {"namespace": NAMESPACE}}, "jobs need a namespace of their own"),
        ({"proxy": {"ingress": {"enabled": True}}}, "host"),
        ({"replicas": 2}, "replicas"),
        ({"service": {"settings": {"tickSecond": 1}}}, "tickSecond"),
        ({"service": {"settings": {"tickSeconds": 0}}}, "tickSeconds"),
        ({"mode": "cluster"}, "mode"),
        ({"hub": {"config": {"jupyterHub": {}}}}, "jupyterHub"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, tmp_path: Path, values: Object, said: str) -> None:
    with pytest.raises(KubeProblem) as problem:
        rendered(helm, tmp_path, values)
    assert said in str(problem.value)


@pytest.mark.parametrize(
    ("values", "name", "instead"),
    [
        ({"proxy": {"ingress": {"enabled": True, "host": "a.b"}}}, "proxy.ingress", "ingress in the values of Zero"),
        ({"proxy": {"service": {"type": "NodePort"}}}, "proxy.service", "proxy.service in the values of Zero"),
        ({"hub": {"makewayAdmins": {"users": ["ana"]}}}, "hub.makewayAdmins", "admin_users and admin_groups in z2jh"),
        ({"hub": {"config": {"A": {"b": 1}}}}, "hub.config", "hub.config in the values of Zero"),
        ({"hub": {"resources": None}}, "hub.resources", "hub.resources in"),
        ({"hub": {"priorityClassName": "high"}}, "hub.priorityClassName", "scheduling.podPriority"),
        ({"proxy": {"tolerations": [{}]}}, "proxy.tolerations", "proxy.chp.tolerations"),
        ({"notebooks": {"home": {"size": "1Gi"}}}, "notebooks.home", "singleuser.storage"),
        (
            {"notebooks": {"priorityClasses": {"guaranteed": "high"}}},
            "notebooks.priorityClasses",
            "guaranteed_priority_class",
        ),
        ({"images": {"hub": {"tag": "2"}}}, "images.hub", "hub.image"),
        ({"images": {"proxy": {"tag": "2"}}}, "images.proxy", "proxy.chp.image"),
        ({"networkPolicy": {"extraEgress": {"hub": [{}]}}}, "networkPolicy.extraEgress.hub", "hub.networkPolicy"),
        (
            {"networkPolicy": {"extraEgress": {"notebooks": [{}]}}},
            "networkPolicy.extraEgress.notebooks",
            "singleuser.networkPolicy",
        ),
    ],
)
def test_as_an_add_on_values_without_effect_are_refused_with_where_they_belong(
    helm: Helm, tmp_path: Path, values: Object, name: str, instead: str
) -> None:
    assert rendered(helm, tmp_path, values), "standalone they are valid"
    with pytest.raises(KubeProblem) as problem:
        rendered(helm, tmp_path, {"mode": "addOn", **values})
    assert f"{name} has no effect in mode addOn. Remove it here, and set {instead}" in str(problem.value)


def test_a_value_that_is_only_of_this_chart_is_refused_as_an_add_on_without_another_place(
    helm: Helm, tmp_path: Path
) -> None:
    with pytest.raises(KubeProblem, match=r"proxy\.publicUrl has no effect in mode addOn\. Remove it here\.\n"):
        rendered(helm, tmp_path, {"mode": "addOn", "proxy": {"publicUrl": "https://lab.example"}})


# -- who may reach whom

OWN = {"app.kubernetes.io/name": "makeway", "app.kubernetes.io/instance": "makeway"}
DNS = Pod("kube-system", {"k8s-app": "kube-dns"})
INTERNET, METADATA, API_SERVER = Outside("93.184.216.34"), Outside("169.254.169.254"), Outside("10.96.0.1")


def part(component: str) -> Pod:
    return Pod(NAMESPACE, {**OWN, "app.kubernetes.io/component": component})


def z2jh(component: str) -> Pod:
    return Pod(NAMESPACE, {"app": "jupyterhub", "component": component})


JOB = Pod(JOBS, {"app.kubernetes.io/name": "makeway-job"})
ELSEWHERE = Pod("default", {"app": "curious"})
PROMETHEUS = Pod("monitoring")


@pytest.fixture(scope="module")
def standalone(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Return the network policies of the chart alone."""
    return Policies(rendered(helm, tmp_path_factory.mktemp("values"), STANDALONE), NAMESPACE)


def test_the_portal_can_work(standalone: Policies) -> None:
    hub, proxy, service, notebook = (part(name) for name in ("hub", "proxy", "service", "notebook"))
    for source, target, port in (
        (ELSEWHERE, proxy, 8000),
        (notebook, proxy, 8000),
        (notebook, hub, 8081),
        (proxy, hub, 8081),
        (proxy, service, 8765),
        (proxy, notebook, 8888),
        (hub, proxy, 8001),
        (hub, service, 8765),
        (hub, notebook, 8888),
        (service, hub, 8081),
        (service, API_SERVER, 443),
        (hub, API_SERVER, 6443),
        (JOB, service, 8765),
        (JOB, INTERNET, 443),
        (PROMETHEUS, service, 8765),
    ):
        assert standalone.may_reach(source, target, port), (source, target, port)
    for source in (hub, proxy, service, notebook, JOB):
        assert standalone.may_reach(source, DNS, 53, "UDP"), source


def test_notebooks_and_jobs_reach_nothing_else(standalone: Policies) -> None:
    hub, proxy, service, notebook = (part(name) for name in ("hub", "proxy", "service", "notebook"))
    for source, target, port in (
        (JOB, API_SERVER, 443),
        (JOB, METADATA, 80),
        (JOB, hub, 8081),
        (JOB, proxy, 8001),
        (JOB, notebook, 8888),
        (JOB, ELSEWHERE, 80),
        (JOB, JOB, 29500),
        (notebook, API_SERVER, 443),
        (notebook, METADATA, 80),
        (notebook, service, 8765),
        (notebook, proxy, 8001),
        (notebook, notebook, 8888),
        (notebook, JOB, 29500),
        (ELSEWHERE, JOB, 29500),
        (ELSEWHERE, service, 8765),
        (ELSEWHERE, hub, 8081),
        (ELSEWHERE, notebook, 8888),
        (service, METADATA, 80),
        (service, notebook, 8888),
    ):
        assert not standalone.may_reach(source, target, port), (source, target, port)


def test_the_workers_of_a_gang_reach_each_other_by_the_policy_of_their_attempt(helm: Helm, tmp_path: Path) -> None:
    settings = PodSettings(JOBS, "makeway.makeway", "http://makeway", "launcher:1", "notebook:1")
    places = tuple(Place("node-0", (0,), (1000,)) for _ in range(2))
    orders = [StartOrder(job, 1, "fit", "ana", "rnd", "gpu1", ("true",), {}, places, 30.0) for job in ("j-1", "j-2")]
    of_gangs = [network_policy(settings, order, []) for order in orders]
    for one in of_gangs:
        one["metadata"]["namespace"] = JOBS
    policies = Policies([*rendered(helm, tmp_path, STANDALONE), *of_gangs], NAMESPACE)
    (first, second), (other, _) = (
        [
            Pod(JOBS, worker_pod(settings, order, number, "", "tokens", WorkerResources())["metadata"]["labels"])
            for number in (0, 1)
        ]
        for order in orders
    )
    assert policies.may_reach(first, second, 29500)
    assert policies.may_reach(second, first, 40000)
    for target in (other, JOB, part("notebook")):
        assert not policies.may_reach(first, target, 29500)
        assert not policies.may_reach(target, first, 29500)


def test_without_the_internet_jobs_reach_the_service_only(helm: Helm, tmp_path: Path) -> None:
    closed = Policies(rendered(helm, tmp_path, {"networkPolicy": {"internet": False}}), NAMESPACE)
    assert not closed.may_reach(JOB, INTERNET, 443)
    assert closed.may_reach(JOB, part("service"), 8765)


def test_a_dns_cache_on_each_node_is_reached_where_it_is_named(helm: Helm, tmp_path: Path) -> None:
    cache = Outside("169.254.20.10")
    peers = [{"ipBlock": {"cidr": "169.254.20.10/32"}}]
    for dns, reached in (([], False), (peers, True)):
        policies = Policies(rendered(helm, tmp_path, {"networkPolicy": {"dns": dns}}), NAMESPACE)
        for source in (JOB, part("notebook"), part("service")):
            assert policies.may_reach(source, cache, 53, "UDP") is reached
            assert not policies.may_reach(source, cache, 80)


def test_the_api_server_may_be_a_node_that_an_address_block_would_not_name(helm: Helm, tmp_path: Path) -> None:
    for network, named in (({}, False), ({"apiServer": {"cidr": "10.96.0.1/32"}}, True)):
        manifests = rendered(helm, tmp_path, {"networkPolicy": network})
        for name in ("makeway-hub", "makeway-service"):
            (policy,) = of_kind(manifests, "NetworkPolicy", name)
            (rule,) = (one for one in policy["spec"]["egress"] if {"port": 6443, "protocol": "TCP"} in one["ports"])
            assert ("to" in rule) is named
        assert Policies(manifests, NAMESPACE).may_reach(part("service"), API_SERVER, 443)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("", 443),
        ("http://minio:9000", 9000),
        ("https://s3.example:8443/", 8443),
        ("https://s3.example", 443),
        ("http://[fd00::1]:9000", 9000),
        ("http://minio.storage.svc", 80),
    ],
)
def test_the_service_reaches_object_storage_at_the_port_of_its_address(
    helm: Helm, tmp_path: Path, endpoint: str, port: int
) -> None:
    env = [{"name": "AWS_ENDPOINT_URL_S3", "value": endpoint}] if endpoint else []
    values = {"artifacts": {"s3": "s3://bucket/makeway"}, "service": {"extraEnv": env}}
    policies = Policies(rendered(helm, tmp_path, values), NAMESPACE)
    storage = Outside("10.1.2.3")
    reached = {one for one in (80, 9000, 8443, 6000) if policies.may_reach(part("service"), storage, one)}
    assert reached == {port} - {443}, "443 is open for the API server"
    without = Policies(rendered(helm, tmp_path, {"service": {"extraEnv": env}}), NAMESPACE)
    assert port == 443 or not without.may_reach(part("service"), storage, port)


def test_more_is_reached_where_a_rule_says_so(helm: Helm, tmp_path: Path) -> None:
    pods = {"hub": part("hub"), "service": part("service"), "notebooks": part("notebook"), "jobs": JOB}
    data = Outside("10.1.2.3")
    rule = {"to": [{"ipBlock": {"cidr": "10.1.2.0/24"}}], "ports": [{"port": 2049, "protocol": "TCP"}]}
    for name, pod in pods.items():
        values = {"networkPolicy": {"extraEgress": {name: [rule]}}}
        policies = Policies(rendered(helm, tmp_path, values), NAMESPACE)
        assert [one for one in pods if policies.may_reach(pods[one], data, 2049)] == [name]
        assert not policies.may_reach(pod, data, 111)


def test_as_an_add_on_the_service_lets_in_the_hub_and_the_proxy_of_the_other_chart(helm: Helm, tmp_path: Path) -> None:
    manifests = rendered(helm, tmp_path, ADD_ON)
    assert not [one for one in manifests if "hub" in one["metadata"]["name"] or "proxy" in one["metadata"]["name"]]
    policies = Policies(manifests, NAMESPACE)
    service = part("service")
    assert policies.may_reach(z2jh("hub"), service, 8765)
    assert policies.may_reach(z2jh("proxy"), service, 8765)
    assert policies.may_reach(service, z2jh("hub"), 8081)
    assert not policies.may_reach(z2jh("singleuser-server"), service, 8765)
    (deployment,) = of_kind(manifests, "Deployment", "makeway-service")
    assert deployment["spec"]["template"]["metadata"]["labels"]["hub.jupyter.org/network-access-hub"] == "true"
