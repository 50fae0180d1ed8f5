"""Helm installs, upgrades, rolls back and uninstalls the chart on a real API server.

The API server checks every manifest and every pod; that no container starts does not matter here.
"""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from charts import ADD_ON, CHART, EVERYTHING, JOBS, NAMESPACE, ROOT, STANDALONE, TWO_REPLICAS, Object, written
from pods import wait_until
from releases import (
    BUDGETS,
    CLAIMS,
    CLUSTER_WIDE,
    DEPLOYMENTS,
    PRIORITIES,
    SECRETS,
    SERVICES,
    Installation,
    left_in,
    namespaces,
    safe_pod,
)

from kube_cluster import programs
from kube_cluster.api import Api, ApiProblem
from kube_cluster.problems import KubeProblem

pytestmark = pytest.mark.kube


def components(api: Api) -> set[str]:
    """Return the parts of the chart that have pods."""
    result = api.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
    return {one["metadata"]["labels"].get("app.kubernetes.io/component", "") for one in result}


@pytest.mark.covers("N21")
def test_all_manifests_are_accepted_and_their_pods_are_restricted(release: Installation) -> None:
    assert release.names(DEPLOYMENTS) == {"makeway-hub", "makeway-proxy", "makeway-service"}
    # The release's namespace enforces the restricted standard here: other pods would not be created.
    wait_until(lambda: components(release.api) >= {"hub", "proxy", "service"}, "each Deployment has pods")
    assert release.names(BUDGETS) == {"makeway-service"}
    monitors = release.api.items(f"/apis/monitoring.coreos.com/v1/namespaces/{NAMESPACE}/servicemonitors")
    (endpoint,) = monitors[0]["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"]["key"] in release.secret()
    assert endpoint["authorization"]["credentials"]["name"] == "makeway"


def test_the_jobs_namespace_takes_restricted_pods_only(release: Installation) -> None:
    pods = f"/api/v1/namespaces/{JOBS}/pods"
    release.api.create(pods, safe_pod("safe"))
    release.api.delete(f"{pods}/safe", gracePeriodSeconds="0")
    for change in (
        {"privileged": True, "allowPrivilegeEscalation": True},
        {"runAsNonRoot": False},
        {"runAsUser": 0},
        {"capabilities": {}},
        {"seccompProfile": None},
    ):
        pod = safe_pod("unsafe")
        pod["spec"]["containers"][0]["securityContext"] |= change
        with pytest.raises(ApiProblem, match='violates PodSecurity "restricted'):
            release.api.create(pods, pod)


def test_an_upgrade_and_a_rollback_keep_secrets_jobs_and_notebooks(release: Installation) -> None:
    secret = release.secret()
    running = (
        (f"/api/v1/namespaces/{JOBS}/pods", safe_pod("makeway-a-1-0", **{"makeway/job": "a"})),
        (f"/api/v1/namespaces/{NAMESPACE}/pods", safe_pod("jupyter-ana", **{"makeway/session": "b"})),
    )
    uids = {
        f"{pods}/{pod['metadata']['name']}": release.api.create(pods, pod)["metadata"]["uid"] for pods, pod in running
    }
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/makeway-service"
    before = release.api.get(path)
    changed = copy.deepcopy(EVERYTHING)
    changed["service"]["settings"]["tickSeconds"] = 3
    release.run("upgrade", values=changed)
    after = release.api.get(path)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert release.secret() == secret
    release.run("rollback", "1")
    assert release.api.get(path)["spec"]["template"] == before["spec"]["template"]
    assert release.secret() == secret
    for pod, uid in uids.items():
        kept = release.api.get(pod)["metadata"]
        assert (kept["uid"], kept.get("deletionTimestamp")) == (uid, None)
        release.api.delete(pod, gracePeriodSeconds="0")


def test_an_upgrade_adds_a_key_that_the_secret_of_before_lacks(release: Installation) -> None:
    secret = release.secret()
    release.api.merge(f"{SECRETS.format(NAMESPACE)}/makeway", {"data": {"metrics-token": None}})
    release.run("upgrade", values=EVERYTHING)
    result = release.secret()
    assert len(result.pop("metrics-token")) == 40
    assert result == {key: value for key, value in secret.items() if key != "metrics-token"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"priorityClasses": {"guaranteed": 1001}}, "priorityClasses.guaranteed: Kubernetes does not change"),
        ({"jobs": {"checkpoints": {"accessModes": ["ReadWriteOnce"]}}}, "from ReadWriteMany to ReadWriteOnce"),
    ],
)
def test_what_kubernetes_cannot_change_is_refused_before_anything_is_changed(
    release: Installation, changed: Object, said: str
) -> None:
    before = release.generations()
    values = copy.deepcopy(EVERYTHING)
    values["service"]["settings"]["tickSeconds"] = 4
    with pytest.raises(KubeProblem, match=said):
        release.run("upgrade", values=values | changed)
    assert release.generations() == before


def test_an_upgrade_that_would_no_longer_find_large_files_is_refused(release: Installation) -> None:
    """From a chart that had them on the volume of the database, and back."""
    together, apart = ({"artifacts": {"storage": {"size": size}}} for size in ("", "20Gi"))
    release.run("upgrade", values=together)
    claims = CLAIMS.format(NAMESPACE)
    assert "makeway-service" in release.names(CLAIMS)
    assert "makeway-files" not in release.names(CLAIMS)
    before = release.generations()
    with pytest.raises(KubeProblem, match="are on the claim makeway-service, with the database"):
        release.run("upgrade", values=apart)
    assert release.generations() == before
    page = (ROOT / "docs/how-to/back-up-and-upgrade.md").read_text(encoding="utf-8")
    text = page.partition("## Large files on a volume of their own")[2].partition("```yaml\n")[2].partition("```")[0]
    release.api.create(claims, next(yaml.safe_load_all(text)))
    release.run("upgrade", values=apart)
    assert "makeway-files" in release.names(CLAIMS), "Helm has adopted it"
    with pytest.raises(KubeProblem, match="are on the claim makeway-files, and the service would no longer find"):
        release.run("upgrade", values=together)
    release.run("upgrade", values=EVERYTHING)
    kept = {"makeway-service", "makeway-files", "makeway-hub"}
    for name in kept:
        release.api.delete(f"{claims}/{name}")
    wait_until(lambda: not kept & release.names(CLAIMS), "no claim is left for the tests that follow")


def test_another_value_of_a_priority_class_is_taken_as_the_refusal_says(release: Installation) -> None:
    values = EVERYTHING | {"priorityClasses": {"portal": 2001}}
    with pytest.raises(KubeProblem) as problem:
        release.run("upgrade", values=values)
    (name,) = set(re.findall(r"kubectl delete priorityclass (\S+),", str(problem.value)))
    assert release.api.get(f"{PRIORITIES}/{name}")["value"] == 2000
    release.api.delete(f"{PRIORITIES}/{name}")
    release.run("upgrade", values=values)
    assert release.api.get(f"{PRIORITIES}/{name}")["value"] == 2001
    release.api.delete(f"{PRIORITIES}/{name}")
    release.run("upgrade", values=EVERYTHING)


def homes(template: str) -> Object:
    return {"hub": {"config": {"KubeSpawner": {"pvc_name_template": template}}}}


def test_a_second_makeway_in_the_namespace_is_refused_unless_its_homes_are_its_own(release: Installation) -> None:
    def install(values: Object) -> str:
        given = ("--values", written(release.folder, values))
        return release.helm.run("install", "second", CHART, "--namespace", NAMESPACE, "--dry-run=server", *given)

    elsewhere: Object = {"jobs": {"namespace": "second-jobs"}}
    for template in ("home-{user_server}", "home-{username}", "home-second-{user_server}", "{user_server}", ""):
        with pytest.raises(KubeProblem, match="makeway is a Makeway of the namespace makeway, too") as problem:
            install(elsewhere | homes(template))
    (offered, *_) = re.findall(r"pvc_name_template: (\S+)", str(problem.value))
    assert "kind: Deployment" in install(elsewhere | homes(offered))
    own = {"hub": {"config": {"MakewayKubeSpawner": {"pvc_name_template": offered}}}}
    assert "kind: Deployment" in install(elsewhere | own)
    assert "kind: Deployment" in install(elsewhere | ADD_ON), "its homes are those of a Zero to JupyterHub"
    # The first one's homes are those that it had when it was installed.
    hub = EVERYTHING["hub"] | homes("first-{user_server}")["hub"]
    release.run("upgrade", values=EVERYTHING | {"hub": hub})
    with pytest.raises(KubeProblem, match="first-NAME"):
        install(elsewhere | homes("first-{username}"))
    assert "kind: Deployment" in install(elsewhere)
    release.run("upgrade", values=EVERYTHING)


def beside(api: Api, template: str) -> None:
    """Have the service of another release in the namespace, with these homes; "": of a chart that did not tell them."""
    labels = {"app.kubernetes.io/name": "makeway", "app.kubernetes.io/component": "service"}
    named = {**labels, "app.kubernetes.io/instance": "other"}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": named},
        "template": {"metadata": {"labels": named}, "spec": safe_pod("other")["spec"]},
    }
    told = {"annotations": {"makeway/homes": template}} if template else {}
    api.create(DEPLOYMENTS.format(NAMESPACE), {"metadata": {"name": "other", "labels": named, **told}, "spec": spec})


@pytest.mark.parametrize("theirs", ["", "home-{user_server}", "home-{username}", "other-{user_server}"])
def test_an_upgrade_that_keeps_its_homes_is_not_refused_beside_another_makeway(
    release: Installation, theirs: str
) -> None:
    def run(how: str, name: str, values: Object) -> str:
        given = ("--dry-run=server", "--values", written(release.folder, values))
        return release.helm.run(how, name, CHART, "--namespace", NAMESPACE, *given)

    deployments = DEPLOYMENTS.format(NAMESPACE)
    service = f"{deployments}/makeway-service"
    own = release.api.get(service)["metadata"]["annotations"]["makeway/homes"]
    beside(release.api, theirs)
    try:
        assert "kind: Deployment" in run("upgrade", "makeway", EVERYTHING)
        changed = homes("other-{username}")
        if theirs.startswith("other"):
            with pytest.raises(KubeProblem, match="other is a Makeway of the namespace makeway, too") as problem:
                run("upgrade", "makeway", EVERYTHING | changed)
            assert f"Set hub.config.KubeSpawner.pvc_name_template back first, to {own}:" in str(problem.value)
            assert "makeway-home" not in str(problem.value), "no other template, which loses the homes that there are"
        else:
            assert "kind: Deployment" in run("upgrade", "makeway", EVERYTHING | changed)
        release.api.merge(service, {"metadata": {"annotations": {"makeway/homes": None}}})  # as of an earlier chart
        assert "kind: Deployment" in run("upgrade", "makeway", EVERYTHING)
        if not theirs:
            elsewhere: Object = {"jobs": {"namespace": "second-jobs"}}
            with pytest.raises(KubeProblem, match=r"If (other|makeway) has other homes, upgrade it first"):
                run("install", "second", elsewhere)
    finally:
        release.api.merge(service, {"metadata": {"annotations": {"makeway/homes": own}}})
        release.api.delete(f"{deployments}/other")


def test_two_releases_do_not_share_the_namespace_of_jobs(release: Installation) -> None:
    def install(namespace: str, jobs: Object) -> str:
        given = ("--values", written(release.folder, {"jobs": jobs} | homes("second-home-{user_server}")))
        return release.helm.run("install", "second", CHART, "--namespace", namespace, "--dry-run=server", *given)

    for namespace in (NAMESPACE, "default"):
        with pytest.raises(KubeProblem, match=f"The jobs of the release makeway in {NAMESPACE} are in") as problem:
            install(namespace, {"namespace": JOBS, "createNamespace": False})
        (offered, *_) = re.findall(r"jobs\.namespace, say, (\S+?)\.", str(problem.value))
        assert "kind: Deployment" in install(namespace, {"namespace": offered})


def test_the_same_values_again_change_nothing(release: Installation) -> None:
    before = release.generations()
    release.run("upgrade", values=EVERYTHING)
    assert release.generations() == before


NODES = "/api/v1/nodes"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def test_the_pre_puller_has_pods_on_nodes_that_run_its_images_only(release: Installation) -> None:
    """No nodes of Windows, nor of another architecture where the values say so; only the controllers are real."""
    api = release.api
    kinds = {"linux": ("linux", "amd64"), "windows": ("windows", "amd64"), "arm": ("linux", "arm64")}
    for name, (system, architecture) in kinds.items():
        labels = {"kubernetes.io/os": system, "kubernetes.io/arch": architecture}
        api.create(NODES, {"metadata": {"name": f"node-{name}", "labels": labels}})
    values = copy.deepcopy(EVERYTHING)
    values["prePuller"]["tolerations"] = [{"operator": "Exists"}]  # as no kubelet says that these nodes are ready
    try:
        release.run("upgrade", values=values)
        wait_until(lambda: pulling(api) >= {"node-linux", "node-arm"}, "nodes with Linux have pods")
        assert "node-windows" not in pulling(api)
        values["prePuller"]["nodeSelector"] = {"kubernetes.io/arch": "amd64"}
        release.run("upgrade", values=values)
        wait_until(lambda: "node-arm" not in pulling(api), "the node of another architecture has none any more")
        wait_until(lambda: "node-linux" in pulling(api), "the other one has pods again")
        assert "node-windows" not in pulling(api)
    finally:
        for name in kinds:
            api.delete(f"{NODES}/node-{name}")
        release.run("upgrade", values=EVERYTHING)


def pulling(api: Api) -> set[str]:
    """Return the nodes for which there are pods of the pre-puller."""
    pods = api.items(PODS, labelSelector="app.kubernetes.io/component=images")
    terms = [
        one["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for one in pods
        if "deletionTimestamp" not in one["metadata"]
    ]
    return {field["values"][0] for one in terms for term in one for field in term["matchFields"]}


@pytest.mark.parametrize("length", [58, 63])
def test_it_is_installed_and_uninstalled_in_a_namespace_with_a_long_name(release: Installation, length: int) -> None:
    namespace = f"{'n' * (length - 1)}m"
    given = ("--namespace", namespace, "--values", written(release.folder, STANDALONE))
    release.helm.run("install", "makeway", CHART, "--create-namespace", *given)
    spaces = [one["metadata"]["name"] for one in release.api.items("/api/v1/namespaces")]
    (jobs,) = [one for one in spaces if one.startswith("nnn") and one != namespace]
    assert jobs.endswith("-jobs")
    assert release.names(DEPLOYMENTS, namespace) == {"makeway-hub", "makeway-proxy", "makeway-service"}
    release.helm.run("uninstall", "makeway", "--namespace", namespace, "--no-hooks")
    for one in (namespace, jobs):
        release.api.delete(f"/api/v1/namespaces/{one}")
    wait_until(lambda: not {namespace, jobs} & namespaces(release.api), "its namespaces are gone")


@pytest.mark.covers("N21")
def test_what_is_rendered_without_the_cluster_is_what_is_installed(release: Installation, tmp_path: Path) -> None:
    """With a Secret of the site, for Argo CD and Flux, which apply what Helm renders; neither was tried itself."""
    secrets = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    release.api.create(secrets, {"metadata": {"name": "keys"}, "stringData": release.secret()})
    values = EVERYTHING | {"existingSecret": "keys"}
    file = written(release.folder, values)
    release.run("upgrade", values=values)
    try:
        texts = [release.helm.template(CHART, "makeway", NAMESPACE, ("--values", file, "--no-hooks")) for _ in range(2)]
        assert texts[0] == texts[1]
        rendered = tmp_path / "rendered.yaml"
        rendered.write_text(texts[0], encoding="utf-8")
        assert differences(release, rendered) == ""
        rendered.write_text(texts[0].replace("replicas: 2", "replicas: 3"), encoding="utf-8")
        assert "+  replicas: 3" in differences(release, rendered), "a difference would be seen"
    finally:
        release.run("upgrade", values=EVERYTHING)
        release.api.delete(f"{secrets}/keys")


def differences(release: Installation, manifests: Path) -> str:
    """Return how the cluster's objects would change if these were applied by the API server."""
    assert release.helm.kubeconfig
    config = yaml.safe_load(release.helm.kubeconfig.read_text(encoding="utf-8"))
    config["contexts"][0]["context"]["namespace"] = NAMESPACE  # of objects without one; those of jobs have theirs
    kubeconfig = manifests.with_name("kubeconfig")
    kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")
    options = ("--server-side", "--force-conflicts", "--field-manager", "argocd", "--filename", manifests)
    done = subprocess.run(
        [programs.kubectl(), "--kubeconfig", kubeconfig, "diff", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_an_upgrade_with_reuse_values_takes_over_a_release_of_an_earlier_chart(release: Installation) -> None:
    earlier = Path(shutil.copytree(CHART, release.folder / "earlier"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    del values["jobs"]["home"], values["priorityClasses"]["portal"], values["hub"]["extraEnv"]
    (earlier / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    given = ("--values", written(release.folder, EVERYTHING))
    release.helm.run("upgrade", "makeway", earlier, "--namespace", NAMESPACE, "--reset-values", *given)
    before = release.generations()
    release.run("upgrade", "--reuse-values")
    release.run("upgrade", "--reset-then-reuse-values")
    assert release.generations() == before


def test_the_hook_of_an_uninstallation_requests_nothing_where_a_limit_range_has_defaults(release: Installation) -> None:
    """So that a node whose CPU and memory are all requested takes its pod."""
    limits = f"/api/v1/namespaces/{NAMESPACE}/limitranges"
    defaults = {"type": "Container", "defaultRequest": {"cpu": "500m", "memory": "1Gi"}}
    release.api.create(limits, {"metadata": {"name": "defaults"}, "spec": {"limits": [defaults]}})
    text = release.helm.template(CHART, "makeway", NAMESPACE)
    (job,) = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "Job"]
    pod = {"metadata": {"name": "hook"}, "spec": job["spec"]["template"]["spec"]}
    del pod["spec"]["serviceAccountName"]  # which is there during the hook only
    try:
        made = release.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
        assert made["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "0", "memory": "0"}
    finally:
        release.api.delete(f"{limits}/defaults")
    release.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/hook", gracePeriodSeconds="0")


def test_an_uninstallation_whose_hook_cannot_run_deletes_nothing(release: Installation) -> None:
    values = copy.deepcopy(EVERYTHING)
    values["service"]["nodeSelector"] = {"makeway.test/none": "true"}
    release.run("upgrade", values=values)
    before = left_in(release.api, NAMESPACE, JOBS)
    with pytest.raises(KubeProblem, match="makeway-uninstall"):
        release.run("uninstall", "--timeout", "5s")
    gone = before - left_in(release.api, NAMESPACE, JOBS)
    assert not [one for one in gone if one[0] not in ("pods", "replicasets", "secrets")], gone
    assert release.names(DEPLOYMENTS) == {"makeway-hub", "makeway-proxy", "makeway-service"}


def test_uninstalled_it_leaves_the_data_and_nothing_else(release: Installation) -> None:
    release.run("uninstall", "--no-hooks", "--wait")
    data = {("persistentvolumeclaims", "makeway-checkpoints")}
    hooks = {(kind, "makeway-uninstall") for kind in ("serviceaccounts", "roles", "rolebindings", "jobs")}
    wait_until(lambda: left_in(release.api, NAMESPACE, JOBS) - hooks == data, "only the data is left")
    for path in (CLUSTER_WIDE.format("clusterroles"), CLUSTER_WIDE.format("clusterrolebindings"), PRIORITIES):
        assert not release.names(path)
    assert release.api.get(f"/api/v1/namespaces/{JOBS}")["status"]["phase"] == "Active"


def test_it_is_installed_again_over_its_data_and_as_an_add_on(release: Installation) -> None:
    release.run("install", values=TWO_REPLICAS)
    release.run("upgrade", values=ADD_ON)
    assert release.names(DEPLOYMENTS) == {"makeway-service"}
    hubs = yaml.safe_load((CHART / "z2jh-values.yaml").read_text(encoding="utf-8"))["hub"]
    assert set(hubs["services"]) == {"makeway", "makeway-spawner"}
    assert hubs["services"]["makeway"]["url"] == "http://makeway-service:8765"
    assert "makeway-service" in release.names(SERVICES)
    release.run("uninstall", "--no-hooks", "--wait")


def test_a_service_with_sqlite_ends_before_one_with_postgresql_begins(release: Installation) -> None:
    """It would take the pods of the other one's jobs for leftovers, and delete them."""
    release.run("install", values=STANDALONE)
    strategies = []
    for _ in range(2):
        release.run("upgrade", values=TWO_REPLICAS)
        deployment = release.api.get(f"{DEPLOYMENTS.format(NAMESPACE)}/makeway-service")
        strategies.append(deployment["spec"]["strategy"]["type"])
    assert strategies == ["Recreate", "RollingUpdate"]
    release.run("uninstall", "--no-hooks", "--wait")
