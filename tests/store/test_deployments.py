"""The documents of deployments: changed in the version that was read, and deleted when nothing of them is left."""

from __future__ import annotations

import pytest
from autoscale.fleet import machine
from makeway_quota.autoscale.step import MachineChanges
from makeway_quota.store import Conflict, Store


def test_a_document_is_replaced_only_in_the_version_that_was_read(store: Store) -> None:
    first = store.deployments.save("cloud", "name: cloud\n", 0, "ana", 1.0)
    second = store.deployments.save("cloud", "name: cloud # 2\n", first.version, "bo", 2.0)
    with pytest.raises(
        Conflict, match="version 1 of the deployment cloud was edited, but it has version 2, saved by bo"
    ):
        store.deployments.save("cloud", "name: cloud # 3\n", first.version, "ana", 3.0)
    with pytest.raises(Conflict):
        store.deployments.save("cloud", "another with its name", 0, "ana", 3.0)
    assert store.deployments.read("cloud") == second
    assert store.deployments.list() == [second]
    assert [(event.reason, event.message) for event in store.machine_log.events("cloud")] == [
        ("saved", "version 2, by bo"),
        ("created", "version 1, by ana"),
    ]


def test_a_deployment_is_deleted_when_its_last_machine_is_gone(store: Store) -> None:
    term = store.take_term("test", 0.0)
    saved = store.deployments.save("cloud", "", 0, "ana", 1.0)
    assert store.machines.commit("cloud", term, MachineChanges((machine(),), revision=1))
    assert not store.deployments.close("cloud", term, 2.0), "it is not being deleted"
    marked = store.deployments.delete("cloud", saved.version, "ana", 2.0)
    assert store.deployments.delete("cloud", saved.version, "ana", 3.0) == marked
    assert not store.machines.commit("cloud", term, MachineChanges((machine(id="m-2"),), revision=marked.version))
    assert not store.machines.commit("cloud", term, MachineChanges((machine(id="m-2"),), revision=saved.version))
    with pytest.raises(Conflict, match="is being deleted"):
        store.deployments.save("cloud", "", marked.version, "ana", 3.0)
    assert not store.deployments.close("cloud", term, 4.0)
    [row] = store.machines.live()
    gone = MachineChanges(changed=(machine(version=row.version, state="failed"),), first_seen={"i-1": 1.0})
    assert store.machines.commit("cloud", term, gone)
    assert not store.deployments.close("cloud", term, 5.0), "an instance was seen"
    assert store.machines.commit("cloud", term, MachineChanges(first_seen={}))
    assert store.deployments.close("cloud", term, 6.0)
    assert store.deployments.read("cloud") is None
    assert store.deployments.list() == []
    assert store.deployments.save("cloud", "", 0, "ana", 7.0).version > marked.version
