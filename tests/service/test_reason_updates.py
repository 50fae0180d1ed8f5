"""Those who wait are told what is news, at a pace that the store can bear, and in the end all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from makeway_quota.control.reasons import Reasons
from makeway_quota.engine.index.pending import Alike, Pending, Told
from makeway_quota.engine.plan import Fact, Waiting
from makeway_quota.engine.state import Placed
from makeway_quota.engine.state import Workload as EngineView
from makeway_quota.store.records import Place
from makeway_quota.wording import sentence


def told(message: str, not_before: float | None = None) -> Told:
    return Told("no_free_gpus", "place", (Fact("plain_wait", {"code": message}),), {}, not_before)


@dataclass(frozen=True)
class Row:
    """The fields of a row that a reason depends on."""

    id: str
    name: str = ""
    reason_code: str = "submitted"
    reason_message: str = ""
    not_before: float | None = None
    nomination: tuple[Place, ...] = ()
    version: int = 1


class ChangeSet:
    """Rows that wait, and what was written into them; time stands still until it is moved."""

    def __init__(self, many: int) -> None:
        self.now = 0.0
        self.reasons = Reasons(pace=10.0, clock=lambda: self.now)
        self.members = tuple(EngineView(f"w{at:03}", "a", "one") for at in range(many))
        self.rows = {w.id: Row(w.id) for w in self.members}

    def cycle(self, *groups: Alike, single: dict[str, Waiting] | None = None) -> list[str]:
        """Plan, write the reasons, and return the ids that were written."""
        found = self.reasons.news(Pending(single or {}, groups), self.rows)
        for waiting in found:
            places = tuple(Place(p.node, p.devices, (1000,)) for p in waiting.nomination)
            change = {
                "reason_code": waiting.code,
                "reason_message": sentence(waiting.facts),
                "not_before": waiting.not_before,
            }
            row = self.rows[waiting.id]
            self.rows[row.id] = replace(row, **change, nomination=places, version=row.version + 1)
        return [waiting.id for waiting in found]

    def said(self) -> set[str]:
        """Every sentence in the store."""
        return {self.text(row.id) for row in self.rows.values()}

    def text(self, id: str) -> str:
        """The text that the row's sentence was made from."""
        return self.rows[id].reason_message.removeprefix("Waits: ").removesuffix(".")


@pytest.mark.covers("F53")
def test_a_first_reason_is_written_at_once_and_then_no_more() -> None:
    change_set = ChangeSet(100)
    group = Alike(1, change_set.members, told("0 of 8 GPUs are free."))
    assert len(change_set.cycle(group)) == 100
    assert change_set.cycle(group) == []
    change_set.now += 60
    assert change_set.cycle(group) == []
    assert not change_set.reasons.behind


@pytest.mark.covers("F53")
def test_new_reasons_reach_all_rows_at_the_pace() -> None:
    change_set = ChangeSet(100)
    change_set.cycle(Alike(1, change_set.members, told("0 of 8 GPUs are free.")))
    group = Alike(1, change_set.members, told("1 of 8 GPUs is free."))
    assert len(change_set.cycle(group)) == 20, "twice the pace at once"
    assert change_set.reasons.behind
    assert change_set.cycle(group) == []
    for _ in range(9):
        change_set.now += 1.0
        change_set.cycle(group)
    change_set.cycle(group)
    assert change_set.said() == {"1 of 8 GPUs is free."}
    change_set.now += 1.0
    assert change_set.cycle(group) == []
    assert not change_set.reasons.behind


def test_a_reason_that_another_writer_changed_is_corrected() -> None:
    change_set = ChangeSet(15)
    change_set.cycle(Alike(1, change_set.members, told("old")))
    group = Alike(1, change_set.members, told("new"))
    change_set.cycle(group)
    change_set.rows["w003"] = replace(change_set.rows["w003"], reason_message="old", version=9)
    change_set.now += 1.0
    assert change_set.cycle(group) == ["w003"]
    change_set.cycle(group)
    assert change_set.said() == {"new"}
    assert not change_set.reasons.behind


def test_every_queue_has_its_turn() -> None:
    change_set = ChangeSet(60)
    split = [change_set.members[:30], change_set.members[30:]]
    change_set.cycle(*(Alike(at + 1, part, told("old")) for at, part in enumerate(split)))
    for second in range(12):
        change_set.now += 1.0
        change_set.cycle(
            *(Alike(at + 1, part, told(f"new {second if at == 0 else ''}")) for at, part in enumerate(split))
        )
    assert {change_set.text(w.id) for w in split[1]} == {"new "}, "though the first queue's words never rest"


def test_who_joins_a_queue_and_who_loses_a_claim_are_told_at_once() -> None:
    change_set = ChangeSet(40)
    change_set.cycle(Alike(1, change_set.members[:39], told("old")))
    nomination = (Placed(0, "n1", (0,)),)
    promise = Waiting(
        "w000", "reclaiming", "nomination", (Fact("plain_wait", {"code": "soon"}),), {}, nomination=nomination
    )
    written = change_set.cycle(Alike(1, change_set.members[1:], told("new")), single={"w000": promise})
    assert written[:2] == ["w000", "w039"], "a promise and a first reason before all others"
    assert change_set.rows["w000"].nomination
    lost = (replace(change_set.members[0], nomination=nomination), *change_set.members[1:])
    change_set.cycle(Alike(1, lost, told("new")))
    assert not change_set.rows["w000"].nomination


def test_a_forecast_that_shifts_by_seconds_is_no_news() -> None:
    change_set = ChangeSet(5)
    change_set.cycle(Alike(1, change_set.members, told("wait", 100.0)))
    assert change_set.cycle(Alike(1, change_set.members, told("wait", 104.0))) == []
    assert len(change_set.cycle(Alike(1, change_set.members, told("wait", 110.0)))) == 5
