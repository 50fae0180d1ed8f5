"""Worlds in which the engine once broke its rules, each with the decisions that the rules require."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine.cascades import come_to_rest
from engine.engines import ENGINES
from engine.test_reference import world_of
from makeway_quota.snapshot_file import read_snapshot

CASES = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Expected:
    """The decisions of a plan: victims to preemptors, the nodes of workloads that move or shrink, refused sessions."""

    evict: dict[str, str] = field(default_factory=dict)
    move: dict[str, list[str]] = field(default_factory=dict)
    refuse: tuple[str, ...] = ()


EXPECTED = {
    "1-fair-share-straddles-reservation": Expected({"a2": "b1"}),
    "2-firm-job-own-team-limit": Expected({"t": "f"}),
    "2b-firm-job-own-team-node-lost": Expected({"t": "f"}),
    "3-needless-victim-in-one-plan": Expected({"a1": "s"}),
    "4-higher-priority-leaves-one-node": Expected({"a-old": "c1"}),
    "4b-higher-priority-leaves-gang": Expected({"a2": "c1"}),
    "5-gang-on-two-nodes-is-not-moved": Expected(move={"a1": ["n1", "n1", "n1"]}),
    "5b-gang-on-two-nodes-is-stopped": Expected(move={"a1": ["n1", "n1", "n1"]}),
    "6-no-gpus-in-quota": Expected(),
    "7-elastic-gang-below-reservation": Expected(),
    "7b-elastic-gangs-could-shrink": Expected(move={"a1": ["n1"], "a2": ["n1"]}),
    "8-cascade": Expected({"c2": "b1"}),
    "9-set-that-is-larger-than-it-has-to-be": Expected({"a3": "c1"}),
    "10-static-quota-after-own-team": Expected({"a1": "b2", "b1": "b2"}),
    "10b-static-quota-on-another-node": Expected({"a1": "b1", "c1": "b1"}),
    "11-static-quota-within-capacity": Expected({"b1": "b2"}),
    "stuck-victim": Expected({"a1": "b1"}),
    "12-node-changed-pools-under-a-gang": Expected({"a1": "a2"}),
    "12-limit-across-pools-session": Expected({"train1": "book1"}),
    "12b-limit-across-pools-department": Expected({"s1": "v1"}),
    "13-needless-victim-across-pools": Expected({"b2": "v2"}),
    "14-cascade-across-pools": Expected({"b-low": "v1"}),
    "15-own-team-before-fair-share": Expected({"s1": "v3"}),
    "15b-own-team-takes-more": Expected({"s3": "v3"}),
    "16-nomination-lost-to-fair-share": Expected({"v-old": "v-new"}),
    "16b-nomination-lost-in-own-team": Expected({"b1": "v-norm"}),
    "17-start-undone-by-own-victim": Expected(move={"b-high": ["c1"]}),
    "18-shrunk-gang-is-not-seen-as-a-victim": Expected({"y1": "b1"}),
    "19-gang-shrinks-once-per-plan": Expected(move={"flex": ["n1"]}),
    "20-department-sold-twice-to-sessions": Expected(refuse=("y0", "y1")),
    "21-gang-shrinks-more-than-asked": Expected({"a3": "b1"}),
    "22-min-runtime": Expected(),
    "23-cascade-in-a-pool-beside": Expected({"w02": "n4"}),
}
NOT_YET: set[str] = set()
"""Engines that still break these rules."""
CHOICES = [
    pytest.param(
        engine, case, marks=[pytest.mark.xfail(strict=True, reason="rules not amended yet")] * (engine in NOT_YET)
    )
    for engine in ENGINES
    for case in EXPECTED
]


@pytest.mark.covers("F14", "F15", "F16", "F17")
@pytest.mark.parametrize(("engine", "case"), CHOICES)
def test_each_case_is_decided_by_the_rules(engine: str, case: str) -> None:
    plan = ENGINES[engine](read_snapshot((CASES / f"{case}.yaml").read_text()))
    assert not plan.start
    assert {e.id: e.preemptor for e in plan.evict} == EXPECTED[case].evict
    assert {m.id: [placed.node for placed in m.to] for m in plan.move} == EXPECTED[case].move
    assert tuple(r.id for r in plan.refused) == EXPECTED[case].refuse


@pytest.mark.covers("F14", "F15", "F16", "F17")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", EXPECTED)
def test_every_case_comes_to_rest_and_everyone_for_whom_others_left_has_started(engine: str, case: str) -> None:
    world = world_of(read_snapshot((CASES / f"{case}.yaml").read_text()))
    assert not come_to_rest(world, ENGINES[engine])


@pytest.mark.covers("F14")
def test_every_case_has_an_expectation() -> None:
    assert {path.stem for path in CASES.glob("*.yaml")} == EXPECTED.keys()
