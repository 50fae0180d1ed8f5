"""Small worlds whose machines launch, boot, idle out and cost what is worked out by hand, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.main import main
from makeway_quota.simulate.cluster import of_document
from makeway_quota.simulate.planner import FullPlanner
from makeway_quota.simulate.replay import replay

POLICY = """
version: 1
pools:
  - {name: cloud, kind: autoscaled}
profiles:
  - {name: one, gpus: 1, pools: [cloud], grace: 60}
  - {name: pair, gpus: 2, workers: 2, pools: [cloud]}
  - {name: huge, gpus: 16, pools: [cloud]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{reserved: 8}]}
"""
TYPE = "{name: g2, pool: cloud, instance: big, gpus: 2, price: 3.60, max_machines: 3, idle_timeout: 600}"
HEAD = "submit_s,team,num_gpu,duration_s,profile\n"
IDLE, REPORT = 600 + 1, 10
"""A machine drains a second after its idle time-out, and is ended when its agent has reported once more"""


class World:
    """A folder with a policy, a deployment and a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("policy.yaml", POLICY)

    def write(self, name: str, text: str) -> str:
        file = self.folder / name
        file.write_text(text)
        return str(file)

    def deployment(self, *types: str, name: str = "cloud", **fields: object) -> str:
        lines = [f"{key}: {value}" for key, value in fields.items()]
        kinds = [f"  - {kind}" for kind in types or (TYPE,)]
        document = ["version: 1", f"name: {name}", "provider: memory", *lines, "machine_types:", *kinds]
        return self.write(f"{name}.yaml", "\n".join(document))

    def simulate(self, jobs: str, *options: str) -> int:
        trace, numbers = self.write("jobs.csv", HEAD + jobs), self.folder / "out.json"
        policy = str(self.folder / "policy.yaml")
        return main(["simulate", "--policy", policy, "--trace", trace, "--json", str(numbers), *options])

    def result(self, jobs: str, *options: str) -> dict[str, Any]:
        assert self.simulate(jobs, *options) == 0
        (numbers,) = json.loads((self.folder / "out.json").read_text())["simulated"]
        return dict(numbers)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.covers("N23")
def test_what_machines_cost_is_what_is_worked_out_by_hand(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Two jobs share a machine of two GPUs; after it is gone, a third one waits for another. One second costs 0.001."""
    page = world.folder / "out.html"
    jobs = "0,rnd,1,3600,one\n0,rnd,1,7200,one\n20000,rnd,1,3600,one\n"
    result = world.result(jobs, "--deployment", world.deployment(), "--html", str(page))
    first, second = 180 + 7200 + IDLE + REPORT, 180 + 3600 + IDLE + REPORT
    (machines,) = result["machines"]
    assert machines == {
        "deployment": "cloud", "type": "g2", "machines": 2, "at_once": 1,
        "hours": round((first + second) / 3600, 2), "cost": round((first + second) / 1000, 2), "currency": "EUR",
    }  # fmt: skip
    assert result["spend"] == {"EUR": machines["cost"]}
    assert (result["wait_mean_s"], result["wait_p95_s"], result["still_waiting"]) == (180, 180, 0)
    assert result["utilisation_percent"] == round(100 * (3600 + 7200 + 3600) / (2 * (first + second)), 2)
    sentence = "In all 3.44 machine-hours, 12.38 EUR; jobs waited 180 s on average, 95 % of them 180 s at most."
    assert sentence in capsys.readouterr().out
    assert sentence in page.read_text()


def test_the_boot_time_and_the_idle_time_out_are_what_was_asked_for(world: World) -> None:
    """A machine of 100 s of boot that idles for 50 s: a job that comes 40 s after another finds it ready."""
    kind = TYPE.replace("idle_timeout: 600", "idle_timeout: 50")
    jobs = "0,rnd,1,1000,one\n1140,rnd,1,1000,one\n"
    result = world.result(jobs, "--deployment", world.deployment(kind), "--boot", "100")
    assert result["wait_mean_s"] == 50, "100 s and none"
    assert result["machines"][0]["cost"] == pytest.approx((1140 + 1000 + 51 + REPORT) / 1000, abs=0.005)


def test_types_are_tried_in_order_and_counted_apart(world: World) -> None:
    """The first type has one machine at most; its price is not known, and so is not all of the spend."""
    unknown = "{name: own, pool: cloud, instance: own, gpus: 1, max_machines: 1}"
    result = world.result("0,rnd,1,100,one\n0,rnd,1,100,one\n", "--deployment", world.deployment(unknown, TYPE))
    own, dear = result["machines"]
    assert (own["type"], own["machines"], own["cost"]) == ("own", 1, None)
    assert (dear["type"], dear["machines"], dear["cost"]) == ("g2", 1, round((180 + 100 + IDLE + REPORT) / 1000, 2))
    assert result["spend"] == {"EUR": None}


def test_the_workers_of_a_gang_wait_for_all_of_their_machines(world: World) -> None:
    result = world.result("0,rnd,4,100,pair\n", "--deployment", world.deployment())
    assert result["machines"][0]["machines"] == result["machines"][0]["at_once"] == 2
    assert result["wait_mean_s"] == 180


def test_a_machine_that_is_kept_without_work_saves_the_next_job_its_boot(world: World) -> None:
    """It is launched with the first job, and paid until the simulation ends, when idle machines would have ended."""
    kind = TYPE.replace("max_machines: 3", "max_machines: 1, min_idle: 1")
    result = world.result("0,rnd,1,100,one\n9000,rnd,1,100,one\n", "--deployment", world.deployment(kind))
    assert result["wait_mean_s"] == 90, "180 s and none"
    assert result["machines"][0]["machines"] == 1
    assert 9100 <= result["machines"][0]["hours"] * 3600 <= 9100 + 600 + 120


def test_a_budget_of_a_month_ends_machines_and_the_job_goes_on_in_the_next(world: World) -> None:
    """The job saves before its machine is ended; what it did counts. Read as Unix seconds, the trace is of 1970."""
    result = world.result("0,rnd,1,10800,one\n", "--deployment", world.deployment(month="9.00"))
    assert result["jobs"] == 1
    assert result["delay_mean_h"] * 3600 == pytest.approx(31 * 86_400 - 10_800, rel=0.01)
    (machines,) = result["machines"]
    assert machines["machines"] == 2
    worked = 10_800 + 2 * (180 + 60) + IDLE
    assert worked <= machines["hours"] * 3600 <= worked + 600, "it did not begin anew"
    assert result["waste_percent"] == pytest.approx(100 * (60 + 60) / 10_800, abs=0.01)


def test_work_that_no_machine_is_for_is_reported_and_ends_the_simulation(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = "0,rnd,1,100,one\n0,rnd,16,100,huge\n"
    result = world.result(jobs, "--deployment", world.deployment())
    assert (result["jobs"], result["still_waiting"]) == (1, 1)
    assert result["days"] < 0.1
    assert "1 still waited at the end" in capsys.readouterr().out
    paused = world.result("0,rnd,1,100,one\n", "--deployment", world.deployment(paused="true"))
    assert (paused["still_waiting"], paused["machines"][0]["machines"], paused["machine_hours"]) == (1, 0, 0)


def test_both_planners_of_the_simulator_launch_the_same(world: World) -> None:
    from makeway_quota.autoscale.document import read_deployment
    from makeway_quota.policy import read_policy
    from makeway_quota.simulate.incremental import IncrementalPlanner
    from makeway_quota.simulate.trace import read_trace

    jobs = "".join(f"{at * 250},rnd,1,{300 + 700 * (at % 3)},one\n" for at in range(30))
    arrivals = read_trace(Path(world.write("jobs.csv", HEAD + jobs)))
    deployment = read_deployment(Path(world.deployment()).read_text())
    cluster = of_document("made", read_policy(POLICY), arrivals, node_gpus=8, gpus=0, deployments=[deployment])
    incremental = replay(cluster, arrivals, IncrementalPlanner(cluster))
    assert incremental.machines == replay(cluster, arrivals, FullPlanner(cluster)).machines
    assert incremental.machines[0].peak_machines > 1


def test_nodes_and_machines_serve_pools_of_their_own(world: World) -> None:
    policy = POLICY.replace("pools:\n", "pools:\n  - {name: own}\n", 1).replace("pools: [cloud]", "pools: [own, cloud]")
    world.write("policy.yaml", policy)
    jobs = "0,rnd,1,1000,one\n" * 10
    result = world.result(jobs, "--deployment", world.deployment(), "--gpus", "8")
    assert result["gpus"] == 10, "a node of 8, and a machine of 2"
    assert result["machines"][0]["machines"] == 1
    assert result["wait_mean_s"] == pytest.approx(2 * 180 / 10)


@pytest.mark.parametrize(
    ("types", "options", "says"),
    [
        (TYPE.replace("pool: cloud", "pool: clod"), (), 'there is no pool "clod"'),
        (TYPE.replace("gpus: 2", "gpus: two"), (), "gpus"),
        (TYPE, ("--gpus", "8"), "--gpus is for pools that do not grow"),
        (TYPE, ("--boot", "-1"), "0 seconds or more"),
        (TYPE, ("--boot", "nan"), "0 seconds or more"),
        (TYPE, ("--deployment", "missing.yaml"), "missing.yaml cannot be read: No such file or directory."),
    ],
)
def test_a_mistake_in_what_machines_are_made_of_is_named(
    world: World, types: str, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.simulate("0,rnd,1,100,one\n", "--deployment", world.deployment(types), *options) == 2
    assert says in capsys.readouterr().err


def test_pools_that_do_not_grow_are_named(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--deployment", world.deployment()
    world.write("policy.yaml", POLICY.replace("pools:\n", "pools:\n  - {name: own}\n", 1))
    assert world.simulate("0,rnd,1,100,one\n", *options) == 2
    assert "say with --gpus how many GPUs the other pools have: own." in capsys.readouterr().err
    world.write("policy.yaml", POLICY.replace(", kind: autoscaled", ""))
    assert world.simulate("0,rnd,1,100,one\n", *options) == 2
    assert "no machine is launched for the pool cloud: give it kind: autoscaled." in capsys.readouterr().err
    world.write("policy.yaml", POLICY)
    assert world.simulate("0,rnd,1,100,one\n", *options, *options) == 2
    assert "Two of the deployments have the same name" in capsys.readouterr().err
