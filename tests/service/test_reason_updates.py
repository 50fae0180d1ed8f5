"""New reasons of pending workloads are written at a bounded pace, and in the end all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from makeway_quota.control.reason_throttle import MAX_PAUSE, SHARE, Explaining, ReasonThrottle
from makeway_quota.engine.index.pending import Pending, PendingGroup, PendingReason
from makeway_quota.engine.plan import Fact, Waiting
from makeway_quota.engine.snapshot import Placed
from makeway_quota.engine.snapshot import Workload as EngineView
from makeway_quota.values import Place
from makeway_quota.wording import sentence


def told(message: str, not_before: float | None = None) -> PendingReason:
    return PendingReason("no_free_gpus", "place", (Fact("plain_wait", {"code": message}),), {}, not_before)


@dataclass(frozen=True)
class Row:
    """The fields of a row that a reason depends on."""

    id: str
    name: str = ""
    reason_code: str = "submitted"
    reason_message: str = ""
    not_before: float | None = None
    nomination: tuple[Place, ...] = ()
    team: str | None = "rnd"
    version: int = 1


class Loop:
    """Pending rows, and the reasons that were written to them; the clock only moves when a test moves it."""

    def __init__(self, many: int) -> None:
        self.now = 0.0
        self.reasons = ReasonThrottle(pace=10.0, clock=lambda: self.now)
        self.members = tuple(EngineView(f"w{at:03}", "a", "one") for at in range(many))
        self.rows = {w.id: Row(w.id) for w in self.members}

    def cycle(self, *groups: PendingGroup, single: dict[str, Waiting] | None = None) -> list[str]:
        """Plan, write the reasons, and return the ids that were written."""
        result = self.reasons.unwritten(Pending(single or {}, groups), self.rows)
        for waiting in result:
            places = tuple(Place(p.node, p.devices, (1000,)) for p in waiting.nomination)
            change = {
                "reason_code": waiting.code,
                "reason_message": sentence(waiting.facts),
                "not_before": waiting.not_before,
            }
            row = self.rows[waiting.id]
            self.rows[row.id] = replace(row, **change, nomination=places, version=row.version + 1)
        return [waiting.id for waiting in result]

    def said(self) -> set[str]:
        """Every sentence in the store."""
        return {self.text(row.id) for row in self.rows.values()}

    def text(self, id: str) -> str:
        """The text that the row's sentence was made from."""
        return self.rows[id].reason_message.removeprefix("Waits: ").removesuffix(".")


def test_a_first_reason_is_written_at_once_and_then_no_more() -> None:
    loop = Loop(100)
    group = PendingGroup(1, loop.members, told("0 of 8 GPUs are free."))
    assert len(loop.cycle(group)) == 100
    assert loop.cycle(group) == []
    loop.now += 60
    assert loop.cycle(group) == []
    assert not loop.reasons.behind


def test_new_reasons_reach_all_rows_at_the_pace() -> None:
    loop = Loop(100)
    loop.cycle(PendingGroup(1, loop.members, told("0 of 8 GPUs are free.")))
    group = PendingGroup(1, loop.members, told("1 of 8 GPUs is free."))
    assert len(loop.cycle(group)) == 20, "twice the pace at once"
    assert loop.reasons.behind
    assert loop.cycle(group) == []
    for _ in range(9):
        loop.now += 1.0
        loop.cycle(group)
    loop.cycle(group)
    assert loop.said() == {"1 of 8 GPUs is free."}
    loop.now += 1.0
    assert loop.cycle(group) == []
    assert not loop.reasons.behind


def test_new_reasons_are_written_in_batches_not_a_few_in_each_cycle() -> None:
    loop = Loop(100)
    loop.cycle(PendingGroup(1, loop.members, told("0 of 8 GPUs are free.")))
    group = PendingGroup(1, loop.members, told("1 of 8 GPUs is free."))
    loop.cycle(group)
    written = []
    for _ in range(10):
        loop.now += 0.125
        written.append(len(loop.cycle(group)))
        assert loop.reasons.behind
    assert written == [0, 0, 0, 5, 0, 0, 0, 5, 0, 0], "half a second's pace at once"


def test_a_reason_that_another_writer_changed_is_corrected() -> None:
    loop = Loop(15)
    loop.cycle(PendingGroup(1, loop.members, told("old")))
    group = PendingGroup(1, loop.members, told("new"))
    loop.cycle(group)
    loop.rows["w003"] = replace(loop.rows["w003"], reason_message="old", version=9)
    loop.now += 1.0
    assert loop.cycle(group) == ["w003"]
    loop.cycle(group)
    assert loop.said() == {"new"}
    assert not loop.reasons.behind


def test_every_queue_has_its_turn() -> None:
    loop = Loop(60)
    split = [loop.members[:30], loop.members[30:]]
    loop.cycle(*(PendingGroup(at + 1, part, told("old")) for at, part in enumerate(split)))
    for second in range(12):
        loop.now += 1.0
        loop.cycle(
            *(PendingGroup(at + 1, part, told(f"new {second if at == 0 else ''}")) for at, part in enumerate(split))
        )
    assert {loop.text(w.id) for w in split[1]} == {"new "}, "though the first queue's words never rest"


def test_a_first_reason_and_a_lost_nomination_are_written_at_once() -> None:
    loop = Loop(40)
    loop.cycle(PendingGroup(1, loop.members[:39], told("old")))
    nomination = (Placed(0, "n1", (0,)),)
    promise = Waiting(
        "w000", "reclaiming", "nomination", (Fact("plain_wait", {"code": "soon"}),), {}, nomination=nomination
    )
    written = loop.cycle(PendingGroup(1, loop.members[1:], told("new")), single={"w000": promise})
    assert written[:2] == ["w000", "w039"], "a promise and a first reason before all others"
    assert loop.rows["w000"].nomination
    lost = (replace(loop.members[0], nomination=nomination), *loop.members[1:])
    loop.cycle(PendingGroup(1, lost, told("new")))
    assert not loop.rows["w000"].nomination


def test_a_forecast_that_shifts_by_seconds_is_not_written() -> None:
    loop = Loop(5)
    loop.cycle(PendingGroup(1, loop.members, told("wait", 100.0)))
    assert loop.cycle(PendingGroup(1, loop.members, told("wait", 104.0))) == []
    assert len(loop.cycle(PendingGroup(1, loop.members, told("wait", 110.0)))) == 5


def test_a_cycle_after_a_costly_explanation_leaves_reasons_out_and_a_later_one_makes_up_for_it() -> None:
    loop = Loop(0)
    explaining = Explaining(lambda: loop.now)
    assert explaining.due()
    assert explaining.wait() is None
    explaining.done(0.01)
    assert not explaining.due()
    assert explaining.wait() is None, "nothing was left out yet, so no cycle is needed for it"
    explaining.skipped()
    assert explaining.wait() == pytest.approx(0.01 * (1 / SHARE - 1))
    loop.now += 0.1
    assert explaining.due()
    assert explaining.wait() == 0
    explaining.done(60.0)
    explaining.skipped()
    assert explaining.wait() == MAX_PAUSE


def test_a_plan_without_reasons_leaves_those_in_the_store_and_writes_nominations() -> None:
    loop = Loop(3)
    group = PendingGroup(1, loop.members, told("0 of 8 GPUs are free."))
    loop.cycle(group)
    nominated = Waiting("w000", "held", "place", (), {}, nomination=(Placed(0, "n1", (0,), 1000),))
    result = loop.reasons.unwritten(Pending({"w000": nominated}, ()), loop.rows, explained=False)
    assert result == [nominated]
    assert loop.cycle(group) == [], "the group is known still, and nothing of it changed"
