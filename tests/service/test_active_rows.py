"""The active rows in memory, and their groups by team and owner."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from makeway_quota.control.world.active_rows import ActiveRows
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record

TEAMS, OWNERS = ("", "ops", "rnd"), ("ana", "bo")


def row(id: str, team: str, owner: str, version: int, state: str = "pending") -> Workload:
    new = NewWorkload(id=id, kind="job", team=team or None, profile="gpu1", owner=owner)
    return initial_record(new, 0.0)._replace(version=version, state=state)


async def test_rows_of_teams_and_owners_follow_every_change() -> None:
    random, active = Random(7), ActiveRows()
    rows: dict[str, Workload] = {}

    async def read() -> Iterable[Workload]:
        return list(rows.values())

    for at in range(20):
        rows[f"j-{at}"] = row(f"j-{at}", random.choice(TEAMS), random.choice(OWNERS), 1)
    await active.read(read)
    for version in range(2, 400):
        id = f"j-{random.randrange(30)}"
        state = random.choice(["pending", "running", "running", "succeeded"])
        new = row(id, random.choice(TEAMS), random.choice(OWNERS), version, state)
        active.committed([new])
        active.follow()
        rows.pop(id, None)
        if new.live:
            rows[id] = new
        teams, owner = random.sample(TEAMS, random.randint(0, 2)), random.choice(["", *OWNERS])
        expected = {r.id: r for r in rows.values() if (r.team or "") in teams or (owner and r.owner == owner)}
        result = active.of_teams_or_owner(teams, owner)
        assert {r.id: r for r in result} == expected
        assert len(result) == len(expected)


async def test_an_older_version_changes_no_group() -> None:
    active = ActiveRows()

    async def read() -> Iterable[Workload]:
        return [row("j-1", "rnd", "ana", 5)]

    await active.read(read)
    active.committed([row("j-1", "ops", "bo", 4)])
    active.follow()
    assert [r.team for r in active.of_teams_or_owner(["rnd", "ops"], "")] == ["rnd"]


async def test_rows_as_of_a_moment_stay_as_they_were() -> None:
    random, active = Random(11), ActiveRows()

    async def read() -> Iterable[Workload]:
        return [row(f"j-{at}", "rnd", "ana", 1) for at in range(20)]

    await active.read(read)
    version = 1
    for _ in range(60):
        then, as_of = dict(active.copy()), active.as_of_now()
        assert active.are_current(as_of)
        assert active.are_current(active.copy())
        for _ in range(random.randrange(12)):
            version += 1
            state = random.choice(["pending", "running", "succeeded"])
            active.committed([row(f"j-{random.randrange(30)}", "rnd", "ana", version, state)])
            active.follow()
            assert not active.are_current(as_of)
        assert dict(as_of) == then
        assert len(as_of) == len(then)
        for id in (f"j-{at}" for at in range(30)):
            assert as_of.get(id) == then.get(id)
            assert (id in as_of) == (id in then)


async def test_only_the_last_rows_as_of_a_moment_are_current() -> None:
    active = ActiveRows()

    async def read() -> Iterable[Workload]:
        return [row("j-1", "rnd", "ana", 5)]

    await active.read(read)
    first, second = active.as_of_now(), active.as_of_now()
    assert not active.are_current(first)
    assert active.are_current(second)
    assert not active.are_current(dict(second))
    active.committed([row("j-1", "ops", "bo", 4)])
    active.follow()
    assert active.are_current(second), "an older version changes nothing"
