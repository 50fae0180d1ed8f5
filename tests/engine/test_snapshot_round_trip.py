"""Any snapshot survives its file, in YAML and JSON: what is written reads back as the same snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from makeway_quota.engine import (
    Node,
    Placed,
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
from makeway_quota.policy import Issue
from makeway_quota.policy import models as policy_models
from makeway_quota.policy.tables import Table
from makeway_quota.snapshot_file import SnapshotError, models, read_snapshot, snapshot_as_document, write_snapshot

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(bool)
milli = st.integers(0, 1_000_000)
shares = st.integers(0, 1000) | st.integers(0, 999).map(lambda gpus: gpus * 1000)
counts = st.integers(0, 10**9)
workers = st.integers(1, 100_000)
spans = st.floats(0, 366 * 86_400, allow_subnormal=False)
times = st.floats(-1e10, 1e11)
devices = st.lists(st.integers(0, 15), max_size=3).map(tuple)
placed = st.builds(Placed, st.integers(0, 9), names, devices, milli)
placements = st.lists(placed, max_size=3).map(tuple)


def one_of(record: type, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy that gives each field of a record a value, and forgets none."""
    assert set(known) == {field.name for field in fields(record)}
    return st.builds(record, **known)


def many(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=3).map(tuple)


some_settings = one_of(
    Settings,
    consolidation=st.booleans(),
    victim_order=st.sampled_from(["newest", "cheapest"]),
    starvation_after=spans,
    history_half_life=spans,
    user_fairness=st.booleans(),
    fair_share=st.sampled_from(["order", "reclaim"]),
    in_team_preemption=st.booleans(),
    grace=spans,
    yields_after=spans,
    stuck_after=spans,
)
some_pools = one_of(
    Pool,
    name=names,
    resource=st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"]),
    capacity=st.none() | milli,
    kind=st.sampled_from(["static", "autoscaled"]),
    strategy=st.sampled_from(["pack", "spread", "fill"]),
    profiles=many(names),
    consolidation=st.booleans(),
    max_nodes=st.integers(0, 100_000),
    booting=counts,
    node_gpus=st.integers(0, 1024),
    node_cpu=milli,
    node_memory=counts,
    sessions=st.booleans(),
)
outliving = one_of(
    Terminating,
    workload=names,
    devices=devices,
    milli_per_device=milli,
    cpu=milli,
    memory=counts,
    deadline=times,
    pods=counts,
)
some_nodes = one_of(
    Node,
    name=names,
    pool=names,
    gpus=st.integers(0, 100_000),
    cpu=milli,
    memory=counts,
    ready=st.booleans(),
    cordoned=st.booleans(),
    devices=devices,
    foreign_devices=devices,
    foreign_gpus=milli,
    foreign_cpu=milli,
    foreign_memory=counts,
    model=texts,
    terminating=many(outliving),
    down_since=st.none() | times,
    pods=counts,
    foreign_pods=counts,
    host=st.just("") | names,
    first_device=counts,
    sessions=st.booleans(),
    ready_at=st.none() | times,
)
some_profiles = one_of(
    Profile,
    name=names,
    gpus=shares,
    workers=workers,
    min_workers=st.none() | workers,
    cpu=milli,
    memory=counts,
    pools=many(names),
    policies=many(many(names).filter(bool)),
    min_runtime=spans,
    reclaim_after=spans,
    grace=st.none() | st.floats(0, 86_400),
    time_limit=st.none() | spans,
    models=many(names),
)
lines = one_of(QuotaLine, pools=many(names), reserved=milli, limit=st.none() | milli, lend=st.none() | milli)
some_policies = one_of(
    TeamQuota,
    name=names,
    quotas=many(lines),
    weight=st.sampled_from(["None", "Lowest", "Low", "Medium", "High"]),
    priority=st.integers(-1000, 1000),
    parent=st.none() | names,
    history=milli,
    title=texts,
)
some_workloads = one_of(
    Workload,
    id=names,
    team=names,
    profile=names,
    owner=texts,
    kind=st.sampled_from(["session", "job"]),
    priority=st.integers(-9, 9),
    preemptible=st.none() | st.booleans(),
    submitted_at=times,
    state=st.sampled_from(["pending", "starting", "running", "checkpointing", "succeeded"]),
    started_at=st.none() | times,
    placement=placements,
    attempt=counts,
    last_checkpoint_at=st.none() | times,
    evicted_for=st.none() | names,
    deadline=st.none() | times,
    nomination=placements,
    paused=st.booleans(),
    failed_node=st.none() | names,
    avoid=many(names),
    gpus=st.none() | shares,
    workers=st.none() | workers,
    min_workers=st.none() | workers,
    cpu=st.none() | milli,
    memory=st.none() | counts,
    time_limit=st.none() | spans,
    expected=st.none() | spans,
    earlier_runtime=spans,
)


def _once_in_a_pool(nodes: list[Node]) -> tuple[Node, ...]:
    """Return nodes of which no two of one host are in the same pool."""
    hosts = [(node.host, node.pool) for node in nodes]
    return tuple(replace(n, host="") if hosts[at] in hosts[:at] else n for at, n in enumerate(nodes))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot whose names exist, each once; nothing else about it needs to make sense."""
    pools = draw(st.lists(some_pools, min_size=1, max_size=3, unique_by=lambda pool: pool.name))
    pool = st.sampled_from([pool.name for pool in pools])
    nodes = draw(st.lists(some_nodes, max_size=3, unique_by=lambda node: node.name))
    profiles = draw(st.lists(some_profiles, max_size=3, unique_by=lambda profile: profile.name))
    policies = draw(st.lists(some_policies, max_size=3, unique_by=lambda team: team.name))
    parent = st.none() | st.sampled_from([team.name for team in policies] or [None])
    return Snapshot(
        now=draw(times),
        settings=draw(some_settings),
        pools=tuple(pools),
        nodes=_once_in_a_pool([replace(node, pool=draw(pool)) for node in nodes]),
        profiles=tuple(replace(profile, pools=draw(many(pool))) for profile in profiles),
        policies=tuple(
            replace(
                team,
                parent=draw(parent),
                quotas=tuple(replace(line, pools=draw(many(pool))) for line in team.quotas),
            )
            for team in policies
        ),
        workloads=tuple(draw(st.lists(some_workloads, max_size=3, unique_by=lambda work: work.id))),
        paused=draw(many(names)),
    )


@given(snapshots())
@settings(max_examples=60, deadline=None)
def test_any_snapshot_survives_its_file(snapshot: Snapshot) -> None:
    assert read_snapshot(write_snapshot(snapshot, "json")) == snapshot
    assert read_snapshot(write_snapshot(snapshot, "yaml")) == snapshot


@given(snapshots(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_read_or_refused_in_one_line(snapshot: Snapshot, data: st.DataObject) -> None:
    text = write_snapshot(snapshot, data.draw(st.sampled_from(["json", "yaml"])))
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 20)))
    filling = data.draw(
        st.sampled_from(["", "[", "{", "- ", ": ", "-1", "null", "\n", "'", "*a", "&a ", ".inf", "1e999"])
    )
    refused: list[str] = []
    try:
        read_snapshot(text[:begin] + filling + text[end:])
    except SnapshotError as error:
        refused += [str(error), *(issue.message for issue in error.issues)]
    assert not any("\n" in message for message in refused)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from(["", "x", "3", "1e300", "2h", "9" * 400 + "Gi", "all", "high", "{message}", 10**400]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "gpus", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or table in a document with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list | tuple):
            yield from _places(inner)


@given(snapshots(), anything, st.data())
@settings(max_examples=60, deadline=None)
def test_any_value_anywhere_is_read_or_refused_with_its_line(
    snapshot: Snapshot, value: object, data: st.DataObject
) -> None:
    document: Any = json.loads(json.dumps(snapshot_as_document(snapshot)))
    places = list(_places(document))
    table, key = data.draw(st.sampled_from(places))
    table[key] = value
    text = data.draw(st.sampled_from([json.dumps(document, indent=1), yaml.safe_dump(document)]))
    issues: list[Issue] = []
    try:
        read_snapshot(text)
    except SnapshotError as error:
        issues = error.issues
    assert all(issue.line and issue.line <= text.count("\n") + 1 and issue.message for issue in issues)


def test_the_models_have_the_defaults_of_the_engine() -> None:
    """What a file leaves out means the same to its reader as to the engine."""
    pairs: list[tuple[type[Table], type]] = [
        (policy_models.DocumentSettings, Settings),
        (policy_models.DocumentPool, Pool),
        (policy_models.DocumentProfile, Profile),
        (policy_models.DocumentTeamQuota, TeamQuota),
        (policy_models.QuotaTable, QuotaLine),
        (models.FilePool, Pool),
        (models.FileNode, Node),
        (models.FileProfile, Profile),
        (models.FileTeamQuota, TeamQuota),
        (models.FileWorkload, Workload),
    ]
    set_by_read = {("DocumentProfile", "gpus"), ("DocumentProfile", "policies")}
    set_by_read |= {("DocumentPool", "strategy"), ("FilePool", "strategy")}
    for table, record in pairs:
        shared = [field for field in fields(record) if field.name in table.model_fields]
        assert len(shared) >= 4, table
        for field in shared:
            model_field = table.model_fields[field.name]
            if (table.__name__, field.name) not in set_by_read:
                assert model_field.is_required() == (field.default is MISSING), (table, field.name)
                assert model_field.is_required() or model_field.default == field.default, (table, field.name)


def test_work_without_gpus_survives_its_file() -> None:
    text = """
version: 1
now: 1000
pools: [{name: p}]
nodes: [{name: n1, pool: p, gpus: 0, cpu: 8}]
profiles: [{name: cpu, gpus: 0, cpu: 4, pools: [p], policies: [a]}, {name: g1, gpus: 1, pools: [p], policies: [a]}]
policies: [{name: a}]
workloads:
  - {id: w1, policy: a, profile: cpu, state: running, started_at: 1, placement: [{node: n1, gpu_share: 0}]}
  - {id: w2, policy: a, profile: g1, gpus: 0, submitted_at: 5}
"""
    snapshot = read_snapshot(text)
    assert [profile.gpus for profile in snapshot.profiles] == [0, 1000]
    assert [work.gpus for work in snapshot.workloads] == [None, 0], (
        "0 GPUs override the profile's, and are not a default"
    )
    assert snapshot.workloads[0].placement == (Placed(0, "n1", (), 0),)
    assert [start.id for start in schedule(snapshot).start] == ["w2"]
    for format in ("json", "yaml"):
        assert read_snapshot(write_snapshot(snapshot, format)) == snapshot


@pytest.mark.parametrize("title", ["R&D \U0001f680", "a\u2028b", "a\x85b", "\x7f", "\ufeff", "null", "1e3", " x ", ""])
def test_json_of_other_programs_is_json(title: str) -> None:
    """YAML's idea of JSON lacks pairs of surrogates, and takes U+2028 and U+0085 for the end of a line."""
    document = {"version": 1, "now": 0, "pools": [], "policies": [{"name": "a", "title": title}]}
    assert read_snapshot(json.dumps(document)).policies[0].title == title
    assert read_snapshot(json.dumps(document, indent=1)).policies[0].title == title


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 1\nnow: 1e300", "snapshot:2: now: 1e300 is too large; the most is 250,000,000,000 seconds"),
        (
            "version: 1\nnow: 0\nnodes: [{name: n, pool: p, gpus: 1e300}]",
            "snapshot:3: nodes[0].gpus: 1e300 is too large",
        ),
        (
            "version: 1\nnow: 0\nworkloads: [{id: a, policy: b, profile: c, ran: 1e30}]",
            "workloads[0].ran: 1e30 is too long",
        ),
        (
            "version: 1\nnow: 0\nworkloads: [{id: a, policy: b, profile: c, priority: [high]}]",
            "this is a list, expected one of",
        ),
        ("version: 1\nnow: 0\nsettings: {victim_order: {a: 1}}", "this is a table, expected one of newest, cheapest"),
        ('{"version": 1,\n "now": 0,\n "now": 1}', 'snapshot:3: the key "now" comes twice (first on line 2); keep one'),
        (
            '{"version": 1,\n "now": 0,\n "pools": [{"name": 1.5, "capacity": true}]}',
            "snapshot:3: pools[0].capacity: this",
        ),
        ('{"version": 1,\n "now": NaN}', 'snapshot:2: now: this is "NaN", expected a time'),
        ("version: 1\nnow: 0\nnodes: &a []\npools: *a", "snapshot:4: aliases (*a) are not used here"),
        (
            "version: 1\nnow: 0\nnodes: [{name: no, pool: on, gpus: 010, ready: off}]",
            'ready: this is "off", expected true',
        ),
        ("version: 1\nnow: 0\npools: [" + "[" * 30 + "]" * 30 + "]", "nested more than 20 deep"),
        ('{"now": ' + "[" * 100_000, "nested more than 20 deep"),
    ],
)
def test_traps_of_yaml_and_json_are_refused_with_their_line(text: str, said: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_one_line() -> None:
    with pytest.raises(SnapshotError) as caught:
        read_snapshot("version: 1\nnow: 0\npools: [{name: p, x: 1, capacity: a}]\nnodes: [{gpus: 1}]")
    assert [(issue.line, issue.where) for issue in caught.value.issues] == [
        (3, "pools[0].capacity"),
        (3, "pools[0].x"),
        (4, "nodes[0].name"),
        (4, "nodes[0].pool"),
    ]
    assert str(caught.value).endswith("; and 1 more")


def test_units_are_those_of_the_policy_file() -> None:
    text = "{version: 1, now: 0, settings: {grace: 2m}, pools: [{name: p, node_memory: 64Gi}]}"
    snapshot = read_snapshot(text)
    assert (snapshot.settings.grace, snapshot.pools[0].node_memory) == (120.0, 65_536)
