"""A lease as pod settings, and in a real KubeSpawner's manifest."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makeway_quota.backends.kubernetes.cluster.pod_requests import project_share
from makeway_spawner import pod
from makeway_spawner.lease import Lease

LEASE = Lease(
    "s-1",
    "gpu2",
    "rnd",
    2.0,
    False,
    [("node-7", [2, 5])],
    {"NVIDIA_VISIBLE_DEVICES": "2,5"},
    False,
    cpu=8,
    memory=32768,
)
CPU = Lease("s-2", "cpu", None, 0.0, False, [], {}, False)
NODE = {"key": "metadata.name", "operator": "In", "values": ["node-7"]}


def test_labels_identify_the_session_and_owners_are_annotations() -> None:
    assert pod.labels(LEASE, "lab") == {
        "app.kubernetes.io/managed-by": "makeway",
        "makeway/instance": "lab",
        "makeway/kind": "session",
        "makeway/session": "s-1",
        "makeway/profile": "gpu2",
        "makeway/preemptible": "false",
        "makeway/team": "rnd",
    }
    assert "makeway/team" not in pod.labels(CPU, "lab")
    assert pod.pod_annotations(LEASE, "Ana <x>") == {"makeway/owner": "Ana <x>", "makeway/placement": "node-7:2,5"}


def test_the_service_knows_the_pod_of_a_session_by_its_labels() -> None:
    made = {"metadata": {"labels": pod.labels(LEASE, "lab")}, "spec": {"nodeName": "node-7"}}
    ours, others = project_share(made, "lab"), project_share(made, "other")
    assert ours is not None
    assert others is not None
    assert (ours.workload, others.workload) == ("s-1", "")


@pytest.mark.covers("F42", "N06")
def test_the_node_is_added_to_every_alternative_of_the_sites_own_affinity() -> None:
    assert pod.node_affinity(LEASE, []) == [{"matchFields": [NODE]}]
    own = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, {"matchExpressions": []}]
    both = pod.node_affinity(LEASE, own)
    assert [term["matchFields"] for term in both] == [[NODE], [NODE]]
    assert both[0]["matchExpressions"] == own[0]["matchExpressions"]
    assert "matchFields" not in own[0]
    assert pod.node_affinity(CPU, own) == own
    planned = replace(CPU, team="rnd", placement=[("node-7", [])])
    assert pod.node_affinity(planned, []) == [{"matchFields": [NODE]}], "its CPU and memory are counted there"


def test_device_numbers_are_left_to_the_runtime() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "2,5", "NVIDIA_VISIBLE_DEVICES": "2,5", "MAKEWAY_TEAM": "rnd"}
    assert pod.environment(env, LEASE) == {"MAKEWAY_TEAM": "rnd"}
    assert pod.environment(env, CPU)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert pod.gpu_resources(LEASE, "nvidia.com/gpu") == {"nvidia.com/gpu": "2"}
    assert pod.gpu_resources(CPU, "nvidia.com/gpu") == {}


def test_a_fraction_never_becomes_a_resource() -> None:
    half = replace(LEASE, gpus=0.5)
    with pytest.raises(ValueError, match="whole devices"):
        pod.gpu_resources(half, "nvidia.com/gpu")
    assert pod.gpu_resources(replace(LEASE, gpus=2_000_000.0), "nvidia.com/gpu") == {"nvidia.com/gpu": "2000000"}


def test_cpu_and_memory_are_requests_and_limits() -> None:
    assert pod.cpu_and_memory(LEASE) == {
        "cpu_guarantee": 8, "cpu_limit": 8, "mem_guarantee": 32 * 2**30, "mem_limit": 32 * 2**30
    }  # fmt: skip
    assert pod.cpu_and_memory(CPU) == {}, "the site's own settings stay"


def test_the_disk_of_the_profile_is_request_and_limit() -> None:
    own = {name: {} for name in pod.MERGED_TRAITS} | {"tolerations": [], "node_affinity_required": []}
    result = pod.settings(replace(LEASE, disk=100 * 1024), "ana", "here", own)
    for kind in ("extra_resource_limits", "extra_resource_guarantees"):
        assert result[kind]["ephemeral-storage"] == "102400Mi"
    assert "ephemeral-storage" not in pod.settings(LEASE, "ana", "here", own)["extra_resource_limits"]


def test_a_taint_with_the_name_of_the_resource_is_tolerated_by_those_who_use_it() -> None:
    own = [{"key": "zone", "operator": "Exists"}]
    mine = {"key": "nvidia.com/gpu", "operator": "Exists"}
    assert pod.tolerations(LEASE, "nvidia.com/gpu", own) == [*own, mine]
    assert pod.tolerations(LEASE, "nvidia.com/gpu", [mine]) == [mine]
    assert pod.tolerations(CPU, "nvidia.com/gpu", own) == own
    planned = replace(CPU, team="rnd", placement=[("node-7", [])])
    assert pod.tolerations(planned, "nvidia.com/gpu", own) == [*own, mine], "the node may be one with GPUs"
    slice_of_one = {"key": "nvidia.com/mig-1g.10gb", "operator": "Exists"}
    assert pod.tolerations(LEASE, "nvidia.com/mig-1g.10gb", own) == [*own, slice_of_one, mine]


def test_taints_that_the_service_has_tolerated_for_the_granted_node_are_tolerated_by_the_pod() -> None:
    own = [{"key": "spot", "operator": "Exists"}]
    lease = replace(LEASE, tolerations=["spot", "dedicated=gpus:NoSchedule"])
    dedicated = {"key": "dedicated", "operator": "Equal", "value": "gpus", "effect": "NoSchedule"}
    assert pod.tolerations(lease, "nvidia.com/gpu", own)[1:] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        dedicated,
    ]
    assert pod.tolerations(replace(lease, placement=[]), "nvidia.com/gpu", own) == own
    assert Lease.load(lease.save()) == lease, "the next Hub knows them, too"


def test_only_files_on_volumes_that_outlive_the_pod_are_kept() -> None:
    claim = {"name": "home", "persistentVolumeClaim": {"claimName": "home-ana"}}
    shared = {"name": "data", "nfs": {"server": "nfs", "path": "/"}}
    memory, key = {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "key", "secret": {"secretName": "key"}}
    mounts = {
        "home": {"name": "home", "mountPath": "/home/jovyan"},
        "shm": {"name": "shm", "mountPath": "/dev/shm"},
        "key": {"name": "key", "mountPath": "/key"},
    }
    assert pod.persistent_paths({"home": claim, "shm": memory, "key": key}, mounts) == ["/home/jovyan"]
    assert pod.persistent_paths([claim, shared], [*mounts.values(), {"name": "data", "mountPath": "/data"}]) == [
        "/home/jovyan",
        "/data",
    ]
    assert pod.persistent_paths([memory, key | {"name": "home"}], mounts) == []


@pytest.fixture
async def spawner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a real KubeSpawner without a cluster."""
    from makeway_spawner import kube

    monkeypatch.setattr("kubespawner.spawner.load_config", lambda *_, **__: None)
    hub: Any = SimpleNamespace(
        base_url="/hub/", api_url="http://hub:8081/hub/api", public_host="", server=None, ip="", url="", port=8081
    )
    user: Any = SimpleNamespace(name="ana", escaped_name="ana", url="/user/ana/", id=1, server=None)
    return kube.MakewayKubeSpawner(
        _mock=True, hub=hub, user=user, guaranteed_priority_class="makeway-session", cpu_limit=1, mem_limit="1G"
    )


async def manifest(spawner: Any, lease: Lease) -> dict[str, Any]:
    spawner._lease = lease
    made = await spawner.get_pod_manifest()
    result: dict[str, Any] = made if isinstance(made, dict) else made.to_dict()
    return result


@pytest.mark.covers("N06")
async def test_kubespawners_own_manifest_carries_the_lease(spawner: Any) -> None:
    made = await manifest(spawner, LEASE)
    spec = made["spec"]
    required = spec["affinity"]["node_affinity"]["required_during_scheduling_ignored_during_execution"]
    fields = [field for term in required["node_selector_terms"] for field in term["match_fields"]]
    assert fields == [NODE]
    assert spec["priority_class_name"] == "makeway-session"
    labels = made["metadata"]["labels"]
    assert (labels["makeway/session"], labels["app.kubernetes.io/managed-by"]) == ("s-1", "makeway")
    assert spec["termination_grace_period_seconds"] == 30
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in [
        {key: value for key, value in one.items() if value} for one in spec["tolerations"]
    ]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "2", "cpu": 8, "memory": 32 * 2**30}
    assert resources["requests"] == resources["limits"]
    env = {entry["name"] for entry in spec["containers"][0]["env"]}
    assert "MAKEWAY_SESSION" in env
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize("lease", [LEASE, CPU, replace(LEASE, preemptible=True)])
async def test_autoscalers_do_not_move_a_notebook_unless_the_site_lets_them(spawner: Any, lease: Lease) -> None:
    """Karpenter consolidated notebooks away, with all that their kernels had in memory."""
    stays = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert stays.items() <= (await manifest(spawner, lease))["metadata"]["annotations"].items()
    spawner.extra_annotations = own = {"karpenter.sh/do-not-disrupt": "false"}
    assert (stays | own).items() <= (await manifest(spawner, lease))["metadata"]["annotations"].items()


async def test_the_settings_of_one_lease_are_gone_in_the_next_manifest(spawner: Any) -> None:
    await manifest(spawner, LEASE)
    other = await manifest(spawner, replace(LEASE, id="s-9", placement=[("node-8", [0])]))
    required = other["spec"]["affinity"]["node_affinity"]["required_during_scheduling_ignored_during_execution"]
    fields = [field["values"] for term in required["node_selector_terms"] for field in term["match_fields"]]
    assert fields == [["node-8"]]
    plain = await manifest(spawner, CPU)
    assert (plain["spec"]["affinity"], plain["spec"]["tolerations"]) == (None, None)
    assert (spawner.cpu_limit, spawner.priority_class_name) == (1, "")


@pytest.mark.covers("F02", "F82")
async def test_gpus_are_requested_by_claims_where_the_profile_has_any(spawner: Any) -> None:
    spawner.extra_pod_config = {"resourceClaims": [{"name": "net", "resourceClaimTemplateName": "nic"}]}
    claimed = replace(LEASE, resource="deviceclass.resource.kubernetes.io/gpu", claim_templates={"gpus": "two-gpus"})
    spec = (await manifest(spawner, claimed))["spec"]
    (notebook,) = spec["containers"]
    assert [one["name"] for one in spec["resource_claims"]] == ["net", "gpus"]
    assert spec["resource_claims"][1] == {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    assert notebook["resources"]["claims"] == [{"name": "gpus"}]
    assert not [name for name in notebook["resources"]["limits"] if "/" in name]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}.items() <= next(
        one for one in notebook["env"] if one["name"] == "NVIDIA_VISIBLE_DEVICES"
    ).items()
    assert Lease.load(claimed.save()) == claimed, "the next Hub knows them, too"
    other = (await manifest(spawner, LEASE))["spec"]
    assert [one["name"] for one in other["resource_claims"]] == ["net"]


async def test_gpus_are_requested_by_the_name_that_they_have_in_their_pool(spawner: Any) -> None:
    slices = replace(LEASE, resource="nvidia.com/mig-1g.10gb")
    spec = (await manifest(spawner, slices))["spec"]
    limits = spec["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/mig-1g.10gb"] == "2"
    assert "nvidia.com/gpu" not in limits
    assert "nvidia.com/mig-1g.10gb" in [one["key"] for one in spec["tolerations"]]


async def test_the_image_of_the_lease_is_that_of_the_pod(spawner: Any) -> None:
    site = spawner.image
    container = (await manifest(spawner, replace(LEASE, image="site/torch:2")))["spec"]["containers"][0]
    assert container["image"] == "site/torch:2"
    assert "site/torch:2" in [one["value"] for one in container["env"] if one["name"] == "JUPYTER_IMAGE"]
    assert (await manifest(spawner, LEASE))["spec"]["containers"][0]["image"] == site


async def test_a_profile_without_cpu_and_memory_leaves_the_sites_limits(spawner: Any) -> None:
    limits = (await manifest(spawner, CPU))["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": 1.0, "memory": 2**30}


def test_no_private_name_of_the_hubs_spawner_is_overridden_by_accident() -> None:
    """JupyterHub's own `_failed` once was, and it replaced spawners that ran."""
    from kubespawner import KubeSpawner
    from makeway_spawner.kube import MakewayKubeSpawner
    from traitlets import HasTraits

    ours = [one for one in MakewayKubeSpawner.__mro__ if one.__module__.startswith("makeway_spawner.")]
    known = set(dir(KubeSpawner)) - set(dir(HasTraits))
    hidden = {name for one in ours for name in vars(one) if name.startswith("_") and name in known}
    of_claims = {"_check_pvc_exists", "_make_create_pvc_request"}
    of_addresses = {"_get_pod_port"}
    assert hidden == {"_start", "_make_create_pod_request", "_start_reflector"} | of_claims | of_addresses


async def test_homes_have_the_label_by_which_the_charts_page_deletes_them(spawner: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/chart.md").read_text(encoding="utf-8")
    (selector,) = re.findall(r"^kubectl .* delete pvc --selector (\S+)$", page, re.MULTILINE)
    assert spawner.get_pvc_manifest().metadata.labels[selector] == "ana"
