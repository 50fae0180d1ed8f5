"""Devices that drivers offer by dynamic resource allocation (DRA) are counted, and so are the claims on them (K8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_server import ApiServer
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable
from makeway_quota.backends.kubernetes.api.informer import Timing
from makeway_quota.backends.kubernetes.cluster import dra_informers
from makeway_quota.backends.kubernetes.cluster import inventory as inventory_module
from makeway_quota.backends.kubernetes.cluster.dra_devices import (
    CLAIMS,
    CLASSES,
    EXTENDED_RESOURCE_CLAIM,
    GENERATED_CLAIM,
    IMPLICIT_RESOURCE_PREFIX,
    SLICES,
    DeviceId,
    DeviceSlice,
    HeldDevices,
    index_of,
    project_class,
    project_slice,
)
from makeway_quota.backends.kubernetes.cluster.inventory import KubernetesInventory
from makeway_quota.backends.kubernetes.cluster.nodes import NodeSelector
from makeway_quota.backends.kubernetes.cluster.pod_requests import project_share

DRIVER = "gpu.nvidia.com"
GPU, MIG = "example.com/gpu", f"{IMPLICIT_RESOURCE_PREFIX}mig"
LABELS = {"app.kubernetes.io/managed-by": "makeway", "makeway/instance": "here", "makeway/attempt": "1"}


def meta(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "uid": name, "resourceVersion": "1", **more}


def node(**offered: str) -> dict[str, Any]:
    status = {"allocatable": {"cpu": "64", **offered}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": meta("n0"), "spec": {}, "status": status}


def pod(name: str, job: str = "", **requests: str) -> dict[str, Any]:
    ours = {**LABELS, "makeway/job": job, "makeway/worker": "0"} if job else {}
    containers = [{"name": "main", "resources": {"requests": requests}}]
    spec = {"nodeName": "n0", "containers": containers}
    return {"metadata": meta(name, namespace="jobs", labels=ours), "spec": spec, "status": {"phase": "Running"}}


def device_class(name: str, *expressions: str, resource: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"selectors": [{"cel": {"expression": text}} for text in expressions]}
    return {"metadata": meta(name), "spec": spec | ({"extendedResourceName": resource} if resource else {})}


def device_slice(*devices: tuple[str, str], name: str = "s", generation: int = 1, where: Any = None) -> dict[str, Any]:
    """Return a slice of devices, each with its type."""
    made = [{"name": item, "attributes": {"type": {"string": kind}, "whole": {"bool": True}}} for item, kind in devices]
    pool = {"name": "n0", "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": meta(name),
        "spec": {"driver": DRIVER, "pool": pool, "devices": made, **(where or {"nodeName": "n0"})},
    }


def claim(
    name: str, *devices: str, pods: tuple[str, ...] = (), extended: bool = False, generated: bool = False
) -> dict[str, Any]:
    results = [{"request": "r", "driver": DRIVER, "pool": "n0", "device": item} for item in devices]
    reserved = [{"resource": "pods", "name": item, "uid": item} for item in pods]
    notes = {EXTENDED_RESOURCE_CLAIM: "true"} if extended else {GENERATED_CLAIM: "gpus"} if generated else {}
    metadata = meta(name, namespace="jobs", annotations=notes)
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
    return {"metadata": metadata, "spec": {}, "status": status}


CLASS = device_class("gpu", f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'", resource=GPU)
SLICED = device_class("mig", f'device.driver == "{DRIVER}"', f'device.attributes["{DRIVER}"].type == "mig"')
DEVICES = device_slice(*((f"g{at}", "gpu") for at in range(4)), *((f"m{at}", "mig") for at in range(7)))


async def seen(lists: dict[str, list[Any]], *pods: dict[str, Any], selectors: Any = None, **offered: str) -> NodeStatus:
    """Return the node as the inventory shows it."""
    server = ApiServer()
    server.lists = {"/api/v1/nodes": [node(**offered)], "/api/v1/pods": list(pods), **lists}
    chosen = selectors or [NodeSelector("whole", GPU), NodeSelector("slices", MIG)]
    inventory = KubernetesInventory(server, chosen, instance="here")
    await inventory.open()
    result = inventory.node_statuses()["n0"]
    await inventory.close()
    return result


def amounts(found: NodeStatus) -> dict[str, tuple[int, int]]:
    """Return the devices of each pool, and the milli-GPUs that others hold of them."""
    return {item.pool: (len(item.devices), item.foreign_gpus) for item in found.by_pool()}


@pytest.mark.covers("F02", "F82")
async def test_devices_of_a_class_are_the_gpus_of_the_pool_with_its_resource() -> None:
    result = await seen({CLASSES: [CLASS, SLICED], SLICES: [DEVICES]})
    assert amounts(result) == {"whole": (4, 0), "slices": (7, 0)}
    only = await seen(
        {CLASSES: [CLASS, SLICED], SLICES: [DEVICES]}, selectors=[NodeSelector("a", f"{IMPLICIT_RESOURCE_PREFIX}gpu")]
    )
    assert amounts(only) == {"a": (4, 0)}, "every class has a resource of its own name"


@pytest.mark.covers("F02", "F82")
async def test_what_claims_of_others_hold_is_foreign_and_what_requests_say_counts_once() -> None:
    lists = {
        CLASSES: [CLASS, SLICED],
        SLICES: [DEVICES],
        CLAIMS: [
            claim("theirs", "g0", "g1", pods=("theirs",)),
            claim("waiting", "m0"),
            claim("ours", "m1", pods=("ours",)),
            claim("shared", "m2", pods=("ours", "theirs")),
            claim("made-for-requests", "g2", pods=("asks",), extended=True),
            claim("elsewhere", "x9", pods=("theirs",)),
            {"metadata": meta("pending", namespace="jobs"), "spec": {}},
        ],
    }
    result = await seen(lists, pod("theirs"), pod("ours", job="j-1"), pod("asks", **{GPU: "1"}))
    assert amounts(result) == {"whole": (4, 3000), "slices": (7, 3000)}, "our pods hold by requests only"


@pytest.mark.covers("F02", "F82")
async def test_our_pods_request_the_classes_resource_as_that_of_a_device_plugin() -> None:
    lists = {CLASSES: [CLASS], SLICES: [DEVICES], CLAIMS: [claim("c", "g0", pods=("ours",), extended=True)]}
    result = await seen(lists, pod("ours", job="j-1", **{GPU: "1"}), selectors=[NodeSelector("whole", GPU)])
    assert amounts(result) == {"whole": (4, 0)}
    assert [(item.workload, item.gpus) for item in result.pods] == [("j-1", 1000)]


def with_claims(made: dict[str, Any], *claims: str) -> dict[str, Any]:
    """Return a pod whose claims Kubernetes has generated."""
    names = [{"name": f"c{at}", "resourceClaimName": item} for at, item in enumerate(claims)]
    return made | {"status": {**made["status"], "resourceClaimStatuses": names}}


@pytest.mark.covers("F02", "F82")
async def test_a_claim_that_was_generated_for_a_pod_counts_as_what_that_pod_holds() -> None:
    lists = {
        CLASSES: [CLASS],
        SLICES: [DEVICES],
        CLAIMS: [
            claim("ours-1", "g0", pods=("ours",), generated=True),
            claim("ours-2", "g1", pods=("ours",), generated=True),
            claim("theirs-1", "g2", pods=("theirs",), generated=True),
        ],
    }
    pods = (with_claims(pod("ours", job="j-1"), "ours-1", "ours-2"), with_claims(pod("theirs"), "theirs-1"))
    result = await seen(lists, *pods, selectors=[NodeSelector("whole", GPU)])
    assert amounts(result) == {"whole": (4, 1000)}
    assert [(item.workload, item.gpus) for item in result.pods] == [("j-1", 2000)]


@pytest.mark.covers("F02", "F82")
async def test_a_generated_claim_counts_from_when_its_pod_is_on_the_node_until_its_devices_are_free() -> None:
    server = Restricted()
    server.lists[CLAIMS] = [claim("ours-1", "g0", generated=True)]
    async with opened(server) as inventory:
        assert amounts(inventory.node_statuses()["n0"])["whole"] == (4, 0), "its pod is about to be bound"

        def put(made: dict[str, Any] | None) -> None:
            if made is None:
                del inventory.pods.objects["jobs/ours"]
            else:
                share = project_share(made, "here")
                assert share is not None
                inventory.pods.objects["jobs/ours"] = share
            inventory.pods._changed.add("jobs/ours")

        put(with_claims(pod("ours", job="j-1"), "ours-1"))
        bound = inventory.node_statuses()["n0"]
        assert [(item.workload, item.gpus) for item in bound.pods] == [("j-1", 1000)]
        assert amounts(bound)["whole"] == (4, 0)
        put(None)
        assert amounts(inventory.node_statuses()["n0"])["whole"] == (4, 1000), "the driver has not freed it yet"
        claims = (inventory.devices._followed or pytest.fail("not followed")).claims
        claims.objects.clear()
        claims._changed.add("jobs/ours-1")
        assert amounts(inventory.node_statuses()["n0"])["whole"] == (4, 0)
        assert inventory._placed_claims == set()


@pytest.mark.covers("F02", "F82")
async def test_only_what_can_be_allocated_whole_on_one_node_is_counted() -> None:
    odd = device_slice(("a", "gpu"), ("b", "gpu"), ("c", "gpu"), name="odd", generation=2)
    odd["spec"]["devices"][0]["consumesCounters"] = [{"counterSet": "x", "counters": {}}]
    odd["spec"]["devices"][1]["taints"] = [{"key": "broken", "effect": "NoExecute"}]
    anywhere = device_slice(("d", "gpu"), name="anywhere", generation=2, where={"allNodes": True})
    lists = {CLASSES: [CLASS], SLICES: [DEVICES, odd, anywhere]}
    result = await seen(lists, selectors=[NodeSelector("whole", GPU)])
    assert amounts(result) == {"whole": (1, 0)}, "an older generation is void"


@pytest.mark.covers("F02")
async def test_a_device_plugin_goes_before_a_class_of_the_same_resource() -> None:
    result = await seen({CLASSES: [CLASS], SLICES: [DEVICES]}, selectors=[NodeSelector("whole", GPU)], **{GPU: "2"})
    assert amounts(result) == {"whole": (2, 0)}


@pytest.mark.parametrize(
    ("expression", "understood"),
    [
        ("device.driver == 'gpu.nvidia.com'", True),
        ("device.driver=='gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].whole == true", True),
        ("device.driver == 'gpu.nvidia.com' || device.driver == 'other'", False),
        ("device.attributes['gpu.nvidia.com'].productName.matches('H100')", False),
        ("device.driver == 'gpu.nvidia.com' && device.driver == 'other'", False),
        ("device.driver == 'gpu.nvidia.com' && (true)", False),
        ("", False),
    ],
)
def test_a_class_that_is_not_understood_has_no_devices(expression: str, understood: bool) -> None:
    made, kept = project_class(device_class("c", expression)), project_slice(DEVICES)
    assert made.understood is understood
    assert kept is not None
    assert any(made.selects(kept.driver, attributes) for _, attributes in kept.devices) is understood


@pytest.mark.parametrize("status", [403, 404])
async def test_a_cluster_without_the_api_has_the_gpus_of_its_device_plugins(status: int) -> None:
    server = ApiServer()
    server.lists = {"/api/v1/nodes": [node(**{GPU: "2"})]}

    def refuse(method: str, path: str) -> None:
        if "resource.k8s.io" in path:
            raise ApiStatusError(status, "", "no")

    server.answer = refuse
    inventory = KubernetesInventory(server, [NodeSelector("whole", GPU)], instance="here")
    await inventory.open()
    assert amounts(inventory.node_statuses()["n0"]) == {"whole": (2, 0)}
    assert inventory.synced
    assert not inventory.problem
    await inventory.close()


class Restricted(ApiServer):
    """An API server that refuses to list or watch what a test names, and whose requests for some lists never end."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = {"/api/v1/nodes": [node()], CLASSES: [CLASS, SLICED], SLICES: [DEVICES]}
        self.unwatched: dict[str, Exception] = {}
        """what a watch of a path is refused with"""
        self.refused: dict[str, Exception] = {}
        """what everything about a path is refused with"""
        self.endless: set[str] = set()
        """lists that are never complete"""

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path in self.refused:
            raise self.refused[path]
        if path in self.endless and (query or {}).get("limit") != "1":
            await asyncio.Event().wait()
        return await super().get(path, query)

    @asynccontextmanager
    async def stream(self, path: str, query: Any, silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        if error := self.refused.get(path) or self.unwatched.get(path):
            raise error
        async with super().stream(path, query, silence) as lines:
            yield lines


FORBIDDEN = ApiStatusError(403, "Forbidden", "cannot watch resourceslices")
POOLS = (NodeSelector("whole", GPU), NodeSelector("slices", MIG))
QUICK = Timing(first_pause=0.001, max_pause=0.002)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dra_informers, "ERROR_RETRY", 0.002)
    monkeypatch.setattr(dra_informers, "ABSENT_RETRY", 0.004)


@asynccontextmanager
async def opened(server: ApiServer, selectors: Any = POOLS) -> AsyncIterator[KubernetesInventory]:
    inventory = KubernetesInventory(server, selectors, instance="here", timing=QUICK)
    async with asyncio.timeout(5):
        await inventory.open()
    try:
        yield inventory
    finally:
        await inventory.close()


async def soon(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - it is the tasks of the informers that make it so
            await asyncio.sleep(0.001)


def asks(server: ApiServer, path: str) -> int:
    return server.asked.count(f"GET {path}")


@pytest.mark.covers("F02", "F82")
@pytest.mark.parametrize("status", [401, 403, 404, 500])
@pytest.mark.parametrize("path", [SLICES, CLASSES, CLAIMS])
async def test_a_watch_of_devices_that_is_refused_is_a_notice_and_the_count_stays(path: str, status: int) -> None:
    server = Restricted()
    server.unwatched[path] = ApiStatusError(status, "", "cannot watch")
    async with opened(server) as inventory:
        await soon(lambda: inventory.devices.problem)
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
        assert inventory.synced
        assert not inventory.problem
        assert not inventory.refused
        assert "following GPUs of DRA drivers fails" in (inventory.quarantine.sentence(named=True) or "")
        if status != 500:
            before = asks(server, SLICES)
            await soon(lambda: asks(server, SLICES) >= before + 4)  # read again now and then
            assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
        server.unwatched.clear()
        await soon(lambda: not inventory.devices.problem)
        inventory.node_statuses()
        assert inventory.quarantine.sentence(named=True) is None


@pytest.mark.parametrize("status", [401, 403])
async def test_rights_that_are_taken_away_leave_the_devices_as_counted_last(status: int) -> None:
    server = Restricted()
    async with opened(server) as inventory:
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
        server.refused = {item: ApiStatusError(status, "", "no") for item in (SLICES, CLASSES, CLAIMS)}
        inventory.retry_now()
        await soon(lambda: inventory.devices.problem)
        await soon(lambda: inventory.devices._followed is not None)
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
        assert inventory.synced
        await soon(lambda: not inventory.problem)  # of nodes and pods, which were asked again, too


class SlowToEnd(Restricted):
    """An API server whose endless requests take a while to end when they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = asyncio.Event()

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        try:
            return await super().get(path, query)
        except asyncio.CancelledError:
            self.ending.set()
            await asyncio.sleep(0.05)
            raise


async def test_an_inventory_closes_while_the_devices_are_being_given_up() -> None:
    server = SlowToEnd()
    server.lists[CLASSES] = []
    async with opened(server) as inventory:
        server.lists[CLASSES], server.endless = [CLASS, SLICED], {SLICES}
        await soon(lambda: inventory.devices._followed)
        followed = inventory.devices._followed
        assert followed is not None
        await soon(lambda: followed.classes.synced)
        server.refused[CLASSES] = FORBIDDEN
        followed.classes.retry_now()
        await soon(server.ending.is_set)
        closed, _ = await asyncio.wait({asyncio.create_task(inventory.close())}, timeout=5)
        assert closed


async def test_an_api_that_is_switched_off_has_no_devices_any_more_and_stops_nothing() -> None:
    server = Restricted()
    async with opened(server) as inventory:
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
        server.refused = {item: ApiStatusError(404, "", "not found") for item in (SLICES, CLASSES, CLAIMS)}
        inventory.retry_now()
        await soon(lambda: sum(many for many, _ in amounts(inventory.node_statuses()["n0"]).values()) == 0)
        assert inventory.synced
        assert not inventory.problem


async def test_devices_are_followed_only_while_a_pool_has_a_resource_of_a_class() -> None:
    server = Restricted()
    server.refused[SLICES] = FORBIDDEN
    async with opened(server, [NodeSelector("plugin", "nvidia.com/gpu")]) as inventory:
        await soon(lambda: asks(server, CLASSES) > 3)
        assert asks(server, CLAIMS) == 0, "no pool has these devices"
        assert inventory.quarantine.sentence(named=True) is None
        server.refused.clear()
        inventory.node_statuses()
        inventory.select(POOLS)
        await soon(lambda: amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)})
        inventory.select([NodeSelector("plugin", "nvidia.com/gpu")])
        await soon(lambda: not inventory.devices.followed)
        assert inventory.node_statuses()["n0"].devices == ()


async def test_the_first_class_of_a_running_service_does_not_make_it_unready() -> None:
    server = Restricted()
    server.lists[CLASSES] = []
    async with opened(server) as inventory:
        server.lists[CLASSES], server.endless = [CLASS, SLICED], {SLICES}
        await soon(lambda: inventory.devices.followed)
        assert inventory.synced
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (0, 0)}


async def test_a_list_of_devices_that_never_ends_holds_up_the_begin_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inventory_module, "DEVICES_SECONDS", 0.01)
    server = Restricted()
    server.endless = {CLAIMS}
    async with opened(server) as inventory:
        assert inventory.synced


async def test_devices_are_asked_for_at_once_when_the_api_server_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dra_informers, "ERROR_RETRY", 3600.0)
    monkeypatch.setattr(dra_informers, "ABSENT_RETRY", 3600.0)
    server = Restricted()
    server.refused[CLASSES] = ApiUnreachable("no answer")
    monkeypatch.setattr(inventory_module, "DEVICES_SECONDS", 0.01)
    async with opened(server) as inventory:
        server.refused.clear()
        inventory.retry_now()
        await soon(lambda: amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)})
        slow = (inventory.devices._followed or pytest.fail("not followed")).all
        for item in slow:
            item._timing = Timing(first_pause=3600.0, max_pause=3600.0)
        server.refused = dict.fromkeys((SLICES, CLASSES, CLAIMS), ApiUnreachable("no answer"))
        inventory.retry_now()
        await soon(lambda: all(item.problem for item in slow))
        server.refused = {}
        await asyncio.sleep(0)
        inventory.retry_now()
        await soon(lambda: not any(item.problem for item in slow))


@pytest.mark.covers("F02", "F82")
async def test_a_device_of_several_classes_counts_in_the_pool_that_its_node_is_in() -> None:
    every = device_class("every", f"device.driver == '{DRIVER}'", resource="example.com/every")
    kinds = {"kind": "two"}
    there = node() | {"metadata": meta("n0", labels=kinds)}
    chosen = [NodeSelector("one", "example.com/every", {"kind": "one"}), NodeSelector("two", GPU, kinds)]
    result = await seen({"/api/v1/nodes": [there], CLASSES: [every, CLASS], SLICES: [DEVICES]}, selectors=chosen)
    assert amounts(result) == {"two": (4, 0)}
    assert result.unassigned == (("example.com/every", 7),), "what only another pool's class selects"


@pytest.mark.covers("F02", "F82")
async def test_a_device_that_several_claims_share_counts_once() -> None:
    shared = [claim(f"c{at}", "g0", "g0", pods=(f"p{at}",)) for at in range(10)]
    result = await seen({CLASSES: [CLASS], SLICES: [DEVICES], CLAIMS: shared}, selectors=[NodeSelector("whole", GPU)])
    assert amounts(result) == {"whole": (4, 1000)}


async def test_what_no_class_compares_is_not_kept_until_one_does() -> None:
    server = Restricted()
    async with opened(server, [NodeSelector("whole", GPU), NodeSelector("all", "example.com/all")]) as inventory:

        def kept() -> set[Any]:
            followed = inventory.devices._followed
            result = followed.slices.objects.values() if followed is not None else ()
            return {name for one in result for _, attributes in one.devices for name in attributes}

        assert kept() == {(DRIVER, "type")}
        whole = device_class("all", f"device.attributes['{DRIVER}'].whole == true", resource="example.com/all")
        server.lists[CLASSES] = [whole]
        classes = (inventory.devices._followed or pytest.fail("not followed")).classes
        classes.objects["all"] = project_class(whole)
        await soon(lambda: kept() == {(DRIVER, "whole")})
        await soon(lambda: amounts(inventory.node_statuses()["n0"]) == {"all": (11, 0)})


def test_devices_that_are_alike_keep_their_attributes_once() -> None:
    kept = project_slice(DEVICES)
    assert kept is not None
    assert len({id(attributes) for _, attributes in kept.devices}) == 2


def test_a_change_of_a_claim_or_slice_concerns_the_nodes_of_its_devices_only() -> None:
    def kept(where: str, generation: int = 1) -> DeviceSlice:
        made = device_slice(("g0", "gpu"), where={"nodeName": where}, generation=generation)
        made["spec"]["pool"]["name"] = where
        return project_slice(made) or pytest.fail("no devices")

    def held(where: str) -> HeldDevices:
        return HeldDevices(frozenset({DeviceId(DRIVER, where, "g0")}))

    def claims(where: str) -> list[tuple[str, set[str]]]:
        return [(one.resource, set(one.claims)) for one in index.on(where, [GPU]).held]

    index = index_of({"s1": kept("n1"), "s2": kept("n2")}, [project_class(CLASS)], {})
    assert index.put_claim("c", held("n1")) == {"n1"}
    assert claims("n1") == [(GPU, {"c"})]
    assert index.put_claim("c", held("n1")) == set(), "nothing changed"
    assert index.put_claim("c", held("n2")) == {"n1", "n2"}
    assert (claims("n1"), claims("n2")) == ([], [(GPU, {"c"})])
    assert index.put_claim("elsewhere", held("n3")) == set()
    assert index.put_slice("s3", kept("n3")) == {"n3"}
    assert claims("n3") == [(GPU, {"elsewhere"})], "the claim came before the slice"
    assert index.put_slice("s4", kept("n1", generation=2)) == {"n1"}
    assert index.put_slice("s1", None) == {"n1"}
    assert index.on("n1", [GPU]).offered == {GPU: 1}
    assert index.put_slice("s4", None) == {"n1"}
    assert index.on("n1", [GPU]).offered == {}
    assert index.put_claim("c", None) == {"n2"}
    assert index.set_classes([project_class(CLASS)]) == set()
    assert index.set_classes([]) == {"n2", "n3"}


async def test_devices_that_cannot_be_counted_are_quarantined_and_nodes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("odd")

    server = Restricted()
    async with opened(server) as inventory:
        with monkeypatch.context() as patched:
            patched.setattr(dra_informers, "index_of", fail)
            assert "n0" in inventory.node_statuses()
            assert "counting GPUs of DRA drivers fails" in (inventory.quarantine.sentence(named=True) or "")
        assert amounts(inventory.node_statuses()["n0"]) == {"whole": (4, 0), "slices": (7, 0)}
