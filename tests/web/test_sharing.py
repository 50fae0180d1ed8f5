"""Shared renderings: one for many readers, and never an old one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi import Response
from makeway_quota.services import Caller
from makeway_quota.services.cluster.inventory import InventoryService
from makeway_quota.services.context import Context
from makeway_quota.web.pages import panel
from makeway_quota.web.pages.figures import sharing
from makeway_quota.web.pages.figures.node_facts import facts_of
from makeway_quota.web.pages.figures.sharing import SharedParts, view_of
from web.portal import PEOPLE, PREFIX, Portal


class Counted:
    """Renders the number of the rendering."""

    def __init__(self) -> None:
        self.made = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def __call__(self) -> Response:
        self.made += 1
        self.entered.set()
        shown = str(self.made)
        await self.gate.wait()
        return Response(shown)


@pytest.mark.covers("N26")
async def test_fifty_readers_at_once_cost_one_rendering() -> None:
    parts, render = SharedParts(0.01), Counted()
    answers = await asyncio.gather(*(parts.get(("panel", "all"), render) for _ in range(50)))
    assert {bytes(answer.body) for answer in answers} == {b"1"}
    assert (await parts.get(("panel", "ana"), render)).body == b"2", "another view is another rendering"


async def test_a_rendering_that_had_entered_is_too_old_for_a_later_reader() -> None:
    parts, render = SharedParts(0.01), Counted()
    render.gate.clear()
    first = asyncio.ensure_future(parts.get(("panel",), render))
    await render.entered.wait()
    second = asyncio.ensure_future(parts.get(("panel",), render))
    render.gate.set()
    assert [bytes((await answer).body) for answer in (first, second)] == [b"1", b"2"]


async def test_a_failure_is_not_kept() -> None:
    parts, render = SharedParts(0.0), Counted()

    async def broken() -> Response:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await parts.get(("panel",), broken)
    assert (await parts.get(("panel",), render)).body == b"1"


async def test_a_reader_that_goes_away_takes_nothing_from_the_others() -> None:
    parts, render = SharedParts(0.01), Counted()
    render.gate.clear()
    one, other = (asyncio.ensure_future(parts.get(("panel",), render)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    render.gate.set()
    assert (await other).body == b"1"


async def test_views_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MAX_VIEWS", 10)
    parts, render = SharedParts(0.0), Counted()
    for number in range(100):
        await parts.get(("panel", number), render)
    assert len(parts._parts) <= 10


@pytest.mark.parametrize(
    ("burst", "expected"),
    [(0.1, [0.0, 0.5, 1.0, 1.5, 2.0]), (1.0, [0.0, 0.1, 0.2, 0.6, 1.1])],
    ids=["0.1 s of every 0.5 s", "after a rest 1 s of the share at once"],
)
async def test_all_views_together_take_their_share_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, burst: float, expected: list[float]
) -> None:
    now, started = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def render() -> Response:
        nonlocal now
        started.append(now)
        now += 0.1
        return Response("")

    monkeypatch.setattr(sharing.time, "monotonic", lambda: now)
    monkeypatch.setattr(sharing.time, "thread_time", lambda: now)
    monkeypatch.setattr(sharing.asyncio, "sleep", sleep)
    parts = SharedParts(interval=0.0, share=0.2, burst=burst)
    for view in range(5):
        await parts.get(("panel", view), render)
    assert started == pytest.approx(expected)


async def test_time_that_a_rendering_waits_for_other_programs_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def render() -> Response:
        nonlocal now
        now += 100.0
        return Response("")

    monkeypatch.setattr(sharing.time, "monotonic", lambda: now)
    monkeypatch.setattr(sharing.time, "thread_time", lambda: 0.0)
    parts = SharedParts(burst=0.0)
    await parts.first(("panel",), render)
    assert parts._next <= now
    parts.spend(1.0)
    assert parts._next == pytest.approx(now + 1.0 / sharing.SHARE)


async def test_cpu_time_in_threads_counts_as_that_of_the_rendering(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools and the teams that hold a GPU are derived in threads; here nothing else takes any time."""
    clock, spent = threading.local(), list[float]()
    holding, pools, services = panel.holding, InventoryService._pools, web.services
    browser = await web.browser("root")

    def takes(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            clock.now = getattr(clock, "now", 0.0) + seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr(time, "thread_time", lambda: getattr(clock, "now", 0.0))
    monkeypatch.setattr(SharedParts, "spend", lambda _, seconds: spent.append(seconds))
    monkeypatch.setattr(panel, "holding", takes(7.0, holding))
    monkeypatch.setattr(InventoryService, "_pools", takes(100.0, pools))
    world = services.context.world
    world.use(replace(world.document), world.policy_version + 1)
    assert (await browser.get(f"{PREFIX}live/panel")).status_code == 200
    assert spent == [107.0], "once for each rendering"
    await services.context.call(takes(1.0, list))
    assert spent == [107.0], "other requests take nothing of the renderings' share"


async def test_a_page_that_is_opened_again_and_again_costs_one_rendering_an_interval() -> None:
    parts, render = SharedParts(10.0), Counted()
    first = [bytes((await parts.first((name,), render)).body) for name in ("panel", "panel", "other", "panel")]
    assert first == [b"1", b"1", b"2", b"1"]


async def test_a_page_begins_with_the_last_rendering_while_the_share_is_used_up() -> None:
    parts, render = SharedParts(0.0), Counted()
    await parts.first(("panel",), render)
    parts.spend(1000.0)
    parts.spend(1000.0)
    assert (await parts.first(("panel",), render)).body == b"1"
    other = asyncio.ensure_future(parts.first(("other",), render))
    await asyncio.sleep(0)
    assert not other.done()
    assert render.made == 1, "it waits for its turn"
    other.cancel()


async def test_a_page_begins_with_a_rendering_of_its_own_while_few_are_wanted() -> None:
    parts, render = SharedParts(0.0), Counted()
    first = [bytes((await parts.first(("panel",), render)).body) for _ in range(3)]
    assert first == [b"1", b"2", b"3"], "nothing is waited for, and nothing old is shown"


async def test_old_renderings_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, render = SharedParts(0.0), Counted()
    await parts.first(("panel",), render)
    monkeypatch.setattr(sharing, "RECENT", 0.0)
    await parts.first(("other",), render)
    assert ("panel",) not in parts._parts


async def test_a_part_that_a_policy_overtakes_is_shown_to_no_other_visitor(
    web: Portal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ana and eye wait for one rendering for the team rnd; a new policy puts ana into devops before it begins."""
    context, parts, asked, moved = web.services.context, web.app.state.parts, set[str](), asyncio.Event()
    both = asyncio.Event()
    visible_teams = Context.visible_teams

    def visible(context: Context, visitor: Caller) -> tuple[str, ...] | None:
        asked.add(visitor.name)
        if asked >= {"ana", "eye"}:
            both.set()
        groups = frozenset({"devops"}) if moved.is_set() and visitor.name == "ana" else visitor.groups
        return visible_teams(context, replace(visitor, groups=groups))

    monkeypatch.setattr(Context, "visible_teams", visible)
    browsers = [await web.browser("ana"), await web.browser("eye")]
    asked.clear()
    both.clear()
    async with parts._lock:  # nothing is rendered
        waiting = [asyncio.create_task(browser.get(f"{PREFIX}live/panel")) for browser in browsers]
        await asyncio.wait_for(both.wait(), 30)
        assert len([part for part in parts._parts.values() if part.coming]) == 1
        moved.set()
        context.world.use(context.document, context.world.policy_version + 1)
    ana, eye = [(await answer).text for answer in waiting]
    assert ("teams/devops" in ana, "teams/rnd" in ana) == (True, False)
    assert ("teams/devops" in eye, "teams/rnd" in eye) == (False, True)


async def test_a_view_ends_with_its_policy(web: Portal) -> None:
    world = web.services.context.world
    before = view_of(web.services, PEOPLE["ana"])
    world.use(world.document, world.policy_version + 1)
    assert view_of(web.services, PEOPLE["ana"]) != before


async def test_a_page_begins_with_the_last_rendering_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, render = SharedParts(0.0), Counted()
    await parts.first(("panel",), render)
    render.gate.clear()
    waiting = [asyncio.ensure_future(parts.get(("panel", number), render)) for number in range(sharing.BUSY)]
    await asyncio.wait_for(render.entered.wait(), 10)
    assert (await asyncio.wait_for(parts.first(("panel",), render), 10)).body == b"1"
    monkeypatch.setattr(sharing, "RECENT", 0.0)
    late = asyncio.ensure_future(parts.first(("panel",), render))
    await asyncio.sleep(0)
    assert not late.done(), "too old: a new rendering comes, after those that wait"
    render.gate.set()
    assert int((await late).body) == 2 + sharing.BUSY
    await asyncio.gather(*waiting)


async def test_a_page_says_up_to_which_event_it_is_current(web: Portal) -> None:
    id = await web.running_job()
    browser = await web.browser("root")
    newest = await web.services.feed.newest()
    assert newest == web.services.context.store.last_event_id()
    for path in ("", "teams/rnd", "nodes/virtual-1", f"jobs/{id}"):
        for address in (path, f"live/{path or 'panel'}"):
            text = (await browser.get(f"{PREFIX}{address}")).text
            assert f'id="mw-current" data-after="{newest}"' in text, address


async def test_what_a_node_shows_is_derived_once_for_each_change(web: Portal) -> None:
    root = PEOPLE["root"]
    before = (await web.services.inventory.pools(root))[0].nodes[0]
    facts = facts_of(before)
    assert facts.teams == frozenset()
    assert facts_of((await web.services.inventory.pools(root))[0].nodes[0]) is facts
    await web.running_job()
    after = facts_of((await web.services.inventory.pools(root))[0].nodes[0])
    assert after.teams == {"rnd"}
    assert after.tip == "virtual-1 3/10 in use"


async def test_members_of_the_same_teams_share_a_view(web: Portal) -> None:
    services = web.services
    ana, other, lone = PEOPLE["ana"], replace(PEOPLE["ana"], name="amy"), PEOPLE["lone"]
    assert view_of(services, ana) == view_of(services, other)
    assert view_of(services, lone) != view_of(services, replace(lone, name="lonely"))
    assert view_of(services, ana) != view_of(services, PEOPLE["bo"])
    session = await web.run.session("ana", "cpu", None)
    await web.run.granted(session.id)
    team_mate = await web.browser("eye")
    assert "Notebook" not in (await team_mate.get(f"{PREFIX}live/panel")).text
