"""What is over quota follows each start, end and move, and a change costs what it changes."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from makeway_quota.control.reads.quota_standing import QuotaStanding
from makeway_quota.engine.index.ledger import Ledger, LineState
from makeway_quota.engine.snapshot import PRIORITIES
from makeway_quota.policy import read_policy
from makeway_quota.store import rows
from makeway_quota.store.records import NewWorkload, Workload

POLICY = """
pools: [{name: a, size: 40}, {name: b, size: 40}]
profiles: [{name: g1, gpus: 1}]
policies:
  - {name: dep, quotas: [{pools: [a], reserved: 9}, {pools: [b], reserved: 4}]}
  - {name: one, parent: dep, groups: [one], priority: 2, quotas: [{pools: [a], reserved: 3}]}
  - {name: two, parent: dep, groups: [two]}
  - {name: own, groups: [own], quotas: [{pools: [a, b], reserved: 5}]}
  - {name: none, groups: [none]}
"""
Amounts = tuple[tuple[str, int], ...]


def workload(rng: random.Random, number: int) -> tuple[Workload, Amounts]:
    new = NewWorkload(
        f"j{number}", "job", rng.choice(["one", "two", "own", "none", "gone"]), "g1", "ana", gpus=1000,
        preemptible=rng.random() < 0.8, priority=rng.choice(sorted(PRIORITIES)),
    )  # fmt: skip
    row = rows.initial_record(new, float(rng.randrange(50)))
    started = None if rng.random() < 0.1 else float(rng.randrange(50))
    pools = rng.sample(["a", "b"], rng.randrange(3))
    return row._replace(state="running", started_at=started), tuple((pool, rng.randrange(0, 4) * 500) for pool in pools)


def counted_anew(ledger: Ledger, counted: Mapping[str, tuple[Workload, Amounts]]) -> dict[str, bool]:
    """Return what is over quota as the rule says it: everything that is more protected is counted first."""

    def rank(row: Workload) -> tuple[object, ...]:
        policy = ledger.account(row.team or "").team
        started = row.submitted_at if row.started_at is None else row.started_at
        return row.preemptible, -policy.priority, -PRIORITIES[row.priority], started, row.submitted_at, row.id

    used: dict[LineState, int] = {}
    result = {}
    for row, amounts in sorted(counted.values(), key=lambda each: rank(each[0])):
        account = ledger.account(row.team or "")
        for pool, amount in amounts:
            for level in account.chain:
                for line in level.reserving(pool):
                    used[line] = used.get(line, 0) + amount
        levels = [(account.guarantor(pool), pool) for pool, _ in amounts]
        covered = bool(levels) and all(
            level is not None and all(used[line] <= line.quota.reserved for line in level.reserving(pool))
            for level, pool in levels
        )
        result[row.id] = row.preemptible and not covered
    return result


@pytest.mark.parametrize("seed", range(40))
def test_what_is_over_quota_is_that_of_a_new_count_after_every_change(seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger(read_policy(POLICY).policies)
    standing, counted = QuotaStanding(ledger), dict[str, tuple[Workload, Amounts]]()
    for _ in range(120):
        row, amounts = workload(rng, rng.randrange(30))
        if rng.random() < 0.4:
            standing.remove(row.id)
            counted.pop(row.id, None)
        else:
            standing.put(row, amounts)
            counted[row.id] = row, amounts
        if rng.random() < 0.7:
            assert standing.over_quota() == counted_anew(ledger, counted)
    before = standing.over_quota()
    assert standing.over_quota() is before, "the same object while nothing changes"


def test_one_change_among_thousands_judges_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    standing, judged = QuotaStanding(Ledger(read_policy(POLICY).policies)), list[str]()
    for number in range(3000):
        row = rows.initial_record(NewWorkload(f"j{number}", "job", "two", "g1", "ana", gpus=1000), float(number))
        standing.put(row._replace(state="running", started_at=float(number)), (("a", 1000),))
    assert list(standing.over_quota().values()).count(False) == 9
    judge = QuotaStanding._is_over
    monkeypatch.setattr(
        QuotaStanding, "_is_over", lambda self, one: judged.append(one.sort_key[-1]) or judge(self, one)
    )
    standing.remove("j3")
    assert standing.over_quota()["j9"] is False
    assert judged == ["j9"]
