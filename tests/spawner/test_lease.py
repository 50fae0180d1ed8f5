"""The lease mixin starts no server without a lease, and no lease outlives its server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from jupyterhub.spawner import Spawner
from makeway_api.client import AsyncClient
from makeway_api.models import Notice, Reason
from makeway_spawner import lease_mixin, service
from makeway_spawner.lease import Lease
from makeway_spawner.lease_mixin import LeaseMixin
from makeway_spawner.refusal import Refused
from spawner.quota_fake import PROFILES, URL, QuotaFake, app

from spawner import quota_fake

GPU = {"profile": "gpu1", "team": "rnd"}
WAITING = Reason(code="reclaiming", message="Job resnet of ana (rnd, 3 GPUs) leaves by 12:00.")


class Process(Spawner):  # type: ignore[misc]
    """A server that is only up or down."""

    up = False
    pending = None
    """What the Hub does with it."""

    async def start(self) -> tuple[str, int]:
        self.up = True
        return ("127.0.0.1", 1)

    async def stop(self, now: bool = False) -> None:
        self.up = False

    async def poll(self) -> int | None:
        return None if self.up else 0


class StillSpawner(LeaseMixin, Process):
    """The same server with leases."""


@pytest.fixture
def fake() -> QuotaFake:
    return QuotaFake()


Make = Callable[..., StillSpawner]


@pytest.fixture
async def make(fake: QuotaFake) -> AsyncIterator[Make]:
    client = AsyncClient(URL, "t", transport=httpx2.ASGITransport(app=app(fake)))
    service._CLIENTS[(URL, "t")] = client
    made: list[StillSpawner] = []

    def build(user: str = "ana", options: Any = None, state: dict[str, Any] | None = None, **traits: Any) -> Any:
        orm = SimpleNamespace(server=None, name="", state=state or {}, user_options=options or GPU)
        spawner = StillSpawner(
            user=SimpleNamespace(name=user, url=f"/user/{user}/", db=SimpleNamespace(commit=lambda: None)),
            hub=SimpleNamespace(
                base_url="/hub/", api_url="http://127.0.0.1:1/hub/api", public_host="", server=None, ip="127.0.0.1"
            ),
            makeway_api_url=URL,
            makeway_token="t",
            **{"renew_seconds": 0.1, "wait_seconds": 5.0, "patience_seconds": 0.3, **traits},
        )
        spawner.orm_spawner = orm
        spawner.user_options = GPU if options is None else options
        made.append(spawner)
        return spawner

    yield build
    for spawner in made:
        spawner._stop_renewing()
    await client.close()
    del service._CLIENTS[(URL, "t")]


async def until(true: Callable[[], Any], what: str) -> None:
    """Wait until `true` holds, 5 seconds at most."""
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def started(spawner: StillSpawner) -> StillSpawner:
    """Start a server as the Hub does."""
    await spawner.run_pre_spawn_hook()
    await spawner.start()
    return spawner


@pytest.mark.covers("N06")
async def test_a_granted_lease_is_stored_at_once_and_shown_to_the_notebook(make: Make, fake: QuotaFake) -> None:
    spawner = make()
    await spawner.run_pre_spawn_hook()
    assert spawner.orm_spawner.state["makeway"]["session"] == "s1"  # before start: a killed Hub must find it
    await spawner.start()
    env = spawner.get_env()
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert (env["MAKEWAY_TEAM"], env["MAKEWAY_PROFILE"], env["MAKEWAY_SESSION"]) == ("rnd", "gpu1", "s1")
    assert env["MAKEWAY_VIRTUAL_GPUS"] == "1"
    await until(lambda: fake.started, "the service learned that the server is up")


async def test_the_hub_stores_what_was_chosen_and_nothing_else(make: Make) -> None:
    spawner = make(options={"profile": ["gpu1"], "team": "rnd", "preemptible": "on"})
    await spawner.run_pre_spawn_hook()
    assert spawner.orm_spawner.user_options == {"profile": "gpu1", "team": "rnd", "preemptible": True}


@pytest.mark.covers("N02")
@pytest.mark.parametrize(
    "options", [{"profile": ""}, {"profile": "../etc"}, {"profile": "gpu1", "disk": "x"}, [1], {"profile": 7}]
)
async def test_invalid_options_are_refused_before_any_request(make: Make, fake: QuotaFake, options: Any) -> None:
    spawner = make()
    spawner.user_options = options if isinstance(options, dict) else {"profile": options}
    with pytest.raises(Refused) as refused:
        await spawner.run_pre_spawn_hook()
    assert refused.value.status_code == 400
    assert not fake.sessions


async def test_a_refusal_of_the_service_is_shown_unchanged(make: Make, fake: QuotaFake) -> None:
    fake.refusal = (403, "not_a_member", "guest is not a member of the team rnd.")
    with pytest.raises(Refused) as refused:
        await make(user="guest").run_pre_spawn_hook()
    assert refused.value.status_code == 403
    assert refused.value.jupyterhub_message == "guest is not a member of the team rnd."
    assert str(refused.value) == "guest is not a member of the team rnd."


async def test_a_session_that_ends_while_it_waits_says_why(make: Make, fake: QuotaFake) -> None:
    reason = Reason(code="not_in_quota", message="5 of your 5 guaranteed GPUs are in use: ana 5.")
    fake.steps = [("admission", None), ("over", reason)]
    spawner = make()
    with pytest.raises(Refused, match="5 of your 5 guaranteed GPUs"):
        await spawner.run_pre_spawn_hook()
    assert not fake.live
    assert spawner._lease is None


@pytest.mark.covers("N05")
@pytest.mark.parametrize("phase", ["admission", "reclaim", "node"])
async def test_stop_in_any_phase_leaves_no_lease(make: Make, fake: QuotaFake, phase: str) -> None:
    fake.steps = [(phase, WAITING), ("hold", None)]
    spawner = make()
    spawn = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: fake.sessions and next(iter(fake.sessions.values())).phase == phase, phase)
    spawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawn
    assert not fake.live
    await spawner.run_post_stop_hook()  # the Hub calls it too: once is enough
    assert fake.released == ["s1"]


@pytest.mark.covers("N05")
async def test_stop_during_the_request_leaves_no_lease(make: Make, fake: QuotaFake) -> None:
    fake.ask_delay = 0.2
    spawn = asyncio.ensure_future(make().run_pre_spawn_hook())
    await asyncio.sleep(0.05)
    assert not fake.sessions
    spawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawn
    assert list(fake.sessions) == ["s1"]
    assert not fake.live


@pytest.mark.covers("N05")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("protected", "nothing makes way for it in the next"),
        ("patience", "nothing makes way for it in the next"),
        ("waiting_for_node", "not in the next"),
    ],
)
async def test_the_pending_page_is_told_how_long_a_session_waits_at_least(
    make: Make, fake: QuotaFake, code: str, words: str
) -> None:
    soonest = datetime.now(UTC) + timedelta(seconds=600)
    fake.steps = [("admission", Reason(code=code, message="It waits.", not_before=soonest)), ("hold", None)]
    spawner = make()
    spawn = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: spawner._progress and any("wait" in e for e in spawner._progress.events), "it is told")
    spawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawn
    spawner._progress.close()
    [event] = [event async for event in spawner._progress.follow() if "wait" in event]
    assert (event["message"], event["wait"]) == ("It waits.", words)
    assert 0 < event["earliest"] <= 600


@pytest.mark.covers("N05")
async def test_the_pending_page_reads_named_phases_with_reasons_and_a_deadline(make: Make, fake: QuotaFake) -> None:
    fake.steps = [("reclaim", WAITING), ("hold", None), ("node", None)]
    spawner = make()
    spawn = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: spawner._progress and any(e["phase"] == "reclaim" for e in spawner._progress.events), "reclaim")
    fake.go.set()
    await spawn
    await spawner.start()
    spawner._progress.close()
    events = [event async for event in spawner._progress.follow()]  # a late watcher reads all of it
    phases = list(dict.fromkeys(event["phase"] for event in events))
    assert phases == ["admission", "reclaim", "node", "server"]
    assert WAITING.message in [event["message"] for event in events]
    percents = [event["progress"] for event in events]
    assert percents == sorted(percents)


@pytest.mark.covers("N07")
async def test_a_lease_is_renewed_until_it_is_released(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    await until(lambda: fake.renewals > 2, "renewed three times")
    await spawner.run_post_stop_hook()
    seen = fake.renewals
    await asyncio.sleep(0.3)
    assert fake.renewals == seen
    assert fake.released == ["s1"]
    assert "makeway" not in spawner.get_state()


@pytest.mark.covers("N07")
async def test_a_server_whose_lease_is_over_is_stopped_by_the_next_poll(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    await fake.end("s1")
    await until(lambda: spawner._ended, "noticed")
    assert await spawner.poll() is not None
    assert not spawner.up


@pytest.mark.covers("N07")
async def test_a_restarted_hub_takes_the_lease_up_again(make: Make, fake: QuotaFake) -> None:
    first = await started(make())
    state = first.get_state()
    first._stop_renewing()  # the Hub dies
    second = make()
    second.load_state(state)
    second.up = True
    seen = fake.renewals
    assert await second.poll() is None
    await until(lambda: fake.renewals > seen + 1, "renewed by the new Hub")
    await second.run_post_stop_hook()
    assert fake.released == ["s1"]


@pytest.mark.covers("N07")
async def test_how_a_server_ended_is_kept_for_its_user_until_the_next_start(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    assert spawner.makeway_end == ""
    spawner.up = False
    assert await spawner.poll() == 0
    await spawner.run_post_stop_hook()
    message = "Its server ended by itself, with exit code 0."
    assert (spawner.makeway_end, fake.why) == (message, message)
    later = make()
    later.load_state(spawner.get_state())  # the Hub makes a new spawner after each stop
    assert later.makeway_end == message
    await started(later)
    assert later.makeway_end == ""
    later.pending = "stop"  # by the user
    later.up = False
    assert await later.poll() == 0
    await later.run_post_stop_hook()
    assert (later.makeway_end, fake.why) == ("", "")
    assert "makeway_end" not in later.get_state()


async def test_a_server_that_is_stopped_with_its_lease_tells_it(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    await fake.end("s1")
    await until(lambda: spawner._ended, "noticed")
    await spawner.poll()
    assert spawner.makeway_end == "Makeway stopped it: its lease has ended: The lease s1 is over."


async def checked(make: Make, port: int, seconds: float) -> StillSpawner:
    """Return the spawner of a Hub that was restarted and looks at a server at this port, which is up."""
    first = await started(make())
    first._stop_renewing()  # the Hub dies
    result = make(http_timeout=seconds)
    result.load_state(first.get_state())
    result.up, result.pending = True, "check"
    result.orm_spawner.server = object()
    where = {"url": f"http://127.0.0.1:{port}/user/ana/", "base_url": "/user/ana/"}
    result._server = SimpleNamespace(orm_server=result.orm_spawner.server, **where)
    return result


@pytest.mark.covers("N07")
async def test_a_restarted_hub_waits_for_no_server_that_has_ended(make: Make, fake: QuotaFake) -> None:
    """As where a node was drained with both: its pod is terminating, and answers no more."""
    spawner = await checked(make, 1, 1e6)
    polled = asyncio.ensure_future(spawner.poll())
    await until(lambda: fake.renewals > 0, "it is looked at")
    assert not polled.done()
    spawner.up = False
    assert await polled == 0
    await spawner.run_post_stop_hook()
    message = "Its server ended by itself, with exit code 0."
    assert (spawner.makeway_end, fake.released, fake.why) == (message, ["s1"], message)


@pytest.mark.covers("N07")
@pytest.mark.parametrize("before", ["refuses", "answers"])
async def test_a_server_that_gets_its_address_after_the_restart_is_asked_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """As a pod that was Pending: another one may have the address that the Hub knows, and the time begins anew."""
    old, new, asked = "http://old/user/ana/", "http://new/user/ana/", list[str]()
    up = asyncio.Event()

    async def answer(where: str, path: str) -> None:
        asked.append(where)
        if where == new:
            up.set()
        elif before == "refuses":
            await asyncio.Event().wait()

    monkeypatch.setattr(lease_mixin.listening, "answer", answer)
    monkeypatch.setattr(lease_mixin, "_CHECK_AGAIN", 0.001)
    spawner = await checked(make, 1, 1)
    monkeypatch.setattr(StillSpawner, "http_timeout", 0.3)  # as a trait, it takes whole seconds only
    spawner._server.url = old
    looks = 0

    async def poll() -> int | None:
        """Correct the address at the second look, as KubeSpawner does once the pod runs."""
        nonlocal looks
        looks += 1
        if looks == 2:
            await asyncio.sleep(0.4)  # longer than it has for an answer at one address
            spawner._server.url = new
        return None

    monkeypatch.setattr(Process, "poll", lambda self: poll())
    async with asyncio.timeout(20):
        assert await spawner.poll() is None
    assert asked == [old, new]
    assert up.is_set()


async def test_a_server_that_does_not_answer_a_restarted_hub_is_given_up_with_a_reason(
    make: Make, fake: QuotaFake
) -> None:
    spawner = await checked(make, 1, 0.0)
    assert await spawner.poll() == 1
    assert spawner.makeway_end == "It did not answer for 0 s after the Hub was restarted."
    assert await spawner.poll() is None, "the Hub asks again, and stops it"
    await spawner.run_post_stop_hook()
    assert fake.why == spawner.makeway_end


async def test_a_server_whose_lease_ends_while_a_restarted_hub_looks_at_it_is_stopped(
    make: Make, fake: QuotaFake
) -> None:
    spawner = await checked(make, 1, 1e6)
    polled = asyncio.ensure_future(spawner.poll())
    await until(lambda: fake.renewals > 0, "it is looked at")
    await fake.end("s1")
    assert await polled is not None
    assert not spawner.up
    assert spawner.makeway_end.startswith("Makeway stopped it")


async def test_a_server_that_answers_a_restarted_hub_goes_on(make: Make) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        spawner = await checked(make, server.sockets[0].getsockname()[1], 1e6)
        assert await spawner.poll() is None
        spawner._stop_renewing()


async def test_a_preemptible_session_that_made_way_tells_for_which_owner(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    at = datetime.now(UTC)
    fake.sessions["s1"].notice = Notice(reason="reclaim", by_owner="bo", at=at, deadline=at)
    seen = fake.renewals
    await until(lambda: fake.renewals > seen + 1, "renewed with the notice")
    await spawner.run_post_stop_hook()
    assert spawner.makeway_end == "It was preemptible, and made way for bo."


async def test_a_start_that_ended_with_its_hub_tells_it(make: Make, fake: QuotaFake) -> None:
    first = make()
    await first.run_pre_spawn_hook()
    first._stop_renewing()  # the Hub dies before the server is up
    second = make()
    second.load_state(first.orm_spawner.state)
    assert await second.poll() == 0
    assert second.makeway_end == "The Hub was restarted while it was starting."


async def test_a_server_that_a_killed_hub_was_starting_is_made_known_once_it_is_adopted(
    make: Make, fake: QuotaFake
) -> None:
    first = make()
    await first.run_pre_spawn_hook()
    state = first.orm_spawner.state
    first._stop_renewing()  # the Hub dies before the server is up
    second = make()
    second.load_state(state)
    second.up = True
    assert await second.poll() is None
    await until(lambda: fake.started == ["s1"], "the service learned that the server is up")
    await second.run_post_stop_hook()


async def test_a_short_outage_of_the_service_stops_no_notebook(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    fake.down = True
    await asyncio.sleep(0.4)
    assert await spawner.poll() is None
    fake.down = False
    seen = fake.renewals
    await until(lambda: fake.renewals > seen, "renewed again")
    assert spawner._ended == ""


async def test_a_pending_start_survives_a_restart_of_the_service(make: Make, fake: QuotaFake) -> None:
    fake.steps = [("reclaim", WAITING), ("hold", None)]
    spawner = make(wait_seconds=0.1, patience_seconds=10.0)
    spawn = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: fake.live, "asked")
    fake.down = True
    await until(lambda: any("does not answer" in e["message"] for e in spawner._progress.events), "said so")
    fake.down = False
    fake.go.set()
    await spawn
    assert spawner.get_env()["CUDA_VISIBLE_DEVICES"] == "0"


async def test_a_pending_start_gives_up_on_a_service_that_stays_away(make: Make, fake: QuotaFake) -> None:
    fake.steps = [("reclaim", WAITING), ("hold", None)]
    spawner = make(wait_seconds=0.1)
    spawn = asyncio.ensure_future(spawner.run_pre_spawn_hook())
    await until(lambda: fake.live, "asked")
    fake.down = True
    with pytest.raises(Refused) as refused:
        await spawn
    assert refused.value.status_code == 503


async def test_without_the_service_a_gpu_notebook_is_refused_with_a_message(make: Make, fake: QuotaFake) -> None:
    fake.down = True
    with pytest.raises(Refused) as refused:
        await make().run_pre_spawn_hook()
    assert refused.value.status_code == 503


async def test_without_the_service_a_cpu_notebook_starts_and_gets_its_lease_later(make: Make, fake: QuotaFake) -> None:
    fake.down = True
    spawner = await started(make(options={"profile": "cpu"}))
    assert spawner.get_env()["CUDA_VISIBLE_DEVICES"] == ""
    fake.down = False
    await until(lambda: fake.live, "asked later")
    await until(lambda: spawner._lease is not None, "kept")
    await spawner.run_post_stop_hook()
    assert not fake.live


async def test_a_release_that_fails_does_not_fail_the_stop(make: Make, fake: QuotaFake) -> None:
    spawner = await started(make())
    fake.down = True
    await spawner.run_post_stop_hook()
    await spawner.run_post_stop_hook()
    assert spawner._lease is None


async def test_a_start_that_fails_after_the_lease_releases_it(make: Make, fake: QuotaFake) -> None:
    spawner = make()
    await spawner.run_pre_spawn_hook()
    await spawner.run_post_stop_hook()  # what the Hub does when start() raises
    assert not fake.live


@pytest.fixture
def halves(fake: QuotaFake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make gpu1 a profile of half a GPU, and the spawner one that has whole devices only."""
    half = [p.model_copy(update={"gpus": 0.5, "title": "Half a GPU"}) if p.name == "gpu1" else p for p in PROFILES]
    monkeypatch.setattr(quota_fake, "PROFILES", half)
    monkeypatch.setattr(StillSpawner, "whole_gpus_only", True)
    monkeypatch.setattr(service.LAST_OFFERS, "_profiles", {})


FRACTION = "Half a GPU asks for 0.5 GPU, and notebooks on this cluster get whole GPUs only."


@pytest.mark.covers("N06")
@pytest.mark.usefixtures("halves")
async def test_a_fraction_is_refused_before_a_lease_where_the_platform_has_whole_gpus(
    make: Make, fake: QuotaFake
) -> None:
    with pytest.raises(Refused, match=FRACTION) as refused:
        await make().run_pre_spawn_hook()
    assert refused.value.status_code == 409
    assert not fake.sessions, "a request may already preempt a job"
    with pytest.raises(Refused, match=FRACTION):
        await make().parse_options_form({"choice": ["rnd/gpu1"]})
    html = await make().render_options_form(None)
    assert FRACTION in html
    assert re.search(r'data-queue="rnd/gpu1" data-code="refused" data-final data-disabled', html)


@pytest.mark.usefixtures("halves")
async def test_a_profile_that_became_fractional_meanwhile_is_refused_and_its_lease_released(
    make: Make, fake: QuotaFake
) -> None:
    service.LAST_OFFERS.update(fake.offers("ana").model_copy(update={"profiles": PROFILES}))  # whole, when last seen
    with pytest.raises(Refused, match=r"asks for 0\.5 GPU"):
        await make().run_pre_spawn_hook()
    assert list(fake.sessions) == ["s1"]
    assert not fake.live


async def test_a_profile_that_became_whole_meanwhile_is_started(
    make: Make, fake: QuotaFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StillSpawner, "whole_gpus_only", True)
    half = [p.model_copy(update={"gpus": 0.5}) for p in PROFILES]
    service.LAST_OFFERS.update(fake.offers("ana").model_copy(update={"profiles": half}))
    await make().run_pre_spawn_hook()
    assert fake.live == ["s1"]


async def test_a_start_is_described_by_titles(make: Make) -> None:
    spawner = make()
    await spawner.render_options_form(None)
    assert spawner.makeway_title == "One GPU · Research & Development"
    spawner = make(options={"profile": "gpu2", "team": "devops", "preemptible": True}, user="bo")
    await spawner.run_pre_spawn_hook()
    assert spawner._progress.events[0]["message"].startswith("Requesting ")
    assert spawner.makeway_title == "Two GPUs · DevOps · preemptible"
    assert make(options={"profile": "secret"}).makeway_title == "secret"


async def test_a_lease_of_an_earlier_release_is_read_back(make: Make) -> None:
    old = {"session": "s7", "profile": "gpu1", "team": "rnd", "gpus": 1, "preemptible": False, "virtual": False}
    spawner = make()
    spawner.load_state({"makeway": {**old, "places": [["node-1", [3]]], "env": {"A": "b"}, "started": True}})
    assert spawner.get_env()["CUDA_VISIBLE_DEVICES"] == "3"
    saved = spawner.get_state()["makeway"]
    assert (saved["session"], saved["places"], saved["env"]) == ("s7", [("node-1", [3])], {"A": "b"})
    assert Lease.load(saved) == spawner._lease


@pytest.mark.parametrize("options", [{}, {"user_options": {}}])
@pytest.mark.parametrize("user", ["ana", "zoe"])
async def test_a_start_that_says_nothing_gets_a_notebook_without_gpus(
    make: Make, fake: QuotaFake, user: str, options: dict[str, Any]
) -> None:
    """As an administrator starts it, on the Hub's admin page, for a new person who is in no team."""
    spawner = make(user, options)
    await spawner.run_pre_spawn_hook()
    assert [(s.user, s.profile, s.team) for s in fake.sessions.values()] == [(user, "cpu", None)]
    assert spawner.user_options["profile"] == "cpu"


async def test_a_start_that_says_nothing_while_the_service_is_away_gets_a_notebook_without_gpus(make: Make) -> None:
    spawner = make("ana", {})
    spawner.makeway_api_url = "http://127.0.0.1:1"
    await spawner.run_pre_spawn_hook()
    assert spawner.user_options["profile"] == "cpu"
