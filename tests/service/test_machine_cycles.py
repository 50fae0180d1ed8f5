"""What happens to one machine reads one row and builds nothing anew; `make bench` has what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makeway_quota.autoscale.machine import Machine
from makeway_quota.engine.incremental import IncrementalEngine
from makeway_quota.store import Store, open_store
from makeway_quota.store.machines import live
from makeway_quota.store.machines.machines import StoredMachines

from benchmarks.machine_cycle import Site

MACHINES, BOOTING = 40, 10


class Counted:
    """What was built, and which machines were read, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines, self.read = 0, list[str]()
        build, machines = IncrementalEngine._build, live.machines

        def built(engine: IncrementalEngine, snapshot: object) -> None:
            self.engines += 1
            build(engine, snapshot)  # type: ignore[arg-type]

        def rows(*args: object) -> list[object]:
            result = machines(*args)  # type: ignore[arg-type]
            self.read += [one.id for one in result]
            return list(result)

        monkeypatch.setattr(IncrementalEngine, "_build", built)
        monkeypatch.setattr(live, "machines", rows)


def pages_read(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the deployments of which a page of machines, those that are over too, is read from now on."""
    result, page = list[object](), StoredMachines.machines

    def read(self: StoredMachines, deployment: str | None = None, **options: int) -> list[Machine]:
        result.append(deployment)
        return page(self, deployment, **options)

    monkeypatch.setattr(StoredMachines, "machines", read)
    return result


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    yield store
    store.close()


@pytest.mark.covers("F49")
@pytest.mark.parametrize(
    ("event", "rows"),
    [(Site.refuse, 0), (Site.boot, 1), (Site.join, 1), (Site.end_a_job, 0)],
    ids=["back-off", "boot", "join", "end of a job"],
)
async def test_one_event_reads_one_row_and_builds_no_engine(
    store: Store, monkeypatch: pytest.MonkeyPatch, event: Callable[[Site], None], rows: int
) -> None:
    site = Site(store, MACHINES, BOOTING, jobs=200)
    monkeypatch.setattr("makeway_quota.autoscale.transitions.NEEDED_EVERY", 3600.0)
    for _ in range(4):
        await site.cycle()
    if event is Site.join:
        site.boot()
        await site.cycle()
    counted, nodes = Counted(monkeypatch), len(site.world.observed.nodes)
    pages = pages_read(monkeypatch)
    event(site)
    await site.cycle()
    await site.cycle()
    assert counted.engines == 0
    assert pages == [], "how long boots take is known"
    assert len(set(counted.read)) == rows
    assert len(counted.read) <= 2 * rows
    assert len(site.world.observed.nodes) == nodes + (event is Site.join)
