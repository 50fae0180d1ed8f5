"""Jobs are moved in a simulation only where the engine's own plan starts them elsewhere at once."""

from __future__ import annotations

import pytest
from makeway_api.quantities import count
from makeway_quota.autoscale.deployment import Deployment, MachineType, MoveRules
from makeway_quota.engine import GPU, Pool, Profile, QuotaLine, TeamQuota
from makeway_quota.simulate.cluster import SimulatedCluster
from makeway_quota.simulate.incremental import IncrementalPlanner
from makeway_quota.simulate.planner import FullPlanner, ReplayPlanner
from makeway_quota.simulate.replay import Outcome, replay
from makeway_quota.simulate.report import comparison_tables, summary
from makeway_quota.simulate.trace import Arrival

FOUR = MachineType("g4", "cloud", "big", gpus=4, max_machines=4, idle_timeout=300)
ENDS = {"rnd-4": 60_000.0, "rnd-7": 60_000.0, "rnd-8": 60_000.0}
"""When the jobs of team rnd end that run on after most have ended: one on one machine, two on another"""


def played(lend: int | None, planner: type[FullPlanner | IncrementalPlanner], min_runtime: float = 0.0) -> Outcome:
    """Return what became of two half-empty machines; of the reservation of team own `lend` GPUs may be lent."""
    cluster = SimulatedCluster(
        "moves",
        (Pool("cloud", kind="autoscaled", strategy="fill"),),
        (),
        (Profile("one", GPU, pools=("cloud",), policies=(("own", "rnd"),), grace=5.0, min_runtime=min_runtime),),
        (TeamQuota("own", (QuotaLine((), 3 * GPU, lend=lend),)), TeamQuota("rnd", (QuotaLine((), 0),))),
        deployments=(Deployment("cloud", "memory", (FOUR,), moves=MoveRules(3600.0, 0, 2)),),
    )
    arrivals = [Arrival(f"own-{n}", "own", GPU, n / 10, 3000.0, profile="one") for n in range(3)]
    for n in range(9):
        name = f"rnd-{n}"
        arrivals.append(Arrival(name, "rnd", GPU, 400.0 + n, ENDS.get(name, 2000.0), profile="one"))
    deciding: ReplayPlanner = planner(cluster)
    return replay(cluster, arrivals, deciding, boot=100.0)


@pytest.mark.parametrize("planner", [FullPlanner, IncrementalPlanner])
def test_jobs_move_where_the_quota_lends_what_is_free(planner: type[FullPlanner | IncrementalPlanner]) -> None:
    outcome = played(None, planner)
    assert outcome.meter.moves > 0
    numbers, hours = summary(outcome), (outcome.ended - outcome.began) / 3600
    assert (numbers["moves"], numbers["moves_per_hour"]) == (outcome.meter.moves, round(outcome.meter.moves / hours, 4))
    moved = count(outcome.meter.moves, "job was", "jobs were")
    assert f"To give machines back, {moved} moved ({outcome.meter.moves / hours:.2g} an hour)." in comparison_tables(
        [numbers]
    )


@pytest.mark.parametrize("planner", [FullPlanner, IncrementalPlanner])
def test_no_job_moves_off_gpus_that_it_would_not_get_back(planner: type[FullPlanner | IncrementalPlanner]) -> None:
    """Without the drained machine, all that is free is kept for another team."""
    outcome = played(0, planner)
    assert outcome.meter.moves == summary(outcome)["moves"] == 0
    assert "moved" not in comparison_tables([summary(outcome)])
    assert {job.id: job.delay for job in outcome.meter.finished if job.id in ENDS and job.delay > 1000} == {}
    assert len(outcome.meter.finished) == 12


def test_no_job_moves_before_its_min_runtime() -> None:
    assert played(None, FullPlanner, 1e6).meter.moves == 0
