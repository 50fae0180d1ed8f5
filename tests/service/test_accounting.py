"""Past over-quota use: how it grows and fades, that it outlives the service, and who goes first because of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from makeway_quota.engine import schedule
from makeway_quota.engine.snapshot import Node, Pool, Profile, QuotaLine, Settings, Snapshot, TeamQuota
from makeway_quota.engine.snapshot import Workload as EngineWorkload
from makeway_quota.history.accounting import Accounting
from makeway_quota.store import Store, open_store
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from running import SAMPLE, Running, running

HOUR = 3600.0
POOLS = ("h100", "metal")
TEAMS = (
    TeamQuota("a", (QuotaLine((), 4000),), parent="dept"),
    TeamQuota("b", (QuotaLine((), 4000),), parent="dept"),
    TeamQuota("dept", (QuotaLine((), 8000),)),
    TeamQuota("free", ()),
)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def holding(id: str, team: str, gpus: int, pool: str = "h100", state: str = "running") -> Workload:
    row = initial_record(NewWorkload(id, "job", team, pool, "ana", gpus=gpus), 0.0)
    return row._replace(state=state)


def held(row: Workload) -> Iterable[tuple[str, int]]:
    return [(row.profile, row.gpus)]


def accounting(clock: Clock, *rows: Workload, half_life: float = HOUR) -> Accounting:
    made = Accounting(clock)
    made.use(TEAMS, POOLS, half_life, held, rows)
    return made


def test_use_that_stays_becomes_the_history_and_fades_when_it_is_over() -> None:
    clock = Clock()
    change_set = accounting(clock, holding("j1", "a", 6000))
    assert change_set.over() == {"a": 2000, "b": 0, "dept": 0, "free": 0}
    clock.now += HOUR
    assert {p.name: p.history for p in change_set.policies()} == {"a": 1000, "b": 0, "dept": 0, "free": 0}
    clock.now += HOUR
    assert change_set.history("a") == 1000, "not read since"
    assert change_set.policies()[0].history == 1500
    clock.now += 100 * HOUR
    assert change_set.policies()[0].history == 2000, "not more than it ever used"
    change_set.follow([holding("j1", "a", 6000, state="succeeded")])
    clock.now += 2 * HOUR
    assert change_set.policies()[0].history == 500
    clock.now += 10 * HOUR
    assert change_set.policies() == TEAMS


def test_departments_teams_without_reservation_and_pools_are_counted_as_the_engine_does() -> None:
    rows = [holding("j1", "a", 3000), holding("j2", "a", 3000, "metal"), holding("j3", "b", 5000, "metal")]
    change_set = accounting(Clock(), *rows, holding("j4", "free", 500), holding("j5", "gone", 9000))
    assert change_set.over() == {"a": 2000, "b": 1000, "dept": 3000, "free": 500}, "a line over two pools counts once"
    by_pool = (TeamQuota("a", (QuotaLine(("h100",), 1000), QuotaLine(("metal",), 4000))),)
    change_set.use(by_pool, POOLS, HOUR, held, rows)
    assert change_set.over() == {"a": 2000}, "what is idle in one pool is not lent to oneself in another"
    under = (
        TeamQuota("a", (), parent="dept"),
        TeamQuota("b", (), parent="dept"),
        TeamQuota("dept", (QuotaLine((), 9000),)),
    )
    change_set.use(under, POOLS, HOUR, held, rows)
    assert change_set.over() == {"a": 2000, "b": 2000, "dept": 2000}, (
        "the department's reservation covers all its teams"
    )


def test_the_engine_sees_the_same_policies_until_a_history_moves_a_step() -> None:
    clock = Clock()
    change_set = accounting(clock, holding("j1", "a", 6000))
    first = change_set.policies()
    clock.now += 60
    assert change_set.policies() is first
    clock.now += 600
    assert change_set.policies() is not first


def test_a_clock_that_is_set_back_adds_nothing_and_one_set_forward_a_half_life_at_most() -> None:
    clock = Clock()
    change_set = accounting(clock, holding("j1", "a", 6000))
    clock.now -= 500
    assert change_set.policies() == TEAMS
    clock.now += HOUR
    assert change_set.policies()[0].history == 1000

    for age, expected in ((-9e9, 3000), (0.0, 3000), (HOUR, 2500), (9e9, 2500)):
        again = accounting(clock, holding("j1", "a", 6000))
        again.recall({"a": 3000.0, "unknown": 9000.0}, age)
        assert again.policies()[0].history == expected, age
        again.recall({"a": 9000.0}, 0.0)
        assert again.policies()[0].history == expected, "only the first time"


def test_what_is_written_and_carried_forward_is_what_was_known() -> None:
    clock = Clock()
    change_set = accounting(clock, holding("j1", "a", 6000))
    clock.now += HOUR
    kept = change_set.unwritten()
    assert kept == {"a": pytest.approx(1000)}
    clock.now += HOUR
    assert change_set.unwritten() is None, "the same use goes on: it can be worked out"
    again = accounting(clock, holding("j1", "a", 6000))
    again.recall(kept, HOUR)
    assert again.policies() == change_set.policies()

    change_set.follow([holding("j2", "b", 5000)])
    assert change_set.unwritten() is not None
    change_set.follow([holding("j2", "b", 5000, state="pending")])
    assert change_set.unwritten() is None, "it was just written"
    assert change_set.unwritten(at_once=True) is not None
    assert change_set.unwritten(at_once=True) is None
    change_set.use(TEAMS, POOLS, 0.0, held, [])
    assert change_set.unwritten(at_once=True) == {}, "switched off: forget it"
    assert change_set.policies() == TEAMS


def test_incremental_counts_equal_a_full_count() -> None:
    chance, clock = random.Random(7), Clock()
    change_set, rows = accounting(clock), {}
    for _ in range(500):
        id = f"j{chance.randrange(30)}"
        state = chance.choice(["pending", "starting", "running", "checkpointing", "succeeded"])
        rows[id] = holding(id, chance.choice("ab"), chance.randrange(1, 4) * 500, chance.choice(POOLS), state)
        change_set.follow([rows[id]])
        assert change_set.over() == accounting(clock, *rows.values()).over()


@pytest.mark.covers("F36")
def test_a_team_that_borrowed_all_day_waits_for_one_that_did_not() -> None:
    """Teams of one weight: a borrowed all day. Now both want the one GPU that is left: b goes first, for a while."""
    clock = Clock()
    teams = tuple(TeamQuota(name, (QuotaLine((), 1000),)) for name in "ab")
    change_set = Accounting(clock)
    change_set.use(teams, ("h100",), 4 * HOUR, held, [holding("long", "a", 5000)])
    clock.now += 24 * HOUR
    change_set.follow([holding("long", "a", 5000, state="succeeded")])
    assert [p.history for p in change_set.policies()] == [3900, 0]
    assert next_of(change_set.policies()) == ["b2"]
    clock.now += 4 * HOUR
    assert [p.history for p in change_set.policies()] == [2000, 0]
    assert next_of(change_set.policies()) == ["b2"]
    clock.now += 24 * HOUR
    assert [p.history for p in change_set.policies()] == [0, 0], "after seven half-lives it is zero"
    assert next_of(change_set.policies()) == ["a2"], "who came first"


def next_of(policies: tuple[TeamQuota, ...]) -> list[str]:
    """Both use their reservation; both have one job more, a's came first; one GPU is free."""
    rows = [
        EngineWorkload(f"{team}{at}", team, "one", submitted_at=float(at) + (team == "b"))
        for team in "ab"
        for at in (1, 2)
    ]
    world = Snapshot(
        10.0,
        Settings(history_half_life=4 * HOUR),
        (Pool("h100"),),
        (Node("n1", "h100", 3),),
        (Profile("one", 1000, pools=("h100",), policies=(("a", "b"),)),),
        policies,
        tuple(rows),
    )
    return [start.id for start in schedule(world).start if not start.in_quota]


async def test_what_was_borrowed_outlives_the_service(tmp_path: Path) -> None:
    """ana's team borrows; the history is there after a restart, shown to the engine, and gone once switched off."""
    clock = Clock()
    policy = SAMPLE.read_text().replace("settings:", "settings:\n  history_half_life: 3600")
    assert "history_half_life" in policy
    async with running(tmp_path, policy, MAKEWAY_TICK_SECONDS=0.2) as run:
        change_set = run.service.components.world.accounting
        change_set.clock = clock
        for at in range(3):
            job = await run.submit("ana", f"train {at}", profile="gpu3")
            await run.job(job.id, "running")
        await run.converged()
        assert change_set.over()["rnd"] == 4000, "9 of 5"
        clock.now += HOUR
        assert await history(run, "rnd") == 2000
        assert await history(run, "devops") == 0
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    assert kept(store) == pytest.approx(2000, abs=5)
    store.close()
    async with running(tmp_path, policy, MAKEWAY_TICK_SECONDS=0.2) as run:
        assert await history(run, "rnd") == 2000
        current = await run.client("root").policy()
        off = current.document.replace("history_half_life: 3600", "history_half_life: 0")
        await run.client("root").policy_apply(off, base=current.version)
        await run.until(lambda: not run.service.components.store.histories()[0], "the history is forgotten")
        assert await history(run, "rnd") == 0


async def history(run: Running, team: str) -> int:
    snapshot = run.service.components.world.snapshot(await run.service.components.world.rows(), 0.0)
    return next(p.history for p in snapshot.policies if p.name == team)


def kept(store: Store) -> float:
    return store.histories()[0]["rnd"]
