"""Informers follow a real API server through everything that it does: pages, expiry, silence and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
from informing import client, forget_the_past, frozen_api_server, running, soon, start_api_server, stop_api_server
from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.api.informer import Informer, Timing

from kube_cluster.cluster import Cluster

pytestmark = pytest.mark.kube

MAPS = "/api/v1/namespaces/informed/configmaps"
LABEL = "for=tests"
QUICK = Timing(watch=5.0, silence=20.0, first_pause=0.05, max_pause=0.4)


@pytest.fixture(scope="module")
def cluster(control_plane: Cluster) -> Iterator[Cluster]:
    namespaces = "/api/v1/namespaces"
    control_plane.api.create(namespaces, {"metadata": {"name": "informed"}})
    yield control_plane
    control_plane.api.delete(f"{namespaces}/informed")


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[ApiClient]:
    async with client(cluster, seconds=5.0) as made:
        yield made
    cluster.api.delete(MAPS, labelSelector=LABEL)


def config_map(name: str, value: str = "1") -> Object:
    return {"metadata": {"name": name, "labels": {"for": "tests"}}, "data": {"value": value}}


def value(item: Object) -> str | None:
    return item["data"]["value"] if item["data"]["value"] != "ignored" else None


def informer(api: ApiClient, timing: Timing = QUICK) -> Informer[str]:
    return Informer(api, MAPS, value, query={"labelSelector": LABEL}, timing=timing)


def found(followed: Informer[str]) -> dict[str, str]:
    return {key.removeprefix("informed/"): value for key, value in followed.objects.items()}


async def test_a_list_is_read_in_pages_and_followed(api: ApiClient, cluster: Cluster) -> None:
    for number in range(7):
        await api.create(MAPS, config_map(f"map-{number}", str(number)))
    followed = informer(api, Timing(page=3))
    async with running(followed):
        assert found(followed) == {f"map-{number}": str(number) for number in range(7)}
        assert (followed.counts.lists, followed.counts.pages) == (1, 3)
        assert len(followed.take()) == 7
        assert not followed.take()
        await api.create(MAPS, config_map("new"))
        cluster.api.merge(f"{MAPS}/map-1", {"data": {"value": "other"}})
        assert await api.delete(f"{MAPS}/map-2")
        assert not await api.delete(f"{MAPS}/map-2")
        cluster.api.merge(f"{MAPS}/map-3", {"data": {"value": "ignored"}})
        await soon(lambda: "map-3" not in found(followed), "the last change has arrived")
        names = {"new", "map-1", "map-2", "map-3"}
        assert followed.take() == {f"informed/{name}" for name in names}
        assert found(followed)["map-1"] == "other"
        assert not names & {"map-2", "map-3"} & found(followed).keys()
        assert followed.counts.lists == 1


async def test_what_was_not_kept_counts_as_no_change(api: ApiClient, cluster: Cluster) -> None:
    await api.create(MAPS, config_map("map"))
    woken: list[bool] = []
    followed = Informer(api, MAPS, value, query={"labelSelector": LABEL}, wake=lambda: woken.append(True))
    async with running(followed):
        assert woken == [True]
        followed.take()
        events = followed.counts.events
        cluster.api.merge(f"{MAPS}/map", {"metadata": {"annotations": {"seen": "no"}}})
        await soon(lambda: followed.counts.events > events, "the event has arrived")
        assert not followed.take()
        assert woken == [True]


async def test_watches_end_and_go_on_without_another_list(api: ApiClient) -> None:
    followed = informer(api, Timing(watch=1.0, first_pause=0.05))
    async with running(followed):
        await soon(lambda: followed.counts.watches >= 2, "the API server has ended a watch")
        await api.create(MAPS, config_map("late"))
        await soon(lambda: "late" in found(followed), "the second watch shows it")
    assert followed.counts.lists == 1
    assert followed.counts.failures == 0


async def test_a_resync_finds_what_a_watch_left_out(api: ApiClient) -> None:
    await api.create(MAPS, config_map("kept"))
    followed = informer(api, Timing(watch=1.0, first_pause=0.05, resync=0.5))
    async with running(followed):
        followed.objects["informed/never-was"] = "1"
        del followed.objects["informed/kept"]
        await soon(lambda: found(followed) == {"kept": "1"}, "the list is right again")


async def test_a_version_that_the_api_server_forgot_leads_to_a_new_list(cluster: Cluster, api: ApiClient) -> None:
    for name in ("stays", "goes"):
        await api.create(MAPS, config_map(name))
    followed = informer(api)
    async with running(followed):
        await api.create(MAPS, config_map("first"))
        await soon(lambda: "first" in found(followed), "the watch works")
    followed.take()
    await api.delete(f"{MAPS}/goes")
    await api.create(MAPS, config_map("meanwhile"))
    await asyncio.to_thread(forget_the_past, cluster)
    async with running(followed):
        await soon(lambda: "meanwhile" in found(followed), "the new list is complete")
        assert set(found(followed)) == {"stays", "first", "meanwhile"}
        assert followed.take() == {"informed/goes", "informed/meanwhile"}
    assert followed.counts.expired == 1
    assert followed.counts.lists == 2


async def test_a_list_whose_version_expired_between_pages_is_read_at_once(cluster: Cluster, api: ApiClient) -> None:
    for number in range(5):
        await api.create(MAPS, config_map(f"map-{number}"))
    pages: list[dict[str, str]] = []

    class Interrupted(ApiClient):
        """A client whose API server forgets the version of a list after its first page."""

        async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
            pages.append(dict(query or {}))
            if len(pages) == 2:
                await api.create(MAPS, config_map("newer"))
                await asyncio.to_thread(forget_the_past, cluster)
            return await super().get(path, query)

    async with client(cluster) as plain:
        other = Interrupted(plain.connection)
        followed = informer(other, Timing(page=2))
        async with running(followed):
            assert len(found(followed)) == 6
        await other.close()
    assert [("continue" in page, "limit" in page) for page in pages] == [(False, True), (True, True), (False, False)]
    assert followed.counts.expired == 1


async def test_the_api_server_may_be_away(cluster: Cluster, api: ApiClient) -> None:
    await api.create(MAPS, config_map("before"))
    followed = informer(api)
    async with running(followed):
        command = await asyncio.to_thread(stop_api_server, cluster)
        await soon(lambda: followed.counts.failures >= 3, "it has tried again")
        assert "cannot be reached" in followed.problem
        assert found(followed) == {"before": "1"}, "what is known stays"
        with pytest.raises(ApiUnreachable, match="cannot be reached"):
            await api.get(MAPS)
        await asyncio.to_thread(start_api_server, cluster, command)
        await soon(lambda: not followed.problem, "it follows again, though nothing happens")
        await api.create(MAPS, config_map("after"))
        await soon(lambda: "after" in found(followed), "it shows what happens")


async def test_a_silent_watch_counts_as_dead(cluster: Cluster, api: ApiClient) -> None:
    await api.create(MAPS, config_map("before"))
    followed = informer(api, Timing(watch=60.0, silence=1.0, first_pause=0.05, max_pause=0.4))
    async with running(followed):
        with frozen_api_server(cluster):
            await soon(lambda: followed.problem, "it noticed the silence")
            assert followed.problem == "the Kubernetes API server does not answer"
            assert found(followed) == {"before": "1"}
        await api.create(MAPS, config_map("after"))
        await soon(lambda: "after" in found(followed), "it follows again")
    assert followed.counts.watches > 1


async def test_a_refusal_is_told_in_words_and_tried_again(cluster: Cluster, api: ApiClient) -> None:
    path = "/api/v1/namespaces/informed/nothings"
    followed: Informer[str] = Informer(api, path, value, timing=QUICK)
    task = asyncio.create_task(followed.run())
    await soon(lambda: followed.counts.failures >= 2, "it has tried twice")
    assert "404" in followed.problem
    assert not followed.synced
    task.cancel()
    with pytest.raises(ApiStatusError) as refused:
        await api.create(MAPS, {"metadata": {"name": "No Name"}})
    assert (refused.value.status, refused.value.reason) == (422, "Invalid")
    assert "metadata.name" in refused.value.message


async def test_a_delete_with_a_uid_spares_a_namesake(api: ApiClient) -> None:
    old = await api.create(MAPS, config_map("same"))
    assert await api.delete(f"{MAPS}/same", uid=old["metadata"]["uid"])
    new = await api.create(MAPS, config_map("same"))
    assert not await api.delete(f"{MAPS}/same", uid=old["metadata"]["uid"])
    assert (await api.get(f"{MAPS}/same"))["metadata"]["uid"] == new["metadata"]["uid"]
