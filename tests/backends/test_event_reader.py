"""Why volumes of pods are not mounted is read from their events, within bounds, and jobs say it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from api_server import ApiServer, pod
from makeway_quota.backends.base import Phase
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, Object
from makeway_quota.backends.kubernetes.attempts.event_reader import (
    LIMIT,
    LONG_PAUSE,
    MAX_PAGES,
    PAUSE,
    SET_UP_SECONDS,
    STEPS,
    causes_of,
)
from makeway_quota.backends.kubernetes.attempts.pod_waits import MAX_WAIT_SECONDS, NOT_THERE
from makeway_quota.backends.remote.backend import REPORT_GRACE
from makeway_quota.store.store import open_store
from pod_backend import Backend

EVENTS = "/api/v1/namespaces/jobs/events"
MISSING = 'MountVolume.SetUp failed for volume "data" : secret "later" not found'
SLOW = 'MountVolume.SetUp failed for volume "nfs" : mount failed: exit status 32'
TIMED_OUT = "Unable to attach or mount volumes: unmounted volumes=[data]: timed out waiting for the condition"


class Server(ApiServer):
    """An API server with events of pods, by reason, which counts the lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: dict[str, list[Object]] = {}
        self.queries: list[Mapping[str, str]] = []

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        result = await super().get(path, query)
        if path != EVENTS:
            return result
        assert query is not None
        self.queries.append(query)
        events = self.warnings.get(query["fieldSelector"].rpartition("=")[2], [])
        start, limit = int(query.get("continue") or 0), int(query["limit"])
        more = {"continue": str(start + limit)} if start + limit < len(events) else {}
        return {"metadata": more, "items": events[start : start + limit]}


def event(uid: str, message: str, at: str = "2026-01-01T00:00:00Z", reason: str = "FailedMount") -> Object:
    return {"involvedObject": {"uid": uid}, "message": message, "lastTimestamp": at, "reason": reason}


def mounting(job: str, worker: int = 0, of: int = 1, ready: str = "False") -> Object:
    """Return a pod on its node whose volumes are not mounted."""
    result = pod(job, "Pending", worker=worker, of=of)
    state = {"waiting": {"reason": "ContainerCreating"}}
    result["status"]["containerStatuses"] = [{"name": "worker", "state": state}]
    if ready:
        result["status"]["conditions"] = [{"type": "PodReadyToStartContainers", "status": ready}]
    return result


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    """Return a backend whose server has events of pods."""
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    made = Backend(Server(), store)
    await made.open()
    await made.nodes()
    yield made
    await made.close(stop_jobs=False)
    store.close()


async def read(backend: Backend, seconds: float = SET_UP_SECONDS) -> None:
    """Advance the time, so that what is read by then is there."""
    await backend.observe()
    backend.now += seconds
    await backend.observe()
    if (reading := backend._event_reader._reading) is not None:
        await asyncio.wait([reading])


def server_of(backend: Backend) -> Server:
    assert isinstance(backend.server, Server)
    return backend.server


@pytest.mark.covers("F82")
@pytest.mark.parametrize(
    "said",
    [
        MISSING,
        'MountVolume.SetUp failed for volume "data" : configmap "later" not found',
        'MountVolume.SetUp failed for volume "data" : references non-existent secret key: password',
        'MountVolume.SetUp failed for volume "data" : configmap references non-existent config key: a.yaml',
    ],
)
@pytest.mark.parametrize("ready", ["False", ""])
async def test_what_a_volume_names_and_is_not_there_is_named_and_gives_the_gpus_back(
    backend: Backend, said: str, ready: str
) -> None:
    """Without the condition PodReadyToStartContainers, which old kubelets do not set, too."""
    backend.hear("ADDED", mounting("j1", ready=ready))
    server_of(backend).warnings["FailedMount"] = [event("j1-0", said)]
    await read(backend)
    result = await backend.seen("j1")
    assert (result.phase, result.waiting_reason) == (Phase.STARTING, "volume_source")
    assert result.message == (
        f"a volume of its pod names something that is not there, and an administrator has to act: {said}"
    )
    for _ in range(2):
        backend.now += MAX_WAIT_SECONDS["volume_source"]
        result = await backend.seen("j1")
    assert (result.phase, result.never_ran) == (Phase.LOST, True)
    assert said in result.message


async def test_other_causes_are_told_and_waited_for_as_long_as_before(backend: Backend) -> None:
    backend.hear("ADDED", mounting("j1"))
    server_of(backend).warnings["FailedMount"] = [event("j1-0", TIMED_OUT, "2026-01-01T00:01:00Z"), event("j1-0", SLOW)]
    await read(backend)
    result = await backend.seen("j1")
    assert (result.waiting_reason, SLOW in result.message) == ("volumes", True)
    backend.now += MAX_WAIT_SECONDS["volumes"] - SET_UP_SECONDS - 1.0
    assert (await backend.seen("j1")).phase is Phase.STARTING
    backend.now += 1.0
    await backend.observe()
    backend.now += REPORT_GRACE
    assert (await backend.seen("j1")).phase is Phase.LOST


async def test_a_worker_of_a_gang_that_lacks_something_is_told_before_one_that_is_slow(backend: Backend) -> None:
    for worker in range(2):
        backend.hear("ADDED", mounting("j1", worker, 2))
    server_of(backend).warnings["FailedMount"] = [event("j1-0", SLOW), event("j1-1", MISSING)]
    await read(backend)
    result = await backend.seen("j1")
    assert (result.waiting_reason, MISSING in result.message) == ("volume_source", True)


async def test_a_pod_that_goes_on_forgets_the_cause_and_one_whose_status_changes_keeps_it(backend: Backend) -> None:
    backend.hear("ADDED", mounting("j1"))
    server_of(backend).warnings["FailedMount"] = [event("j1-0", MISSING)]
    await read(backend)
    changed = mounting("j1")
    changed["metadata"]["resourceVersion"] = "21"
    changed["status"]["hostIP"] = "10.0.0.2"
    backend.hear("MODIFIED", changed)
    assert (await backend.seen("j1")).waiting_reason == "volume_source"
    mounted = mounting("j1", ready="True")
    mounted["metadata"]["resourceVersion"] = "22"
    backend.hear("MODIFIED", mounted)
    result = await backend.seen("j1")
    assert (result.waiting_reason, result.message) == ("image", "its image is being pulled")


async def test_events_are_read_for_all_pods_together_and_only_while_one_waits_for_long(backend: Backend) -> None:
    server = server_of(backend)
    for number in range(50):
        backend.hear("ADDED", mounting(f"j{number}"))
    await read(backend, SET_UP_SECONDS - 1.0)
    assert server.queries == []
    await read(backend, 1.0)
    assert len(server.queries) == len(STEPS)
    assert all(one["limit"] == "500" for one in server.queries)
    await read(backend, PAUSE - 1.0)
    assert len(server.queries) == len(STEPS)
    await read(backend, 1.0)
    assert len(server.queries) == 2 * len(STEPS)
    for number in range(50):
        backend.hear("MODIFIED", pod(f"j{number}"))
    await read(backend, 10 * PAUSE)
    assert len(server.queries) == 2 * len(STEPS)


@pytest.mark.parametrize(
    ("error", "pause"),
    [(ApiStatusError(403, "Forbidden", "no"), LONG_PAUSE), (ApiStatusError(429, "", "busy", 40.0), 40.0)],
)
async def test_without_the_right_pods_wait_as_before_and_it_is_seldom_asked(
    backend: Backend, error: ApiStatusError, pause: float
) -> None:
    def answer(method: str, path: str) -> None:
        asked.append(path)
        if path == EVENTS:
            raise error

    asked: list[str] = []
    server_of(backend).answer = answer
    backend.hear("ADDED", mounting("j1"))
    await read(backend)
    assert (await backend.seen("j1")).message == "its volumes are being mounted, or its network is being set up"
    await read(backend, pause - 1.0)
    assert asked == [EVENTS]
    await read(backend, 1.0)
    assert asked == [EVENTS] * 2


async def test_a_follower_reads_nothing_and_an_api_server_that_is_silent_fails_nothing(backend: Backend) -> None:
    backend.fence_with(lambda: False)
    backend.hear("ADDED", mounting("j1"))
    await read(backend)
    assert server_of(backend).queries == []
    backend.fence_with(lambda: True)

    def silent(method: str, path: str) -> None:
        raise ApiUnreachable("the Kubernetes API server does not answer")

    server_of(backend).answer = silent
    await read(backend, PAUSE)
    assert (await backend.seen("j1")).waiting_reason == "volumes"


def test_of_several_events_the_one_that_names_the_cause_counts_unless_it_has_passed() -> None:
    later, much_later = "2026-01-01T00:05:00Z", "2026-01-01T00:20:00Z"
    assert causes_of([event("a", MISSING), event("a", SLOW, later), event("b", TIMED_OUT)]) == {
        "a": MISSING,
        "b": TIMED_OUT,
    }
    assert causes_of([event("a", MISSING), event("a", SLOW, much_later)]) == {"a": SLOW}
    assert causes_of([event("a", SLOW), event("a", "mount failed: no route", later)]) == {"a": "mount failed: no route"}


def test_odd_events_are_left_out_and_ids_that_change_with_each_try_are_cut() -> None:
    sandbox = 'failed to set up network for sandbox "{}": no plugin'
    odd: list[Object] = [
        {},
        {"involvedObject": None, "message": "x"},
        {"involvedObject": {"uid": "a"}, "message": None},
    ]
    tries = [{causes_of([*odd, event("a", sandbox.format(hex(n)[2:].zfill(64)))])["a"] for n in range(3)}]
    assert tries == [{sandbox.format("…")}]
    assert causes_of([{"involvedObject": {"uid": "a"}, "message": "x" * 9000}]) == {"a": "x" * 300}


def test_what_a_pod_has_got_past_is_no_cause_any_more() -> None:
    later, last = "2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"
    sandbox = event("a", "no network yet", later, "FailedCreatePodSandBox")
    pulling = event("a", 'Pulling image "large"', later, "Pulling")
    assert causes_of([event("a", MISSING), sandbox]) == {"a": "no network yet"}
    assert causes_of([event("a", MISSING), pulling]) == {"a": ""}
    assert causes_of([pulling, event("a", TIMED_OUT, last)]) == {"a": TIMED_OUT}


async def test_a_pod_whose_secret_came_keeps_its_gpus_while_its_image_is_pulled(backend: Backend) -> None:
    """Kubelets show that its volumes are mounted only once its images are pulled."""
    server = server_of(backend)
    backend.hear("ADDED", mounting("j1"))
    server.warnings["FailedMount"] = [event("j1-0", MISSING)]
    await read(backend)
    assert (await backend.seen("j1")).waiting_reason == "volume_source"
    server.warnings["Pulling"] = [event("j1-0", 'Pulling image "large"', "2026-01-01T00:00:31Z", "Pulling")]
    await read(backend, PAUSE)
    for _ in range(2):
        backend.now += MAX_WAIT_SECONDS["volume_source"]
        result = await backend.seen("j1")
    assert (result.phase, result.waiting_reason) == (Phase.STARTING, "volumes")


async def test_events_beyond_the_first_answer_are_read_and_the_answers_are_bounded(backend: Backend) -> None:
    server = server_of(backend)
    backend.hear("ADDED", mounting("j1"))
    others = [event(f"other-{number}", SLOW) for number in range(LIMIT)]
    server.warnings["FailedMount"] = [*others, event("j1-0", MISSING)]
    await read(backend)
    assert (await backend.seen("j1")).waiting_reason == "volume_source"
    server.queries.clear()
    server.warnings["FailedMount"] = others * (MAX_PAGES + 1)
    await read(backend, PAUSE)
    assert len(server.queries) == MAX_PAGES + len(STEPS) - 1


def test_a_forged_event_hides_no_other_and_costs_no_time() -> None:
    began = time.process_time()
    result = causes_of(
        [event("a", MISSING), event("b", 'secret "' * 100_000), event("c", SLOW, "0000-01-01T00:00:00Z")]
    )
    assert (result["a"], result["c"]) == (MISSING, SLOW)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        (f'MountVolume.SetUp failed for volume "{"v" * 63}" : secret "{"s" * 253}" not found', True),
        ('MountVolume.MountDevice failed: secrets "later" not found', True),
        ('rpc error: attach with secret "csi" failed: volume "pvc-1" not found', False),
        ('AttachVolume.Attach failed for volume "pvc-1": volumeattachments.storage.k8s.io "csi-1" not found', False),
    ],
)
def test_only_what_a_volume_names_counts_as_not_there_however_long_its_name_is(said: str, missing: bool) -> None:
    line = causes_of([event("a", said)])["a"]
    assert (NOT_THERE.search(line) is not None, len(line) <= 300) == (missing, True)
