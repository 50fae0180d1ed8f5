"""What was kept each day: one bounded set of rows a day, by the newest pass, and in how many days it is full."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from makeway_quota.services.log.growth import MAX_DAYS, MIN_DAYS, TREND_DAYS, full_in
from makeway_quota.store import Store
from makeway_quota.store.records import Change
from makeway_quota.store.storage import growth
from makeway_quota.store.storage.growth import DAY, DAYS, StoredDay


def of(store: Store, scope: str, name: str = "") -> dict[int, int]:
    return {one.day: one.bytes for one in store.growth.days() if (one.scope, one.name) == (scope, name)}


def test_each_day_is_what_its_last_pass_found_by_all_team_and_person(store: Store, job) -> None:
    store.add_workload(job("j1", owner="ana", team="rnd", source="x" * 1000), now=0.0)
    store.growth.note(10 * DAY + 1, 500)
    store.add_workload(job("j2", owner="bo", team="ops", source="x" * 3000), now=0.0)
    store.growth.note(10 * DAY + 600, 400)
    ana, bo = 7000, 9000
    assert store.growth.days() == [
        StoredDay(10, "all", "", ana + bo),
        StoredDay(10, "disk", "", 400),
        StoredDay(10, "person", "ana", ana),
        StoredDay(10, "person", "bo", bo),
        StoredDay(10, "team", "ops", bo),
        StoredDay(10, "team", "rnd", ana),
    ]
    store.growth.note(11 * DAY, None)
    assert of(store, "all") == {10: ana + bo, 11: ana + bo}
    assert of(store, "disk") == {10: 400}


def test_a_year_of_many_people_and_teams_is_bounded(store: Store, job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_PER_SCOPE", 5)
    for number in range(12):
        store.add_workload(job(f"j{number}", owner=f"p{number:02}", team=f"t{number:02}", source="x" * number), now=0.0)
    for day in range(100, 465):
        store.growth.note(day * DAY, 1)
    assert len(store.growth.days()) == DAYS * (2 + 2 * 5)
    assert min(one.day for one in store.growth.days()) == 465 - DAYS
    assert {one.name for one in store.growth.days() if one.scope == "person"} == {f"p{n:02}" for n in range(7, 12)}
    store.growth.note(470 * DAY, 1)
    store.growth.note(467 * DAY, 1)
    assert max(of(store, "all")) == 467, "a day that is yet to come was a wrong clock"


@pytest.mark.parametrize("jump", [DAYS, -DAYS, 10_000, -95, 3, -3])
def test_a_clock_that_jumps_forgets_no_day(store: Store, job, jump: int) -> None:
    store.add_workload(job("j1", owner="ana", source="x" * 1000), now=0.0)
    for day in range(200, 200 + DAYS - 1):
        store.growth.note(day * DAY, None)
    today = 200 + DAYS - 1
    store.growth.note((today + jump) * DAY, None)
    store.growth.note(today * DAY, None)
    shown = {one.day for one in store.growth.days(today * DAY)}
    assert shown.issuperset(set(range(200 + (jump < 0), today + 1)) - {today + jump}), "the days that were there"
    assert max(shown) == today, "what is yet to come is not shown"
    store.growth.note((today + 1) * DAY, None)
    assert len({one.day for one in store.growth.days((today + 20_000) * DAY)}) <= 2 * DAYS


def test_the_days_of_a_person_follow_a_new_name_and_are_added_to_those_of_another(store: Store, job) -> None:
    store.add_workload(job("j1", owner="ana", source="x" * 1000), now=0.0)
    store.growth.note(DAY, None)
    store.add_workload(job("j2", owner="bo", source="x" * 3000), now=0.0)
    store.growth.note(2 * DAY, None)
    store.commit([Change(id, {"state": "failed"}) for id in ("j1", "j2")], now=1.0)
    store.people.give("ana", "bo", "root", 3.0)
    assert of(store, "person", "ana") == {}
    assert of(store, "person", "bo") == {1: 7000, 2: 16_000}
    store.people.give("bo", "cy", "root", 4.0)
    assert of(store, "person", "cy") == {1: 7000, 2: 16_000}


@pytest.mark.parametrize("seed", range(20))
def test_it_is_full_when_a_line_through_the_last_days_reaches_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    rate, today, room = rng.randrange(1, 10**9), rng.randrange(50, 20_000), rng.randrange(1, 10**12)
    days = {today - ago: 10**12 - ago * rate for ago in range(TREND_DAYS) if ago == 0 or rng.random() < 0.8}
    days |= {today - ago: rng.randrange(10**13) for ago in range(TREND_DAYS, 40)}
    expected = math.ceil(room / rate) if len([day for day in days if day > today - TREND_DAYS]) >= MIN_DAYS else None
    assert full_in(days, room) == (expected if expected is None or expected <= MAX_DAYS else None)


@pytest.mark.parametrize(
    ("grows", "room", "expected"),
    [
        (lambda day: 5, 100, None),
        (lambda day: 1000 - day, 100, None),
        (lambda day: day, 0, 0),
        (lambda day: day, -5, 0),
        (lambda day: day, 10**9, None),
        (lambda day: day + (day % 2) * 0.0, 7, 7),
    ],
)
def test_what_does_not_grow_or_is_far_away_does_not_become_full(
    grows: Callable[[int], int], room: int, expected: int | None
) -> None:
    assert full_in({day: grows(day) for day in range(20)}, room) == expected


def test_two_days_are_no_trend() -> None:
    assert full_in({1: 0, 2: 10**9}, 1) is None
