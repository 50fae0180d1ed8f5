"""The pods of jobs as pure functions: manifests, templates of profiles, and what pods say about their attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from makeway_quota.backends.base import BackendError, StartOrder
from makeway_quota.backends.kubernetes.attempts.pod_ends import end_of_deleted_pods, hosts_of
from makeway_quota.backends.kubernetes.attempts.pod_states import JobPod, project_job_pod
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS
from makeway_quota.backends.kubernetes.cluster.nodes import toleration
from makeway_quota.backends.kubernetes.cluster.pod_requests import pod_requests
from makeway_quota.backends.kubernetes.pods.checkpoint_folders import removing_pod
from makeway_quota.backends.kubernetes.pods.disk import Disk
from makeway_quota.backends.kubernetes.pods.gang import network_policy, service
from makeway_quota.backends.kubernetes.pods.manifest import (
    GRACE_MARGIN,
    PodSettings,
    WorkerResources,
    label_value,
    user_and_group,
    worker_pod,
)
from makeway_quota.backends.kubernetes.pods.template import merged, resources_setting, template_setting
from makeway_quota.backends.remote.worker_hosts import WorkerHosts
from makeway_quota.policy import PolicyInvalid, read_policy
from makeway_quota.policy.write import write_policy
from makeway_quota.values import Place

GPU = "nvidia.com/gpu"
SETTINGS = PodSettings("jobs", "here", "http://makeway:8765/services/makeway", "makeway:1", "notebook:1")
PATH = "api/v1/attempts/j-1/2/0"
GIVEN = WorkerResources(GPU, 1, (toleration(GPU),))


def order(workers: int = 1, **changes: Any) -> StartOrder:
    """Return the order of a job's second attempt."""
    places = tuple(Place(f"n{number}", (0,), (1000,)) for number in range(workers))
    made = StartOrder("j-1", 2, "fit", "ana@lab", "R&D", "gpu1", ("python", "train.py"), {}, places, grace=30.5)
    return replace(made, **changes)


@pytest.mark.parametrize("limit", [1.5, 3600.0, 1e8, 1e12])
def test_a_pod_has_a_deadline_after_its_limit_and_its_grace_whatever_it_waits_for_first(limit: float) -> None:
    template = {"spec": {"priorityClassName": "x"}}
    given = replace(GIVEN, template=template)
    deadline = worker_pod(SETTINGS, order(time_limit=limit), 0, PATH, "tokens", given)["spec"]["activeDeadlineSeconds"]
    assert isinstance(deadline, int)
    assert deadline <= 2**31 - 1, "Kubernetes takes no more"
    assert deadline == 2**31 - 1 or deadline >= limit + 30.5 + MAX_WAIT_SECONDS["image_pull"] + 20
    assert "activeDeadlineSeconds" not in worker_pod(SETTINGS, order(), 0, PATH, "tokens", given)["spec"]


def test_a_pod_that_kubernetes_ended_at_its_deadline_reached_its_time_limit() -> None:
    message = "Pod was active on the node longer than the specified deadline"
    for more in ({}, over(137)):
        end = hosts_of([pod("Failed", reason="DeadlineExceeded", message=message, **more)], RUNS)
        assert (end.present, end.timed_out, end.exit_code, end.node_lost) == (False, True, 137, False)
        assert "time limit reached" in end.message


@pytest.mark.parametrize("preemptible", [True, False])
def test_autoscalers_do_not_move_a_job_that_is_not_preemptible(preemptible: bool) -> None:
    result = worker_pod(SETTINGS, order(preemptible=preemptible), 0, PATH, "tokens", GIVEN)["metadata"]["annotations"]
    stays = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert (stays.items() <= result.items()) is not preemptible
    assert not preemptible or not stays.keys() & result.keys()


def test_where_the_platform_assigns_users_pods_have_none_and_getpass_finds_a_name() -> None:
    settings = replace(SETTINGS, run_as=user_and_group("platform"))
    result = worker_pod(settings, order(), 0, PATH, "tokens", GIVEN)
    for pod in (result, removing_pod(settings, (), "claim", 1000, ["j-1"])):
        assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert "runAsUser" not in json.dumps(pod)
    variables = {one["name"]: one.get("value") for one in result["spec"]["containers"][0]["env"]}
    command = [sys.executable, "-c", "import getpass, os; os.setuid(4_000_000_000); print(getpass.getuser())"]
    if os.getuid() == 0:
        env = {name: variables[name] for name in ("USER", "LOGNAME")}
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "jovyan\n"


def test_every_container_has_the_limits_that_a_quota_on_all_of_them_wants() -> None:
    """As a ResourceQuota on requests.* and limits.* of CPU, memory and disk refuses a pod without one of them."""
    resources = {
        "requests": {"cpu": "100m", "memory": "100Mi", "ephemeral-storage": "10Mi"},
        "limits": {"memory": "200Mi", "ephemeral-storage": "20Mi"},
    }
    disk = Disk(1024, 2048)
    settings = replace(SETTINGS, cpu_limits=True, launcher_resources=resources, disk=disk, checkpoint_claim="claim")
    sidecar = {"name": "exporter", "resources": {"requests": {"cpu": "250m"}}}
    given = replace(GIVEN, template={"spec": {"containers": [sidecar]}}, node_disk=100_000)
    pod = worker_pod(settings, order(cpu=2000, memory=1000), 0, PATH, "tokens", given)
    worker, beside = pod["spec"]["containers"]
    (launcher,) = pod["spec"]["initContainers"]
    assert worker["resources"]["limits"]["cpu"] == worker["resources"]["requests"]["cpu"] == "1750m"
    assert beside["resources"]["limits"]["cpu"] == "250m"
    (removal,) = removing_pod(settings, (), "claim", 1000, ["j-1"])["spec"]["containers"]
    wanted = {"cpu", "memory", "ephemeral-storage"}
    for container in (worker, launcher, removal):
        assert {kind: wanted - result.keys() for kind, result in container["resources"].items()} == {
            "requests": set(),
            "limits": set(),
        }
    assert launcher["resources"]["requests"]["cpu"] == "100m"
    assert (
        "cpu"
        not in worker_pod(SETTINGS, order(cpu=1), 0, PATH, "tokens", GIVEN)["spec"]["containers"][0]["resources"][
            "limits"
        ]
    )


def test_the_template_of_the_site_is_in_every_pod_below_that_of_the_profile() -> None:
    site = template_setting(
        json.dumps(
            {
                "metadata": {"labels": {"cost": "1", "team": "a"}, "annotations": {"inject": "false"}},
                "spec": {
                    "imagePullSecrets": [{"name": "login"}],
                    "containers": [{"name": "worker", "env": [{"name": "SSL_CERT_FILE", "value": "/ca"}]}],
                },
            }
        )
    )
    profile = {"metadata": {"labels": {"team": "b"}}, "spec": {"imagePullSecrets": [{"name": "more"}]}}
    settings = replace(SETTINGS, template=site, checkpoint_claim="claim")
    pod = worker_pod(settings, order(), 0, PATH, "tokens", replace(GIVEN, template=profile))
    removal = removing_pod(settings, (), "claim", 1000, ["j-1"])
    assert {"cost": "1", "team": "b", "makeway/job": "j-1"}.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["imagePullSecrets"] == [{"name": "login"}, {"name": "more"}]
    assert {"name": "SSL_CERT_FILE", "value": "/ca"} in pod["spec"]["containers"][0]["env"]
    assert removal["metadata"]["labels"]["cost"] == "1"
    assert removal["metadata"]["annotations"] == {"inject": "false"}
    assert removal["spec"]["imagePullSecrets"] == [{"name": "login"}]
    assert len(removal["spec"]["containers"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"spec": {"nodeName": "n1"}}', "the plan chooses the node"),
        ('{"metadata": {"labels": {"makeway/job": "x"}}}', "Makeway sets it"),
    ],
)
def test_a_template_of_the_site_that_is_none_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"MAKEWAY_KUBE_POD.*{said}"):
        template_setting(text)


@pytest.mark.parametrize("text", ['{"cpu": "1"}', '{"requests": ["cpu"]}', '{"limits": {"cpu": "many"}}', '{"x": {}}'])
def test_resources_of_the_launcher_that_are_none_are_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"requests or limits|not a quantity"):
        resources_setting(text)


@pytest.mark.covers("F04")
def test_a_pod_runs_on_the_planned_node_with_what_the_plan_gives() -> None:
    pod = worker_pod(SETTINGS, order(cpu=2500, memory=4096), 0, PATH, "tokens", GIVEN)
    spec = pod["spec"]
    assert pod["metadata"]["name"] == "makeway-j-1-2-0"
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/name": "makeway-job",
        "app.kubernetes.io/managed-by": "makeway",
        "makeway/instance": "here",
        "makeway/job": "j-1",
        "makeway/attempt": "2",
        "makeway/worker": "0",
        "makeway/workers": "1",
        "makeway/kind": "job",
        "makeway/team": "R-D",
        "makeway/profile": "gpu1",
        "makeway/user": "ana-lab",
    }
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}]
    away = [f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable")]
    stays = [{"key": key, "operator": "Exists", "effect": "NoExecute"} for key in away]
    assert spec["tolerations"] == [{"operator": "Exists", "key": GPU}, *stays]
    assert spec["terminationGracePeriodSeconds"] == 31 + GRACE_MARGIN
    assert spec["automountServiceAccountToken"] is False
    (worker,) = spec["containers"]
    assert worker["resources"] == {
        "requests": {"cpu": "2500m", "memory": "4096Mi", GPU: "1"},
        "limits": {"memory": "4096Mi", GPU: "1"},
    }
    assert worker["image"] == "notebook:1"
    env = {one["name"]: one.get("value") or one["valueFrom"] for one in worker["env"]}
    assert env["MAKEWAY_ATTEMPT_URL"] == f"http://makeway:8765/services/makeway/{PATH}"
    assert env["MAKEWAY_ATTEMPT_TOKEN"] == {"secretKeyRef": {"name": "tokens", "key": "j-1.2.0"}}
    assert json.loads(env["MAKEWAY_WORKER_ENV"]) == {"RANK": "0", "WORLD_SIZE": "1"}
    assert "NVIDIA_VISIBLE_DEVICES" not in env, "the device plugin sets it"
    assert "subdomain" not in spec
    assert "priorityClassName" not in spec


def test_settings_and_submission_change_the_pod() -> None:
    settings = replace(SETTINGS, priority_class="jobs", checkpoint_claim="checkpoints-{team}", run_as=(7, 8))
    spec = worker_pod(settings, order(image="mine:2"), 0, PATH, "tokens", WorkerResources())["spec"]
    assert spec["priorityClassName"] == "jobs"
    assert spec["containers"][0]["image"] == "mine:2"
    assert spec["containers"][0]["resources"] == {"requests": {}, "limits": {}}
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints-r-d"}} in spec["volumes"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) == (7, 8)
    own = {"name": "checkpoints", "mountPath": "/makeway/checkpoints/j-1", "subPath": "j-1"}
    assert [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "checkpoints"] == [own]
    (first,) = spec["initContainers"]
    assert {"name": "MAKEWAY_CHECKPOINT_DIR", "value": "/makeway/checkpoints/j-1"} in first["env"]
    assert {"name": "checkpoints", "mountPath": "/makeway/checkpoints"} in first["volumeMounts"]


@pytest.mark.parametrize(("devices", "without"), [(0, ["launcher", "worker", "beside"]), (1, ["launcher", "beside"])])
def test_containers_without_gpus_see_none_of_their_node(devices: int, without: list[str]) -> None:
    given = replace(GIVEN, devices=devices, template=TEMPLATE)
    spec = worker_pod(SETTINGS, order(), 0, PATH, "tokens", given)["spec"]
    hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    result = [*spec["initContainers"], *spec["containers"]]
    assert [one["name"] for one in result if hidden in one["env"]] == without


def test_a_template_says_which_gpus_a_container_beside_sees() -> None:
    seen = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    template = {"spec": {"containers": [{"name": "exporter", "image": "exporter:1", "env": seen}]}}
    spec = worker_pod(SETTINGS, order(), 0, PATH, "tokens", replace(GIVEN, template=template))["spec"]
    assert spec["containers"][1]["env"] == seen


def test_the_workers_of_a_gang_find_each_other() -> None:
    gang = order(2)
    pods = [worker_pod(SETTINGS, gang, number, PATH, "tokens", GIVEN) for number in range(2)]
    assert [pod["spec"]["hostname"] for pod in pods] == ["worker-0", "worker-1"]
    environment = [json.loads(pod["spec"]["containers"][0]["env"][4]["value"]) for pod in pods]
    assert [one["RANK"] for one in environment] == ["0", "1"]
    assert {one["MASTER_ADDR"] for one in environment} == {"worker-0.makeway-j-1-2.jobs.svc"}
    created = [{"metadata": {**pod["metadata"], "uid": f"u{number}"}} for number, pod in enumerate(pods)]
    result = service(SETTINGS, gang, created[:1])
    assert result["metadata"]["name"] == pods[0]["spec"]["subdomain"]
    assert result["spec"]["clusterIP"] == "None"
    assert result["spec"]["selector"].items() <= pods[1]["metadata"]["labels"].items()
    policy = network_policy(SETTINGS, gang, created[:1])
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected}}]}]
    assert all(selected.items() <= pod["metadata"]["labels"].items() for pod in pods)
    other = worker_pod(SETTINGS, replace(gang, workload="j-2"), 0, PATH, "tokens", GIVEN)
    assert not selected.items() <= other["metadata"]["labels"].items()
    kept = [
        one for pod in pods for one in pod["spec"]["containers"][0]["env"] if one["name"] == "MAKEWAY_ATTEMPT_TOKEN"
    ]
    references = [one["valueFrom"]["secretKeyRef"] for one in kept]
    assert references == [{"name": "tokens", "key": f"j-1.2.{number}"} for number in range(2)]


@pytest.mark.parametrize(
    ("text", "value"), [("ana@lab.org", "ana-lab.org"), ("--x--", "x"), ("ä" * 3, ""), ("a" * 70, "a" * 63)]
)
def test_names_become_values_of_labels(text: str, value: str) -> None:
    assert label_value(text) == value


@pytest.mark.parametrize("text", ["0:0", "root", "1000", "", "1000:-1"])
def test_jobs_do_not_run_as_root(text: str) -> None:
    assert user_and_group("1000:100") == (1000, 100)
    with pytest.raises(ValueError, match="expected two numbers"):
        user_and_group(text)


# -- templates

TEMPLATE = {
    "metadata": {"labels": {"cost": "12"}, "annotations": {"note": "x"}},
    "spec": {
        "tolerations": [{"key": "batch", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "containers": [
            {
                "name": "worker",
                "env": [{"name": "HOME", "value": "/home"}, {"name": "DATA", "value": "/data"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
            {"name": "beside", "image": "beside:1"},
        ],
    },
}


def test_a_template_adds_to_the_pod() -> None:
    plain = worker_pod(SETTINGS, order(), 0, PATH, "tokens", GIVEN)
    pod = worker_pod(SETTINGS, order(), 0, PATH, "tokens", replace(GIVEN, template=TEMPLATE))
    assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], "cost": "12"}
    assert pod["metadata"]["annotations"]["note"] == "x"
    added = [one for one in pod["spec"]["tolerations"] if one not in plain["spec"]["tolerations"]]
    assert added == TEMPLATE["spec"]["tolerations"]  # type: ignore[index]
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["makeway", "checkpoints", "shm", "data"]
    worker, beside = pod["spec"]["containers"]
    assert worker["command"] == plain["spec"]["containers"][0]["command"]
    env = {one["name"]: one.get("value") for one in worker["env"]}
    assert (env["HOME"], env["DATA"]) == ("/home", "/data")
    assert len(worker["env"]) == len(plain["spec"]["containers"][0]["env"]) + 1
    assert [one["mountPath"] for one in worker["volumeMounts"]] == [
        "/makeway",
        "/makeway/checkpoints/j-1",
        "/dev/shm",
        "/data",
    ]
    assert beside["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def with_beside(**resources: Any) -> WorkerResources:
    """Return what a profile gives whose template has a container and a sidecar with the same resources."""
    beside = {"image": "beside:1", "resources": resources}
    sidecar = {"name": "sidecar", "restartPolicy": "Always", **beside}
    first = {"name": "first", "image": "first:1", "resources": {"requests": {"cpu": "9", "memory": "9Gi"}}}
    template = {"spec": {"containers": [{"name": "beside", **beside}], "initContainers": [sidecar, first]}}
    return replace(GIVEN, template=template)


def test_a_pod_requests_in_all_what_was_planned() -> None:
    given = with_beside(requests={"cpu": "100m"}, limits={"memory": "100M"})
    spec = worker_pod(SETTINGS, order(cpu=2500, memory=4096), 0, PATH, "tokens", given)["spec"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "2300m", "memory": "3904Mi", GPU: "1"},
        "limits": {"memory": "3904Mi", GPU: "1"},
    }
    running = [one for one in spec["initContainers"] if "restartPolicy" in one]
    asked = pod_requests({"containers": [*spec["containers"], *running]})
    assert asked == {"cpu": 2500, "memory": 4096, GPU: 1}
    spec = worker_pod(SETTINGS, order(), 0, PATH, "tokens", given)["spec"]
    assert spec["containers"][0]["resources"] == {"requests": {GPU: "1"}, "limits": {GPU: "1"}}, "nothing was planned"


@pytest.mark.parametrize(
    ("resource", "said"),
    [
        ({"cpu": "1250m"}, "request 2.5 CPU, and the profile has 2.5 CPU for the whole pod: raise cpu in the profile"),
        ({"memory": "3Gi"}, "request 6 GiB, and the profile has 4 GiB for the whole pod: raise memory in the profile"),
    ],
)
def test_a_job_that_the_containers_beside_it_leave_nothing_cannot_start(resource: dict[str, str], said: str) -> None:
    with pytest.raises(BackendError, match=said):
        worker_pod(SETTINGS, order(cpu=2500, memory=4096), 0, PATH, "tokens", with_beside(requests=resource))


def test_a_template_is_merged_as_a_strategic_patch() -> None:
    base = {"a": {"b": 1, "c": 2}, "env": [{"name": "x", "value": "1"}, {"name": "y"}], "list": [1], "gone": 1}
    patch = {"a": {"c": 3}, "env": [{"name": "x", "value": "2"}, {"name": "z"}], "list": [2], "gone": None}
    assert merged(base, patch) == {
        "a": {"b": 1, "c": 3},
        "env": [{"name": "x", "value": "2"}, {"name": "y"}, {"name": "z"}],
        "list": [2],
    }
    assert base["a"] == {"b": 1, "c": 2}


def policy(pod: Any) -> str:
    """Return a policy document whose only profile has this pod template."""
    profile = {"name": "gpu1", "gpus": 1, "pools": ["gpu"], "pod": pod}
    return json.dumps({"version": 1, "pools": [{"name": "gpu"}], "profiles": [profile], "policies": []})


@pytest.mark.covers("F84")
def test_the_policy_document_keeps_templates() -> None:
    document = read_policy(policy(TEMPLATE))
    assert document.profile_facts["gpu1"].pod == TEMPLATE
    assert read_policy(write_policy(document)).profile_facts["gpu1"].pod == TEMPLATE


@pytest.mark.covers("F84")
def test_numbers_of_a_template_are_numbers_and_its_texts_texts() -> None:
    text = """
version: 1
pools: [{name: gpu}]
profiles:
- name: gpu1
  gpus: 1
  pod:
    metadata: {labels: {cost: 12, night: true}}
    spec:
      securityContext: {fsGroup: 100, runAsNonRoot: true}
      containers: [{name: worker, env: [{name: N, value: 010}], ports: [{containerPort: 80}]}]
policies: []
"""
    document = read_policy(text)
    assert document.profile_facts["gpu1"].pod == {
        "metadata": {"labels": {"cost": "12", "night": "true"}},
        "spec": {
            "securityContext": {"fsGroup": 100, "runAsNonRoot": True},
            "containers": [
                {"name": "worker", "env": [{"name": "N", "value": "010"}], "ports": [{"containerPort": 80}]}
            ],
        },
    }
    assert read_policy(write_policy(document)).profile_facts["gpu1"].pod == document.profile_facts["gpu1"].pod


def worker(**fields: Any) -> dict[str, Any]:
    """Return a template with these fields of the container of the job."""
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


@pytest.mark.covers("F84")
@pytest.mark.parametrize(
    ("pod", "named"),
    [
        ({"status": {}}, "status: a pod template has metadata and spec"),
        ({"metadata": {"name": "x"}}, "metadata.name is not for a template"),
        ({"metadata": {"labels": {"makeway/job": "x"}}}, "metadata.labels.makeway/job is not"),
        ({"metadata": {"labels": {"app.kubernetes.io/managed-by": "x"}}}, "managed-by is not"),
        ({"metadata": {"labels": {"x": ["y"]}}}, "metadata.labels has to be an object of strings"),
        ({"spec": {"nodeName": "n1"}}, "spec.nodeName is not for a template: the plan chooses the node"),
        ({"spec": {"nodeSelector": {}}}, "spec.nodeSelector is not"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork is not"),
        ({"spec": {"serviceAccountName": "admin"}}, "spec.serviceAccountName is not"),
        ({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}, "spec.volumes[v].hostPath is not"),
        ({"spec": {"volumes": [{}]}}, "spec.volumes: each entry needs a name"),
        ({"spec": {"volumes": {}}}, "spec.volumes has to be a list of objects"),
        ({"spec": {"securityContext": None}}, "spec.securityContext has to be an object"),
        ({"spec": {"securityContext": {"runAsNonRoot": None}}}, "spec.securityContext.runAsNonRoot has no value"),
        (
            {"spec": {"securityContext": {"seccompProfile": "x"}}},
            "spec.securityContext.seccompProfile has to be an object",
        ),
        (worker(env=[{"name": "A", "value": "1"}, 5]), "spec.containers[worker].env has to be a list of objects"),
        (worker(volumeMounts=None), "spec.containers[worker].volumeMounts has to be a list of objects"),
        (worker(resources=None), "spec.containers[worker].resources has to be an object"),
        (worker(resources={"limits": None}), "spec.containers[worker].resources.limits has to be an object"),
        (worker(securityContext=None), "spec.containers[worker].securityContext has to be an object"),
        (worker(securityContext={"capabilities": None}), "spec.containers[worker].securityContext.capabilities has no"),
        (worker(securityContext={"capabilities": {"drop": []}}), "securityContext.capabilities.drop has to name ALL"),
        ({"spec": {"securityContext": {"runAsUser": 0}}}, "spec.securityContext lets the job run as root"),
        ({"spec": {"containers": [{"image": "x"}]}}, "each container needs a name"),
        ({"spec": {"containers": [{"name": "worker", "command": []}]}}, "spec.containers[worker].command is not"),
        ({"spec": {"containers": [{"name": "worker", "image": "x"}]}}, "spec.containers[worker].image is not"),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"name": "MAKEWAY_ATTEMPT_URL"}]}]}},
            "spec.containers[worker].env.MAKEWAY_ATTEMPT_URL is not",
        ),
        (
            {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"cpu": "1"}}}]}},
            "spec.containers[worker].resources.limits.cpu is not for a template: the profile sets it",
        ),
        (
            {"spec": {"containers": [{"name": "beside", "resources": {"limits": {GPU: "1"}}}]}},
            "spec.containers[beside].resources.limits.nvidia.com/gpu is not",
        ),
        (
            {"spec": {"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}},
            "spec.initContainers[i].securityContext.privileged is not",
        ),
        (
            {"spec": {"containers": [{"name": "b", "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}}}]}},
            "securityContext.capabilities.add is not",
        ),
    ],
)
def test_a_forbidden_field_of_a_template_is_named(pod: Any, named: str) -> None:
    with pytest.raises(PolicyInvalid) as refused:
        read_policy(policy(pod))
    (issue,) = refused.value.issues
    assert issue.where == "profiles[0].pod"
    assert named in issue.message


# -- states

RUNS = {"n1": True, "n2": False}
OVER_ITS_LIMIT = (
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    'Container worker exceeded its local ephemeral storage limit "1Gi". ',
    'Usage of EmptyDir volume "work" exceeds the limit "1Gi". ',
)
LOW = "The node was low on resource: ephemeral-storage. Threshold quantity: 46993491787, available: 45494108Ki. "
USING = "using 1Gi, request is 0, has larger consumption of ephemeral-storage. "
LOW_ON_MEMORY = "The node was low on resource: memory. Threshold quantity: 750Mi, available: 225800Ki. "
USING_MEMORY = "using 4395616Ki, request is 0, has larger consumption of memory. "
"""As the kubelet of Kubernetes 1.37 has them (pkg/kubelet/eviction/helpers.go)."""
NO_PYTHON = 'runc create failed: exec: "python3": executable file not found in $PATH'


def pod(
    phase: str = "Running",
    *,
    node: str = "n1",
    worker: int = 0,
    workers: int = 1,
    site_image: bool = False,
    memory: str = "",
    claims: Mapping[str, str] = MappingProxyType({}),
    **status: Any,
) -> JobPod:
    """Return what is kept of a pod with this status."""
    limits = {"limits": {"memory": memory}} if memory else {}
    containers = [{"name": "beside"}, {"name": "worker", "resources": limits}]
    result = project_job_pod(
        {
            "metadata": {
                "name": f"p{worker}",
                "uid": f"u{worker}",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {} if site_image else {"makeway/own-image": "true"},
                "labels": {
                    "makeway/job": "j-1",
                    "makeway/attempt": "2",
                    "makeway/worker": str(worker),
                    "makeway/workers": str(workers),
                },
            },
            "spec": {
                "containers": containers,
                "resourceClaims": [{"name": name, "resourceClaimTemplateName": one} for name, one in claims.items()],
                **({"nodeName": node} if node else {}),
            },
            "status": {"phase": phase, **status},
        }
    )
    assert result is not None
    return result


def waiting(reason: str, message: str = "", name: str = "worker") -> dict[str, Any]:
    """Return the status of a container that waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": name, "image": "notebook:1", "state": state}]}


def over(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """Return the status of a container that has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "worker", "image": "notebook:1", "state": state}]}


def before(state: str, **facts: Any) -> dict[str, Any]:
    """Return the status of the init container that copies the launcher, and of a worker that waits for it."""
    launcher = {"name": "launcher", "image": "makeway:1", "state": {state: facts}}
    return {"initContainerStatuses": [launcher], **waiting("PodInitializing")}


def gone_pod() -> JobPod:
    """Return a pod that ran, as it is remembered when it is there no more."""
    return replace(pod(), phase="Failed")


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    """Return the conditions of a pod."""
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


def test_a_pod_is_kept_with_its_place_in_the_attempt() -> None:
    kept = pod(worker=1, workers=2)
    assert (kept.key, kept.worker, kept.workers, kept.node) == (("j-1", 2), 1, 2, "n1")
    assert kept.created == 1767225600.0
    assert project_job_pod({"metadata": {"name": "x", "uid": "y", "labels": {"makeway/session": "s-1"}}}) is None


@pytest.mark.covers("F82")
@pytest.mark.parametrize(
    ("kept", "reason", "message"),
    [
        (pod(), "", ""),
        (pod("Pending"), "init", "its container is being created"),
        (
            pod("Pending", node="", **condition("PodScheduled", "False", "Unschedulable", "0/3 nodes are available")),
            "unschedulable",
            "Kubernetes does not place its pod: 0/3 nodes are available",
        ),
        (pod("Pending", node=""), "scheduler", "Kubernetes has not placed its pod yet"),
        (
            pod("Pending", node="", claims={"gpus": "one-gpu", "nics": "a-card"}),
            "claims",
            "Kubernetes has not made its claims of devices from the ResourceClaimTemplates one-gpu and a-card yet",
        ),
        (
            pod("Pending", node="", claims={"gpus": "one-gpu"}, resourceClaimStatuses=[{"name": "gpus"}]),
            "scheduler",
            "Kubernetes has not placed its pod yet",
        ),
        (
            pod("Pending", **waiting("ImagePullBackOff", "Back-off pulling image")),
            "image_pull",
            "its image cannot be pulled: Back-off pulling image",
        ),
        (
            pod("Pending", **waiting("ImageInspectError", 'Failed to inspect image "x"')),
            "image_pull",
            'its image cannot be pulled: Failed to inspect image "x"',
        ),
        (
            pod("Pending", **waiting("SignatureValidationFailed", "no signature of a known key")),
            "image_pull",
            "its image cannot be pulled: no signature of a known key",
        ),
        (pod("Pending", **waiting("InvalidImageName")), "no_image", "its image cannot be pulled: InvalidImageName"),
        (
            pod(
                "Pending", **waiting("ErrImagePull", "code = NotFound desc = failed to resolve reference: x: not found")
            ),
            "no_image",
            "its image cannot be pulled: code = NotFound desc = failed to resolve reference: x: not found",
        ),
        (
            pod("Pending", **waiting("ErrImagePull", "dial tcp 10.0.0.9:443: connect: connection refused")),
            "image_pull",
            "its image cannot be pulled: dial tcp 10.0.0.9:443: connect: connection refused",
        ),
        (
            pod("Pending", **waiting("CreateContainerConfigError", 'secret "x" not found')),
            "container",
            'its container cannot be created: secret "x" not found',
        ),
        (pod("Pending", **waiting("ContainerCreating")), "init", "its container is being created"),
        (
            pod("Pending", **condition("PodReadyToStartContainers", "False", "")),
            "volumes",
            "its volumes are being mounted, or its network is being set up",
        ),
        (pod("Pending", **condition("PodReadyToStartContainers", "True", "")), "image", "its image is being pulled"),
        (
            pod("Pending", **condition("PodReadyToStartContainers", "True", ""), **before("running")),
            "init",
            "its init container launcher is still running",
        ),
        (
            pod("Pending", **before("waiting", reason="ErrImagePull", message="401 Unauthorized")),
            "site_image",
            "the image makeway:1 of its container launcher cannot be pulled, and an administrator has to change it: "
            "401 Unauthorized",
        ),
        (
            pod("Pending", **before("waiting", reason="ErrImagePull", message="i/o timeout")),
            "image_pull",
            "the image makeway:1 of its container launcher cannot be pulled: i/o timeout",
        ),
        (
            pod("Pending", site_image=True, **waiting("ErrImagePull", "notebook:1: not found")),
            "site_image",
            "the default image of jobs notebook:1 cannot be pulled, and an administrator has to change it: "
            "notebook:1: not found",
        ),
    ],
)
def test_a_pod_that_waits_says_for_what(kept: JobPod, reason: str, message: str) -> None:
    assert hosts_of([kept], RUNS) == WorkerHosts(1, True, False, reason, message)


@pytest.mark.parametrize(
    ("kept", "by_node", "code", "says"),
    [
        (pod("Failed", **over(137, "OOMKilled")), False, 137, "its node ran out of memory"),
        (
            pod("Failed", memory="64Mi", **over(137, "OOMKilled")),
            False,
            137,
            "it used more memory than the 64 MiB that its container may use: choose a profile with more memory, "
            "or use less",
        ),
        (pod("Failed", **over(1)), False, None, "its launcher ended with exit code 1 without a report"),
        (pod("Failed", **over(1, message="no\nspace")), False, None, "exit code 1 without a report: space"),
        (pod("Running", **over(1)), False, None, "its launcher ended with exit code 1 without a report"),
        (
            pod("Failed", **over(128, "StartError", NO_PYTHON)),
            False,
            127,
            'its image does not start python3: exec: "python3": executable file not found in $PATH: choose an image '
            "that has python3",
        ),
        (pod("Failed", **over(255, "Unknown")), True, None, "its node n1 was restarted, or lost its container"),
        (pod("Failed", **over(137, "ContainerStatusUnknown")), True, None, "its node n1 was restarted"),
        (pod("Failed", reason="Evicted", message="The node was low on resource: memory."), True, None, "short of"),
        *(
            (pod("Failed", reason="Evicted", message=message), False, 137, message.strip())
            for message in OVER_ITS_LIMIT
        ),
        (
            pod("Failed", reason="Evicted", message=f"{LOW}Container beside was {USING}"),
            True,
            None,
            f"its node n1 was short of a resource and evicted its pod: {LOW}",
        ),
        *(
            (pod("Failed", **status), False, None, f"than it requested of what its node n1 was short of: {message}")
            for message in (f"{LOW}Container worker was {USING}", f"{LOW_ON_MEMORY}Container worker was {USING_MEMORY}")
            for status in (
                {"reason": "Evicted", "message": message, **over(137, "ContainerStatusUnknown")},
                {"reason": "Evicted", "message": message},
                condition("DisruptionTarget", "True", "TerminationByKubelet", message),
            )
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: inodes. "),
            True,
            None,
            "short of a resource and evicted its pod: The node was low on resource: inodes",
        ),
        (
            pod("Failed", **condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "drained")),
            True,
            None,
            "its pod was disrupted (EvictionByEvictionAPI): drained",
        ),
        (
            pod("Failed", **condition("DisruptionTarget", "True", "PreemptionByScheduler")),
            True,
            None,
            "its pod was disrupted (PreemptionByScheduler)",
        ),
        (pod("Failed", node="n2"), True, None, "its node n2 is down"),
        (pod("Failed", node="n3"), True, None, "its node n3 is gone"),
        (pod("Failed", reason="OutOfcpu", **over(143)), True, None, "its node n1 ended its pod (OutOfcpu)"),
        (pod("Failed", reason="Preempting", **over(143)), True, None, "its node n1 ended its pod (Preempting)"),
        (pod("Failed", reason="Terminated", **over(143)), True, None, "its node n1 ended its pod (Terminated)"),
        (gone_pod(), False, None, "its pod was deleted by others"),
    ],
)
def test_how_a_pod_ended_is_told_apart(kept: JobPod, by_node: bool, code: int | None, says: str) -> None:
    result = hosts_of([kept], RUNS)
    assert (result.present, result.node_lost, result.exit_code) == (False, by_node, code)
    assert says in result.message
    assert result.evicted is (kept.disruption == "EvictionByEvictionAPI")


@pytest.mark.parametrize(
    ("node", "evicted"), [("n1", True), ("n2", False), ("n3", True)], ids=["runs", "is down", "is gone"]
)
def test_a_pod_that_was_told_to_leave_was_evicted_also_where_its_node_is_gone_since(node: str, evicted: bool) -> None:
    told = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "drained")
    for kept in (pod("Failed", node=node, **told), pod("Failed", node=node, **told, **over(75))):
        result = hosts_of([kept], RUNS)
        assert (result.node_lost, result.evicted) == (True, evicted)
    if node == "n1":
        assert hosts_of([pod("Running", node=node, **told)], RUNS).evicted, "while it saves"


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (
            pod("Failed", reason="OutOfnvidia.com/gpu", message="no GPU"),
            "n1 refused its pod (OutOfnvidia.com/gpu): no GPU",
        ),
        (pod("Failed", reason="UnexpectedAdmissionError", message="no GPU"), "n1 refused its pod"),
        (pod("Failed", **condition("DisruptionTarget", "True", "PreemptionByScheduler")), "PreemptionByScheduler"),
        (pod("Failed", **over(128, "StartError", "cgroup: no space left")), "cgroup: no space left"),
        (
            pod("Failed", site_image=True, **over(128, "StartError", NO_PYTHON)),
            "the default image of jobs notebook:1 does not start python3, and an administrator has to change it: exec",
        ),
        (
            pod("Failed", **before("terminated", exitCode=1, reason="Error", message="Traceback\nOSError: disk full")),
            "its container launcher ended with exit code 1: OSError: disk full",
        ),
        (pod("Failed"), "its pod was deleted by others before it ran"),
    ],
)
def test_a_pod_whose_worker_never_began_says_so(kept: JobPod, says: str) -> None:
    result = hosts_of([kept], RUNS)
    assert (result.present, result.never_ran, result.exit_code) == (False, True, None)
    assert says in result.message
    assert not hosts_of([pod("Failed", node="n2")], RUNS).never_ran, "its node is down, and takes nothing now"


def test_a_pod_whose_worker_ended_is_over_while_others_of_its_containers_run() -> None:
    kept = pod("Running", **over(0))
    assert (kept.present, kept.over) == (False, False)
    assert hosts_of([kept], RUNS, reported_workers=[0]).present is False


def test_an_attempt_is_there_while_one_of_its_pods_is() -> None:
    ends = [pod("Failed", worker=0, workers=2, **over(1)), pod("Running", worker=1, workers=2)]
    assert hosts_of(ends, RUNS, reported_workers=[0]) == WorkerHosts(2)
    incomplete = hosts_of(ends[1:], RUNS)
    assert (incomplete.waiting_reason, incomplete.message) == ("incomplete", "1 of its 2 pods are not there")
    assert hosts_of(ends[1:], RUNS, reported_workers=[0]) == WorkerHosts(2), (
        "one that has reported its end needs no pod"
    )


def test_the_first_pod_that_ends_without_a_report_decides_for_its_gang() -> None:
    killed = pod("Failed", worker=1, workers=3, **over(137, "OOMKilled"))
    gang = [pod(worker=0, workers=3), killed, pod("Succeeded", worker=2, workers=3, **over(0))]
    result = hosts_of(gang, RUNS, reported_workers=[2])
    assert (result.present, result.exit_code) == (False, 137)
    assert result.message == "worker 1: its node ran out of memory"
    lost = hosts_of([gang[0], pod("Failed", node="n3", worker=1, workers=3), gang[2]], RUNS, reported_workers=[2])
    assert (lost.present, lost.node_lost, lost.message) == (False, True, "worker 1: its node n3 is gone")


def test_the_fault_of_the_job_counts_before_that_of_a_node() -> None:
    ends = [pod("Failed", node="n2", workers=2), pod("Failed", worker=1, workers=2, **over(137, "OOMKilled"))]
    result = hosts_of(ends, RUNS)
    assert (result.workers, result.exit_code, result.node_lost) == (2, 137, False)


def test_a_gang_of_which_one_worker_used_more_of_its_node_than_it_requested_does_not_blame_nodes() -> None:
    evicted = condition("DisruptionTarget", "True", "TerminationByKubelet", f"{LOW}Container worker was {USING}")
    other = pod("Failed", reason="Evicted", message=f"{LOW}", workers=2, **over(137))
    still = [pod(workers=2), pod(worker=1, workers=2, **evicted)]
    assert hosts_of(still, RUNS) == WorkerHosts(2), "it saves, and its end counts then"
    result = hosts_of([other, replace(still[1], phase="Failed")], RUNS)
    assert (result.present, result.node_lost, result.worker) == (False, False, 1)
    assert result.message.startswith("worker 1: its pod was evicted")


def test_a_pod_that_was_deleted_while_it_ran_is_judged_by_its_last_state() -> None:
    drained = pod(**condition("DisruptionTarget", "True", "DeletionByTaintManager", "no execute"))
    assert end_of_deleted_pods([drained], RUNS).node_lost
    assert not end_of_deleted_pods([pod()], RUNS).node_lost
    assert end_of_deleted_pods([pod(node="n3")], RUNS).message == "its node n3 is gone"
