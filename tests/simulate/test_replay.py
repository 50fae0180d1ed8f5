"""Small traces whose outcome is worked out by hand, through the engine and through the baselines."""

from __future__ import annotations

import random

import pytest
from makeway_quota.engine.snapshot import GPU, Settings
from makeway_quota.history.durations import Durations
from makeway_quota.simulate.baselines import NAMES, baseline
from makeway_quota.simulate.cluster import SimulatedCluster, of_quotas, profile_name
from makeway_quota.simulate.incremental import Forecasts, IncrementalPlanner
from makeway_quota.simulate.planner import FullPlanner, ReplayPlanner
from makeway_quota.simulate.replay import Outcome, replay
from makeway_quota.simulate.report import comparison_tables, percentile, summary
from makeway_quota.simulate.trace import Arrival, TraceInvalid
from makeway_quota.store.records import PastRun

HOUR = 3600.0


def job(id: str, team: str, gpus: int, submit: float, hours: float) -> Arrival:
    return Arrival(id, team, gpus * GPU, submit * HOUR, hours * HOUR, team)


def cluster(arrivals: list[Arrival], **quotas: int) -> SimulatedCluster:
    return of_quotas("made", quotas, {a.gpus for a in arrivals}, grace=60.0)


def played(
    arrivals: list[Arrival], planner: type[IncrementalPlanner] | type[FullPlanner] = IncrementalPlanner, **quotas: int
) -> Outcome:
    made = cluster(arrivals, **quotas)
    chosen: ReplayPlanner = planner(made)
    return replay(made, arrivals, chosen)


def delays(outcome: Outcome) -> dict[str, float]:
    return {done.id: round(done.delay / HOUR, 4) for done in outcome.meter.finished}


@pytest.mark.covers("N23", "F48")
@pytest.mark.parametrize("planner", [IncrementalPlanner, FullPlanner])
def test_idle_is_lent_and_given_back(planner: type[IncrementalPlanner] | type[FullPlanner]) -> None:
    """A borrows B's 8 GPUs; an hour later B comes: A's newer job saves (60 s), waits an hour, loads (60 s) and ends."""
    trace = [job("a1", "a", 8, 0, 3), job("a2", "a", 8, 0.001, 3), job("b1", "b", 8, 1, 1)]
    outcome = played(trace, planner, a=8, b=8)
    result = delays(outcome)
    assert result["a1"] == 0
    assert result["b1"] == pytest.approx(60 / HOUR, abs=0.001), "it waits while the other saves"
    assert result["a2"] == pytest.approx(1 + 2 * 60 / HOUR, abs=0.002)
    got = summary(outcome)
    assert got["preemptions"] == 1
    assert got["unserved_guarantee_gpu_h"] == pytest.approx(8 * 60 / HOUR, abs=0.01)
    assert got["waste_percent"] == pytest.approx(100 * 8 * 120 / (56 * HOUR), abs=0.001)
    assert got["made_way"] == [{"team": "a", "for": "b", "times": 1}]
    assert {(r["borrower"], r["lender"]) for r in got["borrowed_gpu_h"]} == {("a", "b")}


def test_what_ended_teaches_how_long_such_work_runs() -> None:
    """a2 is told to make way after an hour: it saves (60 s), loads again (60 s), and counts with both attempts."""
    trace = [job("a1", "a", 8, 0, 3), job("a2", "a", 8, 0.001, 3), job("b1", "b", 8, 1, 1)]
    trace += [job("a3", "a", 8, 10, 2)]
    made, known = cluster(trace, a=8, b=8), Durations()
    replay(made, trace, FullPlanner(made, known), durations=known)
    assert known.expected("a", "a", "gpu8") == 2 * HOUR
    assert known.expected("b", "b", "gpu8") is None
    replay(made, trace[:3], IncrementalPlanner(made), durations=(two := Durations()))
    two.add([PastRun("a", "a", "gpu8", 9 * HOUR)])
    assert two.expected("a", "a", "gpu8") == pytest.approx(3 * HOUR, abs=1)


@pytest.mark.parametrize("planner", [IncrementalPlanner, FullPlanner])
@pytest.mark.parametrize(("half_life", "second"), [(0.0, "a2"), (24 * HOUR, "b1")])
def test_a_team_that_borrowed_recently_waits_longer(
    planner: type[IncrementalPlanner] | type[FullPlanner], half_life: float, second: str
) -> None:
    """No team reserves anything; a has 8 GPUs for a day, then both teams want all of them, a a minute earlier."""
    trace = [job("a1", "a", 8, 0, 24), job("a2", "a", 8, 23.9, 1), job("b1", "b", 8, 23.95, 1)]
    settings = Settings(history_half_life=half_life)
    made = of_quotas("made", {"a": 0, "b": 0}, {8 * GPU}, nodes=1, settings=settings)
    outcome = replay(made, trace, planner(made))
    began = {done.id: round(done.started / HOUR, 2) for done in outcome.meter.finished}
    assert [id for id, at in began.items() if at == 24.0] == [second]


def test_a_gang_takes_whole_nodes_or_waits() -> None:
    trace = [job("s", "a", 1, 0, 1), job("g", "a", 16, 0.1, 1)]
    assert delays(played(trace, a=16)) == {"s": 0, "g": 0.9}


def test_totals_of_the_incremental_and_the_full_planner_are_close() -> None:
    """Random traces: the mean delay and the unserved guarantees differ little."""
    for seed in range(3):
        chance = random.Random(seed)
        trace = [
            job(
                f"j{at:03}",
                chance.choice("ab"),
                chance.choice([1, 1, 2, 4, 8]),
                chance.random() * 20,
                chance.random() * 4,
            )
            for at in range(80)
        ]
        one, other = played(trace, IncrementalPlanner, a=8, b=8), played(trace, FullPlanner, a=8, b=8)
        assert len(one.meter.finished) == len(other.meter.finished) == 80
        first, second = summary(one), summary(other)
        assert first["delay_mean_h"] == pytest.approx(second["delay_mean_h"], rel=0.25, abs=0.05)
        assert first["unserved_guarantee_gpu_h"] == pytest.approx(second["unserved_guarantee_gpu_h"], rel=0.5, abs=3)


def test_demand_that_is_withdrawn_leaves_at_once() -> None:
    trace = [
        Arrival("a1", "a", 8 * GPU, 0, 0, "a", until=4 * HOUR),
        Arrival("a2", "a", 8 * GPU, 1, 0, "a", until=4 * HOUR),
        Arrival("b1", "b", 8 * GPU, 2 * HOUR, 0, "b", until=3 * HOUR),
    ]
    made = of_quotas("made", {"a": 8, "b": 8}, {8 * GPU}, grace=0.0)
    outcome = replay(made, trace, IncrementalPlanner(made, {profile_name(8 * GPU): 3}), restart=0.0)
    assert outcome.meter.unserved_gpu_hours == 0
    assert outcome.meter.waited / GPU / HOUR == pytest.approx(8.0, abs=0.01), "a2 waits while b1 is there"


def test_the_baselines_by_hand() -> None:
    """8 + 8 GPUs. a: 8 GPUs for 2 h, then 8 for 1 h; b: 16 at 0.5 h for 1 h, then 8 at 0.6 h for 1 h."""
    trace = [job("a1", "a", 8, 0, 2), job("b1", "b", 16, 0.5, 1), job("b2", "b", 8, 0.6, 1), job("a2", "a", 8, 0.7, 1)]
    made = cluster(trace, a=8, b=16)
    result = {kind: delays(baseline(kind, made, trace)) for kind in NAMES}
    assert result["static"] == {"a1": 0, "b1": 0, "b2": 0.9, "a2": 1.3}
    made = of_quotas("small", {"a": 8, "b": 8}, {a.gpus for a in trace}, grace=60.0)
    result = {kind: delays(baseline(kind, made, trace)) for kind in ("fifo", "backfill", "borrow")}
    assert result["fifo"] == {"a1": 0, "b1": 1.5, "b2": 2.4, "a2": 2.3}
    assert result["backfill"] == {"a1": 0, "b2": 0, "a2": 0.9, "b1": 2.1}
    assert result["borrow"] == {"a1": 0, "b2": 0, "a2": 0.9, "b1": 2.1}


def test_an_invalid_trace_is_refused_with_its_line() -> None:
    made = cluster([job("a1", "a", 1, 0, 1)], a=8)
    with pytest.raises(TraceInvalid, match="team unknown, which the policy does not have"):
        replay(made, [job("x", "unknown", 1, 0, 1)], IncrementalPlanner(made))
    with pytest.raises(TraceInvalid, match="wants profile gpu3"):
        replay(made, [job("x", "a", 3, 0, 1)], IncrementalPlanner(made))
    with pytest.raises(ValueError, match="no baseline magic"):
        baseline("magic", made, [])


def test_percentile_and_table() -> None:
    assert percentile([], 0.95) == 0
    assert percentile([4, 1, 3, 2], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.95) == 95
    trace = [job("a1", "a", 8, 0, 3)]
    assert "mean delay h" in comparison_tables([summary(played(trace, a=8))])


def test_forecasts_are_compared_with_the_starts() -> None:
    trace = [job(f"a{at:03}", "a", 8, 0.1 * at, 1) for at in range(80)]
    made = cluster(trace, a=8)
    durations = Durations()
    forecasts = Forecasts(durations)
    replay(made, trace, IncrementalPlanner(made, forecasts=forecasts), durations=durations)
    assert forecasts.early, "some job got a forecast"
    assert min(forecasts.early) >= 0, "all jobs are alike, so none starts before its forecast"
    assert not forecasts.given, "all of them have started"
