"""Those who wait are told what is news, at a pace that the books can bear, and in the end all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from makeway_quota.engine.pending import Alike, Pending, Told
from makeway_quota.engine.plan import Waiting
from makeway_quota.engine.state import Placed
from makeway_quota.engine.state import Workload as Shown
from makeway_quota.store.records import Place
from makeway_quota.telling import Reasons


def told(message: str, not_before: float | None = None) -> Told:
    return Told("no_free_gpus", "place", message, {}, not_before)


@dataclass(frozen=True)
class Row:
    """What is read of a row of the books."""

    id: str
    name: str = ""
    reason_code: str = "submitted"
    reason_message: str = ""
    not_before: float | None = None
    claim: tuple[Place, ...] = ()
    version: int = 1


class Books:
    """Rows that wait, and what was written into them; time stands still until it is moved."""

    def __init__(self, many: int) -> None:
        self.now = 0.0
        self.reasons = Reasons(pace=10.0, clock=lambda: self.now)
        self.members = tuple(Shown(f"w{at:03}", "a", "one") for at in range(many))
        self.rows = {w.id: Row(w.id) for w in self.members}

    def turn(self, *groups: Alike, single: dict[str, Waiting] | None = None) -> list[str]:
        """Tell everybody, write it down, and give who was written to."""
        found = self.reasons.news(Pending(single or {}, groups), self.rows)
        for waiting in found:
            places = tuple(Place(p.node, p.devices, (1000,)) for p in waiting.claim)
            change = {"reason_code": waiting.code, "reason_message": waiting.message, "not_before": waiting.not_before}
            row = self.rows[waiting.id]
            self.rows[row.id] = replace(row, **change, claim=places, version=row.version + 1)
        return [waiting.id for waiting in found]

    def said(self) -> set[str]:
        """Every sentence in the books."""
        return {row.reason_message for row in self.rows.values()}


@pytest.mark.covers("F53")
def test_a_first_reason_is_written_at_once_and_then_no_more() -> None:
    books = Books(100)
    group = Alike(1, books.members, told("0 of 8 GPUs are free."))
    assert len(books.turn(group)) == 100
    assert books.turn(group) == []
    books.now += 60
    assert books.turn(group) == []
    assert not books.reasons.behind


@pytest.mark.covers("F53")
def test_new_words_reach_everybody_at_the_pace() -> None:
    books = Books(100)
    books.turn(Alike(1, books.members, told("0 of 8 GPUs are free.")))
    group = Alike(1, books.members, told("1 of 8 GPUs is free."))
    assert len(books.turn(group)) == 20, "twice the pace at once"
    assert books.reasons.behind
    assert books.turn(group) == []
    for _ in range(9):
        books.now += 1.0
        books.turn(group)
    books.turn(group)
    assert books.said() == {"1 of 8 GPUs is free."}
    books.now += 1.0
    assert books.turn(group) == []
    assert not books.reasons.behind


def test_what_somebody_else_wrote_meanwhile_is_put_right() -> None:
    books = Books(15)
    books.turn(Alike(1, books.members, told("old")))
    group = Alike(1, books.members, told("new"))
    books.turn(group)
    books.rows["w003"] = replace(books.rows["w003"], reason_message="old", version=9)
    books.now += 1.0
    assert books.turn(group) == ["w003"]
    books.turn(group)
    assert books.said() == {"new"}
    assert not books.reasons.behind


def test_every_queue_has_its_turn() -> None:
    books = Books(60)
    split = [books.members[:30], books.members[30:]]
    books.turn(*(Alike(at + 1, part, told("old")) for at, part in enumerate(split)))
    for second in range(12):
        books.now += 1.0
        books.turn(*(Alike(at + 1, part, told(f"new {second if at == 0 else ''}")) for at, part in enumerate(split)))
    assert {books.rows[w.id].reason_message for w in split[1]} == {"new "}, "though the first queue's words never rest"


def test_who_joins_a_queue_and_who_loses_a_claim_are_told_at_once() -> None:
    books = Books(40)
    books.turn(Alike(1, books.members[:39], told("old")))
    claim = (Placed(0, "n1", (0,)),)
    promise = Waiting("w000", "reclaiming", "promise", "Yours soon.", {}, claim=claim)
    written = books.turn(Alike(1, books.members[1:], told("new")), single={"w000": promise})
    assert written[:2] == ["w000", "w039"], "a promise and a first reason before all others"
    assert books.rows["w000"].claim
    lost = (replace(books.members[0], claim=claim), *books.members[1:])
    books.turn(Alike(1, lost, told("new")))
    assert not books.rows["w000"].claim


def test_a_forecast_that_shifts_by_seconds_is_no_news() -> None:
    books = Books(5)
    books.turn(Alike(1, books.members, told("wait", 100.0)))
    assert books.turn(Alike(1, books.members, told("wait", 104.0))) == []
    assert len(books.turn(Alike(1, books.members, told("wait", 110.0)))) == 5
