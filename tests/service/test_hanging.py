"""What should have ended and does not is listed for administrators: where, since when, what was tried, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_quota.backends.kubernetes.attempts.removals import FIRST_PAUSE, MAX_PAUSE, PodRemoval
from makeway_quota.services.cluster.stuck_workloads import StuckWorkload, _Leftover
from makeway_quota.wording.remedies import remedy
from running import PEOPLE
from simulated_pods import EPOCH, Habits, SimulatedCluster, Site

POLICY = """
version: 1
pools: [{name: p}]
profiles: [{name: one, gpus: 1, pools: [p], policies: [[rnd, devops]], grace: 30}]
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [p], reserved: 0}]}
  - {name: devops, groups: [devops], quotas: [{pools: [p], reserved: 2}]}
"""


async def site(folder: Path) -> Site:
    """Return a service with two nodes of one GPU and a job of R&D on each; that on n1 or n2 with the name r0 hangs."""
    result = Site(SimulatedCluster({"n1": 1, "n2": 1}), folder, POLICY)
    await result.start()
    result.cluster.habits["r0"] = Habits(stuck=True)
    for id in ("r1", "r0"):  # the last to start is the first to leave
        result.submit(id, "rnd")
        await result.run(1.0)
    return result


async def hanging(found: Site, person: str = "root") -> list[StuckWorkload]:
    return await found.service.services.stuck_workloads.list_stuck(PEOPLE[person])


@pytest.mark.covers("N33", "F20")
async def test_a_victim_that_hangs_is_listed_with_what_was_tried(tmp_path: Path) -> None:
    result = await site(tmp_path)
    node = result.cluster.pods["makeway-r0-1-0"].node
    result.submit("d", "devops")
    await result.run(30.0 + 50.0)
    assert await hanging(result) == [], "it has its grace, and a minute beyond"
    await result.run(20.0)
    (entry,) = await hanging(result)
    assert (entry.workload, entry.name, entry.kind, entry.team, entry.owner) == ("r0", "r0", "job", "rnd", "rnd")
    assert (entry.nodes, entry.gpus, entry.targets) == ((node,), 1, ("pod makeway-r0-1-0",))
    assert entry.since is not None
    assert abs(entry.since.timestamp() - (EPOCH + 2.0 + 30.0)) < 2.0
    tries = entry.tries
    assert tries == sum(name == "makeway-r0-1-0" for _, name in result.cluster.deletes) > 0
    assert entry.next_at is not None
    assert result.cluster.now < entry.next_at.timestamp() < result.cluster.now + MAX_PAUSE + 60
    assert "kubectl --namespace jobs describe pod makeway-r0-1-0" in entry.remedy
    assert await hanging(result, "ana") == [], "an administrator can do something about it"
    await result.run(entry.next_at.timestamp() - result.cluster.now + 2.0)
    (later,) = await hanging(result)
    assert later.tries == tries + 1
    result.cluster.set_ready(node, False)
    await result.run(1.0)
    assert f"kubectl taint node {node} node.kubernetes.io/out-of-service" in (await hanging(result))[0].remedy
    result.cluster.set_ready(node, True)
    result.cluster.release("r0")
    await result.run(3.0)
    assert await hanging(result) == []
    await result.stop()


@pytest.mark.covers("N33")
async def test_a_refused_removal_says_why(tmp_path: Path) -> None:
    result = await site(tmp_path)
    result.submit("d", "devops")
    result.cluster.refuses_deletes = True
    await result.run(120.0)
    (entry,) = await hanging(result)
    assert "the admission webhook does not answer" in entry.problem
    assert entry.tries > 1
    await result.stop()


@pytest.mark.covers("N33")
async def test_a_pod_that_outlives_its_row_is_deleted_again_and_listed(tmp_path: Path) -> None:
    result = await site(tmp_path)
    result.cluster.habits["r0"] = habits = Habits(saves=2.0, lingers=1e9)
    result.submit("d", "devops")
    await result.run(2.0)
    assert (await result.rows())["r0"].state == "checkpointing"
    habits.stuck = True  # its worker ends, and a container beside it does not
    await result.run(60.0)
    assert (await result.rows())["r0"].state == "pending"
    name = "makeway-r0-1-0"
    first = sum(pod == name for _, pod in result.cluster.deletes)
    assert first > 1, "it is deleted again"
    await result.run(60.0)
    (entry,) = await hanging(result)
    deleted = sum(pod == name for _, pod in result.cluster.deletes)
    assert (entry.workload, entry.name, entry.gpus, entry.targets) == ("r0", "r0", 1, (f"pod {name}",))
    assert entry.tries == deleted > first
    await result.run(1800.0)
    assert sum(pod == name for _, pod in result.cluster.deletes) < deleted + 10, "less and less often"
    result.cluster.release("r0")
    await result.run(400.0)
    assert await hanging(result) == []
    assert result.cluster.backend is not None
    assert result.cluster.backend._removals.asked([name]) == [], "what is gone is forgotten"
    await result.stop()


def test_what_hangs_of_two_attempts_is_one_entry_since_the_first() -> None:
    victim, before = _Leftover({"n1": 1000, "n2": 500}, 200.0, 250.0), _Leftover({"n2": 500, "n3": 1000}, 100.0, 150.0)
    both = _Leftover({"n1": 1000, "n2": 1000, "n3": 1000}, 100.0, 150.0)
    assert victim.merged(before) == before.merged(victim) == both
    assert victim.merged(_Leftover({"n1": 1000}, 0.0, 0.0)).deadline == 0.0, "longer than this process knows"


@pytest.mark.covers("N33")
async def test_a_victim_of_which_an_earlier_attempt_hangs_too_holds_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await site(tmp_path)
    service = result.service.services.stuck_workloads
    one, two = _Leftover({"n1": 1000}, 300.0, 20.0), _Leftover({"n2": 1000}, 100.0, 30.0)
    monkeypatch.setattr(service, "_evicted", lambda rows: {"r0": one, "r1": _Leftover({"n1": 1000}, 90.0, 25.0)})
    monkeypatch.setattr(service, "_outliving", lambda: {"r0": two})
    entries = await hanging(result)
    assert [(entry.workload, entry.nodes, entry.gpus) for entry in entries] == [
        ("r0", ("n1", "n2"), 2.0),
        ("r1", ("n1",), 1.0),
    ], "the longest first, by the present clock"
    await result.stop()


def test_a_pod_that_stays_is_deleted_less_and_less_often() -> None:
    removal, now, pauses = PodRemoval("p", "u", 2), 0.0, []
    for _ in range(9):
        removal.try_again(now)
        pauses.append(removal.next_at - now - 2)
        now = removal.next_at
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == MAX_PAUSE
    assert removal.tries == 9


def test_every_place_has_a_remedy() -> None:
    assert "ps -o pid,stat,wchan:30,args -p 12,13" in remedy("process", ["process 12", "process 13"], [], "")
    assert "admin page" in remedy("session", ["server “default” of ana"], [], "")
    assert "kubectl --namespace jobs delete pod p --force" in remedy("pod", ["pod p"], [], "jobs")
    assert "ps -o" in remedy("process", ["process 12"], ["this-machine"], ""), "no kubectl where there is no cluster"
    assert "n1 and n2 are not ready" in remedy("pod", ["pod p"], ["n1", "n2"], "jobs")
