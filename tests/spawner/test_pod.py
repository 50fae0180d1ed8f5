"""A lease as pod settings, and in a real KubeSpawner's manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from makeway_spawner import pod
from makeway_spawner.held import Held

LEASE = Held("s-1", "gpu2", "rnd", 2.0, False, [("node-7", [2, 5])], {"NVIDIA_VISIBLE_DEVICES": "2,5"}, False)
CPU = Held("s-2", "cpu", None, 0.0, False, [], {}, False)


def test_labels_name_the_session_and_people_are_annotations() -> None:
    assert pod.labels(LEASE)["makeway.io/session"] == "s-1"
    assert "makeway.io/team" not in pod.labels(CPU)
    assert pod.notes(LEASE, "Ana <x>") == {
        "makeway.io/owner": "Ana <x>",
        "makeway.io/placement": "node-7:2,5",
    }


@pytest.mark.covers("F42", "N06")
def test_the_node_is_added_to_every_alternative_of_the_sites_own_affinity() -> None:
    field = {"key": "metadata.name", "operator": "In", "values": ["node-7"]}
    assert pod.pinned(LEASE, []) == [{"matchFields": [field]}]
    own = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, {"matchExpressions": []}]
    both = pod.pinned(LEASE, own)
    assert [term["matchFields"] for term in both] == [[field], [field]]
    assert both[0]["matchExpressions"] == own[0]["matchExpressions"]
    assert "matchFields" not in own[0]
    assert pod.pinned(CPU, own) == own


def test_devices_are_the_runtimes_business() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "2,5", "NVIDIA_VISIBLE_DEVICES": "2,5", "MAKEWAY_TEAM": "rnd"}
    assert pod.environment(env, LEASE) == {"MAKEWAY_TEAM": "rnd"}
    assert pod.environment(env, CPU)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert pod.resources(LEASE, "nvidia.com/gpu") == {"nvidia.com/gpu": "2"}
    assert pod.resources(CPU, "nvidia.com/gpu") == {}


@pytest.mark.covers("N06")
async def test_kubespawners_own_manifest_carries_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    from makeway_spawner import kube

    monkeypatch.setattr("kubespawner.spawner.load_config", lambda *_, **__: None)  # there is no cluster here
    hub: Any = SimpleNamespace(
        base_url="/hub/", api_url="http://hub:8081/hub/api", public_host="", server=None, ip="", url="", port=8081
    )
    user: Any = SimpleNamespace(name="ana", escaped_name="ana", url="/user/ana/", id=1, server=None)
    spawner = kube.MakewayKubeSpawner(_mock=True, hub=hub, user=user, guaranteed_priority_class="makeway-session")
    spawner._lease = LEASE
    manifest = await spawner.get_pod_manifest()
    plain = manifest if isinstance(manifest, dict) else manifest.to_dict()
    text = str(plain)
    assert "node-7" in text
    assert "makeway-session" in text
    assert "'nvidia.com/gpu': '2'" in text
    assert "'makeway.io/session': 's-1'" in text
    assert "CUDA_VISIBLE_DEVICES" not in text
