"""Tables of live workloads: filters, order, true counts, and who sees what."""

from __future__ import annotations

import pytest
from makeway_quota.services.jobs.listing import ListQuery, list_workloads
from makeway_quota.store.records import NewWorkload, Workload
from makeway_quota.store.rows import initial_record
from makeway_quota.values import Place


def row(id: str, team: str = "rnd", owner: str = "ana", at: float = 0.0, **fields: object) -> Workload:
    new = NewWorkload(id=id, kind="job", team=team, profile="gpu1", owner=owner, name=f"train {id}")
    return initial_record(new, at)._replace(**fields)


def ids(rows: list[Workload], query: ListQuery, visible: tuple[str, ...] | None = None, owner: str = "x") -> list[str]:
    return [line.id for line in list_workloads(rows, visible, owner, query).lines]


WAITING = [row(f"j-{i:03}", at=float(i % 7), team="rnd" if i % 2 else "ops", owner=f"u{i % 3}") for i in range(120)]


@pytest.mark.covers("N27")
def test_the_count_is_of_all_that_match_and_pages_have_all_of_them_once() -> None:
    first = list_workloads(WAITING, None, "x", ListQuery())
    assert (first.total, first.pages, len(first.lines)) == (120, 3, 50)
    shown = [id for page in (1, 2, 3) for id in ids(WAITING, ListQuery(page=page))]
    assert len(shown) == len(set(shown)) == 120
    by_id = {item.id: item for item in WAITING}
    assert shown == sorted(shown, key=lambda id: (by_id[id].submitted_at, id))
    assert list_workloads(WAITING, None, "x", ListQuery(page=99)).query.page == 3
    assert list_workloads([], None, "x", ListQuery(page=99)).pages == 1


def test_filters_narrow_the_list() -> None:
    assert list_workloads(WAITING, None, "x", ListQuery(team="rnd")).total == 60
    assert list_workloads(WAITING, None, "x", ListQuery(owner="u1")).total == 40
    assert list_workloads(WAITING, None, "x", ListQuery(profile="gpu2")).total == 0
    assert ids(WAITING, ListQuery(text="TRAIN J-007")) == ["j-007"]
    running = row("j-9", state="running", placement=(Place("n1", (0,), (1000,)),), started_at=5.0)
    assert ids([*WAITING, running], ListQuery("running")) == ["j-9"]
    assert ids([running], ListQuery("running", node="n1")) == ["j-9"]
    assert ids([running], ListQuery("running", node="n")) == []


def test_users_see_the_work_of_their_teams_and_their_own() -> None:
    assert list_workloads(WAITING, ("ops",), "x", ListQuery()).total == 60
    assert list_workloads(WAITING, (), "u1", ListQuery()).total == 40
    assert list_workloads(WAITING, (), "x", ListQuery()).total == 0
