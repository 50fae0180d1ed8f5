"""A written document reads back as it was, and a difference is described in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from makeway_quota import policy
from makeway_quota.engine.snapshot import Pool, Profile, QuotaLine, Settings, TeamQuota
from makeway_quota.policy import Document, Issue, PolicyInvalid, PoolFacts, ProfileFacts, TeamFacts
from makeway_quota.policy.document import Image, Volume

SAMPLE = Path(__file__).parents[2] / "hub_config" / "policy.yaml"
slugs = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,8}[a-z0-9])?", fullmatch=True)
claims = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)
letters = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Cn", "Co"])
texts = st.text(letters, max_size=20).map(str.strip)
words = texts.filter(bool)
seconds = st.integers(0, 86_400).map(float) | st.integers(0, 86_400_000).map(lambda n: n / 1000)
milli = st.integers(0, 50_000)


@st.composite
def lines(draw: st.DrawFn, pools: list[str]) -> QuotaLine:
    reserved = draw(milli)
    return QuotaLine(
        pools=tuple(draw(st.lists(st.sampled_from(pools), unique=True))),
        reserved=reserved,
        limit=draw(st.none() | st.integers(reserved, 100_000)),
        lend=draw(st.none() | st.integers(0, reserved)),
    )


@st.composite
def pools(draw: st.DrawFn, name: str, profiles: list[str]) -> tuple[Pool, PoolFacts]:
    scaled = draw(st.booleans())
    pool = Pool(
        name,
        draw(st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"])),
        draw(st.none() | milli) if not scaled else None,
        "autoscaled" if scaled else "static",
        draw(st.sampled_from(["pack", "spread"])),
        tuple(draw(st.lists(st.sampled_from(profiles), unique=True))),
        draw(st.booleans()),
        draw(st.integers(0, 9)) if scaled else 0,
        node_cpu=draw(milli) if scaled else 0,
    )
    local = draw(st.none() | st.just("all") | st.sets(st.integers(0, 9)).map(lambda s: tuple(sorted(s))))
    return pool, PoolFacts(draw(texts), draw(st.none() | milli), local, draw(st.dictionaries(words, texts, max_size=2)))


image_names = st.from_regex(r"[a-z0-9]{1,5}(/[a-z0-9]{1,5})?(:[a-zA-Z0-9]{1,4})?", fullmatch=True)


@st.composite
def images(draw: st.DrawFn) -> tuple[Image, ...]:
    names = draw(st.lists(slugs, unique=True, max_size=3))
    default = draw(st.none() | st.sampled_from(names)) if names else None
    return tuple(Image(name, draw(image_names), draw(texts), draw(texts), name == default) for name in names)


@st.composite
def volumes(draw: st.DrawFn) -> tuple[Volume, ...]:
    names = draw(st.lists(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True), unique=True, max_size=3))
    folders = st.sampled_from(["", "models", "shared/models v2"])
    return tuple(Volume(name, draw(claims), f"/{name}", draw(folders), draw(st.booleans())) for name in names)


@st.composite
def profiles(
    draw: st.DrawFn, name: str, pools: list[str], policies: list[str], grace: float
) -> tuple[Profile, ProfileFacts]:
    gpus = draw(st.integers(0, 999) | st.integers(0, 16).map(lambda n: n * 1000))
    workers = draw(st.integers(1, 9))
    everyone = draw(st.booleans())
    ranks = draw(st.permutations(policies).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: (p[:n], p[n:]))))
    profile = Profile(
        name,
        gpus,
        workers,
        draw(st.none() | st.integers(1, workers)),
        draw(milli),
        draw(st.integers(0, 10**6)),
        tuple(draw(st.lists(st.sampled_from(pools), unique=True, min_size=1 if gpus else 0))),
        (tuple(policies),) if everyone else tuple(tuple(rank) for rank in ranks if rank),
        draw(seconds),
        draw(seconds),
        draw(st.just(grace) | seconds),
        draw(st.none() | seconds),
    )
    choice = draw(images())
    facts = ProfileFacts(
        draw(texts) or name,
        draw(texts),
        draw(st.sampled_from([("session",), ("job",), ("session", "job")])),
        None if choice else draw(st.none() | image_names),
        draw(st.dictionaries(st.from_regex(r"[A-LN-Z_][A-Z0-9_]{0,5}", fullmatch=True), texts, max_size=2)),
        draw(st.sampled_from(["SIGTERM", "SIGUSR1"])),
        everyone,
        images=choice,
        max_workers=draw(st.none() | st.integers(workers, 100_000)),
    )
    if "job" not in facts.kinds:
        profile = replace(profile, time_limit=None)
    return profile, facts


@st.composite
def documents(draw: st.DrawFn) -> Document:
    names = [draw(st.lists(slugs, unique=True, min_size=1, max_size=3)) for _ in range(3)]
    chosen = Settings(
        draw(st.booleans()),
        draw(st.sampled_from(["newest", "cheapest"])),
        draw(seconds),
        draw(seconds),
        fair_share=draw(st.sampled_from(["order", "reclaim"])),
        grace=draw(seconds),
    )
    made_pools = {name: draw(pools(name, names[1])) for name in names[0]}
    made_profiles = {name: draw(profiles(name, names[0], names[2], chosen.grace)) for name in names[1]}
    made_policies = tuple(
        TeamQuota(
            name,
            tuple(draw(st.lists(lines(names[0]), max_size=2))),
            draw(st.sampled_from(["None", "Lowest", "Low", "Medium", "High"])),
            draw(st.integers(-9, 9)),
            names[2][0] if number and draw(st.booleans()) else None,
            title=draw(texts),
        )
        for number, name in enumerate(names[2])
    )
    people = st.builds(
        TeamFacts,
        st.lists(words, unique=True, min_size=1, max_size=2).map(tuple),
        st.lists(words, unique=True, max_size=2).map(tuple),
        volumes(),
    )
    return Document(
        chosen,
        draw(st.integers(1, 9)),
        tuple(pool for pool, _ in made_pools.values()),
        tuple(profile for profile, _ in made_profiles.values()),
        made_policies,
        {name: facts for name, (_, facts) in made_pools.items()},
        {name: facts for name, (_, facts) in made_profiles.items()},
        {name: draw(people) for name in names[2]},
    )


def attempt(text: str, sizes: dict[str, int] | None = None) -> tuple[Document | None, list[Issue]]:
    try:
        return policy.read_policy(text, sizes=sizes), []
    except PolicyInvalid as refused:
        return None, refused.issues


@given(documents())
@settings(max_examples=80, deadline=None)
def test_what_is_written_reads_back(document: Document) -> None:
    text = policy.write_policy(document)
    plenty = {pool.name: 10**6 for pool in document.pools}
    read, issues = attempt(text, plenty)
    if read is None:  # capacities and budgets may still be below the reservations
        assert all("are reserved" in issue.message for issue in issues), issues
    else:
        assert read == document
    assert policy.policy_diff(document, document) == []


@given(documents(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_scaling_the_text_is_scaling_the_document(document: Document, gpus: int) -> None:
    text = policy.write_policy(document)
    read, _ = attempt(text)
    if read is None:
        return
    sizes = {pool.name: gpus for pool in document.pools}
    rescaled = policy.rescale(read, sizes)
    assert policy.read_policy(policy.rescale_text(text, "policy.yaml", sizes)) == rescaled


@given(st.text(max_size=300) | st.binary(max_size=100).map(lambda b: b.decode("latin-1")))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    read, issues = attempt(text)
    assert bool(read) != bool(issues)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_mutation_is_read_or_refused(data: st.DataObject) -> None:
    text = policy.write_policy(data.draw(documents()))
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 20)))
    filling = st.sampled_from(["", "[", "{", "- ", ": ", "-1", "null", "\n", "  ", "'", "*a", "&a ", ".inf"])
    read, issues = attempt(text[:begin] + data.draw(filling) + text[end:])
    assert bool(read) != bool(issues)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or table in a document with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_is_read_or_refused_with_its_line(data: st.DataObject) -> None:
    tree = yaml.safe_load(SAMPLE.read_text("utf-8"))
    scalars = [None, True, -1, 0.5, 10**400, 1e300, "", "x", "2h", "9" * 400 + "Gi", "all", "None", "rnd", "{message}"]
    value = st.sampled_from([*scalars, [], {}, [[]], ["rnd", "rnd"], [{}], {"x": 1}, {"gpus": []}, {"name": None}])
    for _ in range(data.draw(st.integers(1, 3))):
        table, key = data.draw(st.sampled_from(list(places(tree))))
        table[key] = deepcopy(data.draw(value))  # a later round may change it
    text = data.draw(st.sampled_from([json.dumps(tree, indent=1), yaml.safe_dump(tree)]))
    read, issues = attempt(text)
    assert bool(read) != bool(issues)
    assert all(issue.line and issue.line <= text.count("\n") + 1 and issue.message for issue in issues)


def test_a_difference_is_described_in_sentences(sample: str) -> None:
    old = policy.read_policy(sample)
    text = sample.replace("reserved: 5, limit: 9", "reserved: 4.5", 1).replace(
        "victim_order: newest", "victim_order: cheapest"
    )
    text = text.replace("name: gpu8", "name: gpu4").replace("gpu8, ", "gpu4, ").replace("gpus: 8", "gpus: 4")
    text = text.replace("policies: [[rnd, devops]]", "policies: [devops, rnd]", 1).replace("grace: 30", "grace: 1m")
    volume = "{name: data, claim: teams, path: /data, sub_path: devops, read_only: true}"
    text = text.replace("groups: [devops]", f"groups: [devops, ops]\n    volumes: [{volume}]")
    assert policy.policy_diff(old, policy.read_policy(text)) == [
        "Settings: victim order newest → cheapest.",
        "Pool GPUs (gpu): rank of profiles gpu8, gpu3, gpu2, gpu1 → gpu4, gpu3, gpu2, gpu1.",
        "Profile 8 GPUs (gpu8) is removed.",
        "Profile 1 GPU (gpu1): teams, best rank first rnd = devops → devops, rnd.",
        "Profile 1 GPU (gpu1): grace 30 s → 1 min.",
        "Profile 8 GPUs (gpu4) is new.",
        "Team R&D (rnd): reserved in gpu 5 GPUs → 4.5 GPUs.",
        "Team R&D (rnd): limit in gpu 9 GPUs → none.",
        "Team DevOps (devops): groups devops → devops, ops.",
        "Team DevOps (devops): volumes none → data (teams/devops at /data, read-only).",
    ]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [("1h", "90m", "1 h → 1 h 30 min"), ("2d", "172801", "172800 s → 172801 s"), ("0.25", "0.3", "0.2 s → 0.3 s")],
)
def test_durations_that_differ_are_shown_to_differ(sample: str, old: str, new: str, shown: str) -> None:
    before, after = (
        policy.read_policy(sample.replace("victim_order: newest", f"yields_after: {span}")) for span in (old, new)
    )
    assert policy.policy_diff(before, after) == [f"Settings: yields after {shown}."]


@given(documents(), documents())
@settings(max_examples=30, deadline=None)
def test_any_two_documents_have_a_difference_in_sentences(old: Document, new: Document) -> None:
    for before, after in ((old, new), (new, old)):
        assert bool(policy.policy_diff(before, after)) == (before != after)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_quota_lines_that_come_go_and_change_are_described(data: st.DataObject) -> None:
    document = data.draw(documents())
    names = [pool.name for pool in document.pools]
    team = data.draw(st.sampled_from(document.policies))
    changed = replace(team, quotas=tuple(data.draw(st.lists(lines(names), max_size=4))))
    new = replace(document, policies=tuple(changed if one is team else one for one in document.policies))
    for before, after in ((document, new), (new, document)):
        sentences = policy.policy_diff(before, after)
        assert bool(sentences) == (before != after)


def test_a_second_kind_of_node_is_described(sample: str) -> None:
    line = "- {pools: [gpu], reserved: 5, limit: 9}"
    more = sample.replace(line, f"- {{reserved: 1, lend: 0}}\n      {line}", 1)
    old, new = policy.read_policy(sample), policy.read_policy(more, sizes={"gpu": 99})
    team = f"{old.policies[0].title} ({old.policies[0].name})"
    assert policy.policy_diff(old, new) == [
        f"Team {team}: a quota is new: reserved 1 GPU, limit none, lent at most 0 GPUs."
    ]
    assert policy.policy_diff(new, old) == [f"Team {team}: the quota is removed."]


@pytest.mark.parametrize(("old", "new"), [("", "none"), ("none", ""), ("", " on")])
def test_a_text_that_reads_like_none_is_told_apart(document: Document, old: str, new: str) -> None:
    before, after = (
        replace(document, pool_facts={"gpu": replace(document.pool_facts["gpu"], title=title)}) for title in (old, new)
    )
    (sentence,) = policy.policy_diff(before, after)
    told = sentence.partition("title ")[2].rstrip(".").split(" → ")
    assert told[0] != told[1]


def test_a_new_order_is_described(document: Document) -> None:
    turned = policy.read_policy(policy.write_policy(document))
    assert policy.policy_diff(document, turned) == []
    swapped = replace(turned, policies=turned.policies[::-1])
    assert policy.policy_diff(document, swapped) == ["The order of the policies is now devops, rnd."]


@pytest.mark.parametrize("sizes", [{}, {"gpu": 10}, {"elsewhere": 1}])
def test_a_document_that_fits_is_left_alone(document: Document, sizes: dict[str, int]) -> None:
    assert policy.rescale(document, sizes) is document
