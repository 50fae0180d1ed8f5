"""Snapshot files: their content, their error messages, and the plan that is printed."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from pathlib import Path

import pytest
from makeway_quota.engine import (
    Node,
    Placed,
    Plan,
    Pool,
    Profile,
    QuotaLine,
    Settings,
    Snapshot,
    TeamQuota,
    Terminating,
    Workload,
    schedule,
)
from makeway_quota.main import main
from makeway_quota.snapshot_file import (
    ENGINES,
    SnapshotError,
    plan_command,
    read_snapshot,
    snapshot_as_document,
    write_snapshot,
)
from worlds import World

GREEDY = """
version: 1
now: 2026-01-01T12:00:00Z
settings: {consolidation: true, victim_order: newest, starvation_after: 86400, history_half_life: 0}
pools:    [{name: h100, resource: nvidia.com/gpu, capacity: null, strategy: pack, profiles: [gpu3]}]
nodes:    [{name: n1, pool: h100, gpus: 10, cpu: 128, memory: 1048576, ready: true, foreign: {gpus: 0}}]
profiles: [{name: gpu3, gpus: 3, workers: 1, cpu: 0, memory: 0, pools: [h100], policies: [rnd, [devops]]}]
policies:
  - {name: rnd, title: "R&D", weight: Medium, priority: 0, quotas: [{pools: [h100], reserved: 5, limit: 9, lend: 5}]}
  - {name: devops, quotas: [{reserved: 5, limit: 9}]}
workloads:
  - {id: j1, kind: job, policy: rnd, profile: gpu3, owner: ana, priority: normal, preemptible: true,
     submitted_at: 2026-01-01T11:00:00Z, state: running, started_at: 2026-01-01T11:00:05Z,
     placement: [{node: n1}], last_checkpoint_at: null}
  - {id: j2, policy: rnd, profile: gpu3, submitted_at: "2026-01-01T11:00:01Z", state: running, started_at: 1767265206,
     placement: [{node: n1}]}
  - {id: j3, policy: rnd, profile: gpu3, submitted_at: 2026-01-01T11:00:02, state: running,
     started_at: 2026-01-01T11:00:07Z, placement: [{node: n1}]}
  - {id: d1, policy: devops, profile: gpu3, owner: bo, submitted_at: 2026-01-01T11:59:00Z}
"""


def run(tmp_path: Path, text: str, format: str = "text") -> tuple[int, str]:
    path = tmp_path / "snapshot.yaml"
    path.write_text(text, encoding="utf-8")
    out = io.StringIO()
    return plan_command(str(path), format, out), out.getvalue()


@pytest.mark.covers("F20", "F23")
def test_the_plan_of_a_file_as_json(tmp_path: Path) -> None:
    code, text = run(tmp_path, GREEDY, "json")
    plan = json.loads(text)
    assert code == 0
    assert [(e["id"], e["for"]) for e in plan["evict"]] == [("j3", "d1")]
    assert plan["pending"][0]["code"] == "reclaiming"
    assert plan["pending"][0]["not_before"] == "2026-01-01T12:00:30Z"
    assert plan["usage"][1] == {
        "policy": "rnd",
        "pools": ["h100"],
        "reserved": 5,
        "limit": 9,
        "usage": 9,
        "guaranteed": 0,
    }


def test_the_plan_of_a_file_as_a_table(tmp_path: Path) -> None:
    code, text = run(tmp_path, GREEDY)
    assert code == 0
    assert "Evict\n  j3  rnd/gpu3  for d1" in text
    assert "Wait\n  d1  devops/gpu3  reclaiming" in text


def test_json_reads_like_yaml(tmp_path: Path) -> None:
    document = snapshot_as_document(read_snapshot(GREEDY))
    assert schedule(read_snapshot(json.dumps(document))) == schedule(read_snapshot(GREEDY))


def test_a_snapshot_survives_being_written(tmp_path: Path) -> None:
    world = World(grace=12).pool("p", nodes=2, gpus=4, cpu=64000, memory=4096).pool("q")
    world.team("a", reserved=2, limit=4, lend=0).team("b", reserved=1.5, weight="Lowest", priority=3)
    world.profile("half", 0.5, policies=["a", ("b",)], cpu=1500).profile("two", 2, pools=("q", "p"))
    world.jobs("j1 j2 j3", "a", "half", priority=1).session("s", "b", "two").step()
    world.jobs("j4 j5", "b", "two", gpus=500, preemptible=False)
    snapshot = world.snapshot()
    assert read_snapshot(write_snapshot(snapshot, "json")) == snapshot
    assert read_snapshot(write_snapshot(snapshot)) == snapshot


EVERYTHING = Snapshot(
    now=1234.5,
    settings=Settings(False, "cheapest", 60.0, 3600.5, False, "reclaim", False, 12.0, 57_600.0, 5.0),
    pools=(
        Pool("p", "amd.com/gpu", 5000, "autoscaled", "spread", ("f",), False, 3, 1, 8, 64000, 4096, False),
        Pool("q"),
    ),
    nodes=(
        Node(
            *("n", "p", 4, 64500, 4096, False, True, (3, 1, 2, 0), (3,), 500, 1500, 100, "H100"),
            terminating=(Terminating("i", (2,), 500, 250, 7, 99.5, 1),),
            down_since=1230.5,
            pods=110,
            foreign_pods=7,
            host="m",
            first_device=4096,
            ready_at=1290.5,
            sessions=False,
        ),
    ),
    profiles=(
        Profile("f", 2000, 3, 2, 1500, 4096, ("q", "p"), (("a",), ("b", "c")), 1.5, 2.5, 9.0, 99.0, ("H100", "A100")),
    ),
    policies=(
        TeamQuota("a", (QuotaLine(("p",), 1500, 4000, 500), QuotaLine(("q",))), "Lowest", 3, "dept", 3900, "Team A"),
        TeamQuota("dept"),
    ),
    workloads=(
        Workload(
            id="j",
            team="a",
            profile="f",
            owner="ana",
            kind="session",
            priority=-1,
            preemptible=True,
            submitted_at=1.25,
            state="checkpointing",
            started_at=2.5,
            placement=(Placed(0, "n", (3, 1), 500), Placed(1, "n", (2,))),
            attempt=3,
            last_checkpoint_at=4.5,
            evicted_for="k",
            deadline=99.5,
            nomination=(Placed(0, "n"),),
            paused=True,
            failed_node="n",
            gpus=500,
            workers=2,
            min_workers=1,
            cpu=250,
            memory=7,
            time_limit=8.5,
            expected=7.5,
            earlier_runtime=6.5,
            avoid=("n2",),
        ),
    ),
    paused=("a/f",),
)


def test_a_host_is_in_each_pool_once() -> None:
    node = "{{name: {name}, pool: {pool}, gpus: 1, host: m}}"
    text = "version: 1\nnow: 1\npools: [{name: p}, {name: q}]\nnodes:\n"
    nodes = [node.format(name=name, pool=pool) for name, pool in (("a", "p"), ("b", "q"), ("c", "p"))]
    assert len(read_snapshot(text + "".join(f"  - {item}\n" for item in nodes[:2])).nodes) == 2
    with pytest.raises(SnapshotError, match=r'nodes\[2\].*host "m" is in pool "p" twice'):
        read_snapshot(text + "".join(f"  - {item}\n" for item in nodes))


def test_every_field_of_the_engine_survives_being_written() -> None:
    """Without a field, the replay of a dumped cycle would be another plan."""
    records = [EVERYTHING, EVERYTHING.settings, EVERYTHING.workloads[0], EVERYTHING.workloads[0].placement[0]]
    records += [
        EVERYTHING.pools[0],
        EVERYTHING.nodes[0],
        EVERYTHING.nodes[0].terminating[0],
        EVERYTHING.profiles[0],
        EVERYTHING.policies[0],
    ]
    for record in (*records, EVERYTHING.policies[0].quotas[0]):
        for field in fields(record):
            assert getattr(record, field.name) != field.default, f"give {type(record).__name__}.{field.name} a value"
    for format in ("json", "yaml"):
        assert read_snapshot(write_snapshot(EVERYTHING, format)) == EVERYTHING


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version: 1", "version: 2", 'version: this is "2", but this Makeway reads version 1'),
        ("now: 2026", "then: 2026", 'then: "then" is not a key here; there are: '),
        ("now: 2026-01-01T12:00:00Z", "now: noon", 'now: this is "noon", expected a time such as'),
        ("capacity: null", "colour: red", 'pools[0].colour: "colour" is not a key here'),
        (
            "reserved: 5, limit: 9, lend",
            "reserved: -5, limit: 9, lend",
            "policies[0].quotas[0].reserved: -5 is too small; the least is 0 GPUs",
        ),
        ("weight: Medium", "weight: Huge", 'policies[0].weight: this is "Huge", expected one of None, Lowest'),
        (
            "gpus: 3, workers",
            "gpus: 1.5, workers",
            "profiles[0].gpus: a worker takes part of one GPU (less than 1) or whole ones",
        ),
        ("gpus: 3, workers: 1,", "", "profiles[0].gpus: gpus is missing"),
        ("pool: h100, gpus: 10", "pool: h200, gpus: 10", 'nodes[0].pool: there is no "h200"; did you mean "h100"?'),
        (
            "foreign: {gpus: 0}",
            "foreign: {gpu: 0}",
            'nodes[0].foreign.gpu: "gpu" is not a key here; did you mean "gpus"?',
        ),
        ("id: j2", "id: j1", 'workloads[1].id: the id "j1" is used twice in workloads'),
        (
            "placement: [{node: n1}], last",
            "placement: [n1], last",
            'workloads[0].placement[0]: this is "n1", expected a table with the keys node',
        ),
        (
            "priority: normal",
            "priority: urgent",
            'workloads[0].priority: this is "urgent", expected one of low, normal, high',
        ),
        ("ready: true", "ready: 1", 'nodes[0].ready: this is "1", expected true or false'),
        ("policies:\n", "policies: [\n", "this is not YAML or JSON: "),
    ],
)
def test_bad_input_is_one_line_that_names_the_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GREEDY
    code, text = run(tmp_path, GREEDY.replace(old, new, 1))
    assert code == 2
    assert said in text
    assert text.count("\n") == 1


def test_a_missing_file_is_one_line() -> None:
    out = io.StringIO()
    assert plan_command("/nowhere/snapshot.yaml", "text", out) == 2
    assert out.getvalue() == "makeway-quota plan: /nowhere/snapshot.yaml: No such file or directory\n"


@pytest.mark.parametrize("error", [IndexError("list index out of range"), RecursionError("a\nb"), KeyError()])
def test_an_error_of_the_engine_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(snapshot: Snapshot) -> Plan:
        raise error

    path = tmp_path / "snapshot.yaml"
    path.write_text(GREEDY, encoding="utf-8")
    monkeypatch.setitem(ENGINES, "fast", broken)
    assert main(["plan", str(path)]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert told.count("\n") == 1
    assert told.startswith(f"makeway-quota plan: {path}: the engine failed: {type(error).__name__}")


def test_a_list_is_no_snapshot() -> None:
    with pytest.raises(SnapshotError, match="this is a list, expected a table with the keys version, now, settings"):
        read_snapshot("[]")


@pytest.mark.covers("F20")
def test_the_reference_engine_plans_a_file_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.yaml"
    path.write_text(GREEDY, encoding="utf-8")
    plans = []
    for engine in ("fast", "reference"):
        assert main(["plan", "--format", "json", "--engine", engine, str(path)]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    fast, slow = ([(e["id"], e["for"], e["deadline"]) for e in plan["evict"]] for plan in plans)
    assert fast == slow == [("j3", "d1", "2026-01-01T12:00:30Z")]
    assert plans[0]["usage"] == plans[1]["usage"]
