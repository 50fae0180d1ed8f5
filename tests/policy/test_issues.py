"""Every issue is reported with file, line, place and what to do, and all at once."""

from __future__ import annotations

import re
import time

import pytest
from makeway_quota import policy
from makeway_quota.policy import PolicyInvalid


@pytest.mark.covers("F08")
@pytest.mark.parametrize(
    ("old", "new", "line", "where", "message"),
    [
        ("title: R&D", "titel: R&D", 11, "policies[0].titel", 'did you mean "title"'),
        ("gpus: 1", "gpus: -1", 6, "profiles[0].gpus", "-1 is too small; the least is 0 GPUs"),
        ("gpus: 1", "gpus: .nan", 6, "profiles[0].gpus", "not a finite number"),
        ("gpus: 1", "gpus: 1e300", 6, "profiles[0].gpus", "too large; the most is 1,000,000 GPUs"),
        ("gpus: 1", "gpus: 99999999999999999999999", 6, "profiles[0].gpus", "expected a number|too large"),
        ("gpus: 1", "gpus: true", 6, "profiles[0].gpus", "expected a number of GPUs"),
        ("gpus: 1", "gpus: one", 6, "profiles[0].gpus", 'this is "one", expected a number'),
        ("gpus: 1", "gpus: 0.0001", 6, "profiles[0].gpus", "finer than a thousandth"),
        ("gpus: 1", "gpus: 2.5", 6, "profiles[0].gpus", "part of one GPU .less than 1. or whole ones"),
        ("gpus: 1", "title: x", 5, "profiles[0].gpus", "the number of GPUs is missing"),
        ("pools: [gpu]", "pools: [gpv]", 7, "profiles[0].pools", 'there is no pool "gpv"; did you mean "gpu"'),
        ("pools: [gpu]", "pools: []", 7, "profiles[0].pools", "no pool is named"),
        ("pools: [gpu]", "pools: gpu", 7, "profiles[0].pools", r"expected a list, such as \[gpu\]"),
        ("[rnd, devops]", "[rnd, devop]", 8, "profiles[0].policies", 'did you mean "devops"'),
        ("[rnd, devops]", "[rnd, [devops, rnd]]", 8, "profiles[0].policies[1][1]", '"rnd" is listed twice'),
        ("[rnd, devops]", "[[[rnd]]]", 8, "profiles[0].policies[0][0]", "this is a list, expected a name"),
        ("[rnd, devops]", "[rnd]\n    kinds: [jobs]", 9, "profiles[0].kinds", "session, job or both"),
        ("[rnd, devops]", "[rnd]\n    kinds: []", 9, "profiles[0].kinds", "for nothing"),
        (
            "[rnd, devops]",
            "[rnd]\n    pod: {spec: {runtimeClassName: nvidia}}\n    kinds: [session]",
            9,
            "profiles[0].pod",
            "hub.config.KubeSpawner",
        ),
        (
            "[rnd, devops]",
            "[rnd]\n    kinds: [session]\n    time_limit: 1h",
            10,
            "profiles[0].time_limit",
            "only jobs have",
        ),
        (
            "[rnd, devops]",
            "[rnd]\n    workers: 3\n    max_workers: 2",
            10,
            "profiles[0].max_workers",
            "less than the 3",
        ),
        ("[rnd, devops]", "[rnd]\n    signal: SIGKILL", 9, "profiles[0].signal", "SIGTERM, SIGINT"),
        ("[rnd, devops]", "[rnd]\n    grace: -1s", 9, "profiles[0].grace", "expected a number of seconds"),
        ("[rnd, devops]", "[rnd]\n    grace: 99d", 9, "profiles[0].grace", "too long"),
        ("[rnd, devops]", "[rnd]\n    memory: 64GB", 9, "profiles[0].memory", "64Gi"),
        ("[rnd, devops]", f"[rnd]\n    memory: {'9' * 400}Gi", 9, "profiles[0].memory", "too large; the most is"),
        ("[rnd, devops]", f"[rnd]\n    cpu: {'9' * 5000}", 9, "profiles[0].cpu", "not a finite number|too large"),
        ("[rnd, devops]", "[rnd]\n    workers: 1.5", 9, "profiles[0].workers", "whole number"),
        ("[rnd, devops]", "[rnd]\n    min_workers: 2", 9, "profiles[0].min_workers", "more than the 1 workers"),
        ("[rnd, devops]", "[rnd]\n    env: {1A: x}", 9, "profiles[0].env", "not the name of a variable"),
        ("[rnd, devops]", "[rnd]\n    env: {MAKEWAY_X: x}", 9, "profiles[0].env", "set by Makeway itself"),
        ("[rnd, devops]", "[rnd]\n    env: {A: [1]}", 9, "profiles[0].env.A", "expected a text"),
        ("[rnd, devops]", "[rnd]\n    env: [A]", 9, "profiles[0].env", "expected a table"),
        ("[rnd, devops]", "[rnd]\n    images: [{name: lab}]", 9, "profiles[0].images[0].image", "image is missing"),
        ("[rnd, devops]", "[rnd]\n    images: [lab]", 9, "profiles[0].images[0]", "a table with the keys name"),
        (
            "[rnd, devops]",
            "[rnd]\n    images: [{name: lab, image: a}, {name: lab, image: b}]",
            9,
            "profiles[0].images[1]",
            '"lab" is listed twice',
        ),
        (
            "[rnd, devops]",
            "[rnd]\n    images: [{name: a, image: a, default: true}, {name: b, image: b, default: true}]",
            9,
            "profiles[0].images[1].default",
            '"a" is the default already',
        ),
        (
            "[rnd, devops]",
            "[rnd]\n    image: c\n    images: [{name: a, image: a}]",
            10,
            "profiles[0].images",
            "has image and images; keep one",
        ),
        ("name: gpu1", "name: GPU 1", 5, "profiles[0].name", "small letters, digits"),
        ("name: gpu1", "name: ''", 5, "profiles[0].name", "small letters|missing"),
        ("name: gpu1", "title: x", 5, "profiles[0].name", "the name is missing"),
        ("name: gpu1", f"name: {'a' * 64}", 5, "profiles[0].name", "at most 63"),
        ("groups: [rnd]", "groups: []", 12, "policies[0].groups", "the list is empty"),
        ("groups: [rnd]", "groups: ['']", 12, "policies[0].groups[0]", "expected a name"),
        ("groups: [rnd]", "weight: Medium", 10, "policies[0].groups", "this team has no members"),
        ("groups: [rnd]", "groups: [rnd]\n    weight: Hihg", 13, "policies[0].weight", 'did you mean "High"'),
        ("groups: [rnd]", "groups: [rnd]\n    parent: rnd", 13, "policies[0].parent", "circle: rnd → rnd"),
        ("groups: [rnd]", "groups: [rnd]\n    parent: dev", 13, "policies[0].parent", 'no policy "dev"'),
        ("groups: [rnd]", "groups: [rnd]\n    priority: high", 13, "policies[0].priority", "expected a number"),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, path: /data}]",
            13,
            "policies[0].volumes[0].claim",
            "claim is missing",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: A b, claim: data, path: /data}]",
            13,
            "policies[0].volumes[0].name",
            "not the name of a volume",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, claim: ../x, path: /data}]",
            13,
            "policies[0].volumes[0].claim",
            "not the name of a PersistentVolumeClaim",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, claim: data, path: data}]",
            13,
            "policies[0].volumes[0].path",
            "no absolute path of a folder",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, claim: data, path: /makeway/launcher}]",
            13,
            "policies[0].volumes[0].path",
            "/makeway is not for volumes",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, claim: data, path: /data, sub_path: ../other}]",
            13,
            "policies[0].volumes[0].sub_path",
            "leads out of the volume",
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: data, claim: data, path: /data, subPath: x}]",
            13,
            "policies[0].volumes[0].subPath",
            'did you mean "sub_path"',
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: a, claim: a, path: /a}, {name: a, claim: b, path: /b}]",
            13,
            "policies[0].volumes[1]",
            '"a" is listed twice',
        ),
        (
            "groups: [rnd]",
            "groups: [rnd]\n    volumes: [{name: a, claim: a, path: /a}, {name: b, claim: b, path: /a/}]",
            13,
            "policies[0].volumes[1]",
            '"/a" is listed twice',
        ),
        ("title: R&D", f"title: {'x' * 201}", 11, "policies[0].title", "201 characters, 200 are allowed"),
        ("size: 10", "size: 10\n  - name: gpu", 4, "pools[1].name", "used twice in pools .first on line 2."),
        ("size: 10", "size: 10\n    nodes: {local: {gpus: [0, -1]}}", 4, "pools[0].nodes.local.gpus[1]", "from 0"),
        ("size: 10", "size: 10\n    nodes: {local: {gpus: [1024]}}", 4, "pools[0].nodes.local.gpus[0]", "from 0"),
        ("size: 10", "size: 10\n    profiles: [gpu2]", 4, "pools[0].profiles", 'no profile "gpu2"'),
        ("size: 10", "size: 10\n    max_nodes: 2", 4, "pools[0].max_nodes", "kind: autoscaled"),
        ("size: 10", "size: 10\n    consolidation: yes", 4, "pools[0].consolidation", "expected true or false"),
        ("size: 10", "size: 10\n    size: 11", 4, "", "comes twice .first on line 3."),
        ("size: 10", "size: 10\n    kind: cloud", 4, "pools[0].kind", "static, autoscaled"),
        ("size: 10", "size: 9", 17, "policies[1].quotas[0].reserved", "10 GPUs are reserved .* there are 9 GPUs"),
        ("size: 10", "capacity: 8", 17, "policies[1].quotas[0].reserved", "there are 8 GPUs; reserve less"),
        ("pools:\n", "settings: {victim_order: oldest}\npools:\n", 1, "settings.victim_order", "newest, cheapest"),
        ("pools:\n", "version: 2\npools:\n", 1, "version", "reads version 1"),
    ],
)
def test_one_mistake_is_reported_where_it_is(issues, good, old, new, line, where, message) -> None:
    text = good((old, new)) if old != "pools:\n" else new + good().removeprefix(old)
    result = issues(text, file="my policy.yaml")
    assert len(result) == 1, result
    assert (result[0].file, result[0].line, result[0].where) == ("my policy.yaml", line, where)
    assert re.search(message, result[0].message), result[0].message


@pytest.mark.parametrize(
    ("quota", "key", "message"),
    [
        ("{reserved: 5, limit: 4}", "reserved", "5 GPUs are reserved, but the limit is 4 GPUs"),
        ("{reserved: 1, lend: 2}", "lend", "2 GPUs cannot be lent of a reservation of 1 GPU"),
        ("{reserved: 1, limit: -1}", "limit", "too small"),
        ("{reserved: 1, pools: [cpu]}", "pools", 'there is no pool "cpu"'),
        ("{reservd: 1}", "reservd", 'did you mean "reserved"'),
        ("3", None, "expected a table with the keys pools, reserved, limit, lend"),
    ],
)
def test_a_wrong_quota_line_is_named(issues, good, quota: str, key: str | None, message: str) -> None:
    text = good(
        ("title: R&D", f"title: R&D\n    users: [ana]\n    weight: Low\n    priority: 1\n    quotas: [{quota}]")
    )
    text = text.replace("    groups: [rnd]\n    quotas: [{reserved: 5, limit: 9}]\n", "")
    (issue,) = issues(text)
    assert issue.line == 15
    assert issue.where == "policies[0].quotas[0]" + (f".{key}" if key else "")
    assert message in issue.message


def test_everything_is_reported_at_once_in_the_order_of_the_lines(issues, good) -> None:
    text = good(("size: 10", "sise: 10"), ("gpus: 1", "gpus: x"), ("name: devops", "name: Dev Ops"))
    result = issues(text)
    assert [issue.line for issue in result] == [3, 6, 8, 14]
    assert str(result[0]).startswith("policy.yaml:3: pools[0].sise: ")
    many = issues("pools: []\nprofiles: []\npolicies:\n" + "  - {name: 'A B'}\n" * 500)
    assert len(many) == 101
    assert "more" in many[-1].message


def test_two_pools_are_counted_together_and_apart(issues) -> None:
    text = """
pools: [{name: a, size: 4}, {name: b, size: 4}]
profiles: []
policies:
  - {name: one, users: [x], quotas: [{pools: [a], reserved: 3}, {reserved: 3}]}
  - {name: two, users: [y], quotas: [{pools: [b], reserved: 3}]}
"""
    (issue,) = issues(text)
    assert (issue.where, issue.line) == ("policies[1].quotas[0].reserved", 6)
    assert "9 GPUs are reserved in pools a, b (one 6 GPUs, two 3 GPUs), but there are 8 GPUs" in issue.message
    assert policy.read_policy(text, sizes={"a": 4, "b": 5})
    assert issues(text, sizes={"a": 2, "b": 9})[0].where == "policies[0].quotas[0].reserved"


def test_children_count_within_their_department(issues) -> None:
    text = """
pools: [{name: a, size: 8}]
profiles: []
policies:
  - {name: department, quotas: [{reserved: 6}]}
  - {name: one, users: [x], parent: department, quotas: [{reserved: 3}]}
  - {name: two, users: [y], parent: department, quotas: [{reserved: 3}]}
  - {name: other, users: [z], quotas: [{reserved: 2}]}
"""
    assert policy.read_policy(text)
    assert "9 GPUs" in issues(text.replace("reserved: 2", "reserved: 3"))[0].message


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "the document is empty"),
        ("# nothing\n", None, "the document is empty"),
        ("a: [1\nb: 2", 2, "this is not YAML"),
        ("a:\n\t- 1", 2, "not YAML.*tab"),
        ("a: 1\n---\nb: 2", 2, "a second document begins here"),
        ("a: &x 1\nb: *x", 2, "aliases .* write the values out"),
        ("a: !!python/object/apply:os.system [id]", 1, "tags .* are not used here"),
        ("a: !x 1", 1, "tags"),
        ("? [1]\n: 2", 1, "cannot be a key"),
        ("a\x00b: 1", 1, "U.0000"),
        ("a: 1\nb: \ud800", 2, "U.D800"),
        ("[" * 100_000, 1, "nested more than 20 deep"),
        ("{a: " * 50, 1, "nested more than 20 deep"),
        ("x" * 1_000_001, None, "larger than 1 MB"),
        ("é" * 600_000, None, "larger than 1 MB"),
        ("[]", 1, "this is a list, expected a table with the keys version, settings, pools"),
        ("hello", 1, 'this is "hello", expected a table'),
    ],
)
def test_what_is_no_policy_at_all_is_reported_in_one_line(issues, text: str, line: int | None, message: str) -> None:
    (issue,) = issues(text)
    assert issue.line == line
    assert re.search(message, issue.message), issue.message
    assert "\n" not in issue.message


def test_missing_lists_are_named(issues) -> None:
    assert [issue.where for issue in issues("version: 1")] == ["policies", "pools", "profiles"]
    assert policy.read_policy("pools: []\nprofiles: []\npolicies: []").pools == ()


def test_a_bomb_does_not_go_off(issues) -> None:
    laughs = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    laughs += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    began = time.process_time()
    assert "aliases" in issues("\n".join(laughs))[0].message
    assert "aliases" in issues("a: &a\n  b: *a")[0].message
    assert issues("[" * 999_999)
    assert issues("pools: [" + "{name: x, nmae: y}," * 50_000 + "]")
    assert len(issues("".join(f"k{n}: 1\n" for n in range(80_000)))) == 101
    chain = ", ".join(f"{{name: t{n}, users: [x], parent: t{n + 1}}}" for n in range(2_000))
    result = issues(f"pools: []\nprofiles: []\npolicies: [{chain}, {{name: t2000, users: [x]}}]")
    assert "more than 20 policies are above this one; nest fewer" in result[0].message
    assert time.process_time() - began < 100  # a bomb that went off would take years


@pytest.mark.parametrize(
    "name", ["no", "yes", "on", "off", "y", "true", "null", "1", "1e3", "0x10", "12", "0.5", "010"]
)
def test_names_are_texts_whatever_yaml_thinks(name: str) -> None:
    for written in (name, f"'{name}'"):
        document = policy.read_policy(
            f"pools: [{{name: {written}}}]\n"
            f"profiles: [{{name: {written}, gpus: 1, pools: [{written}], policies: [{written}], title: {written}}}]\n"
            f"policies: [{{name: {written}, groups: [{written}], title: {written}}}]\n"
            if name != "null" or written != name
            else "pools: []\nprofiles: []\npolicies: []"
        )
        if document.policies:
            assert document.policies[0].name == document.policies[0].title == document.profiles[0].name == name
            assert document.teams_of("x", [name]) == (name,)
            assert policy.read_policy(policy.write_policy(document)) == document


def test_quantities_can_carry_units(good) -> None:
    given = ("grace: 2m", "time_limit: 1.5h", "memory: 2Gi", "cpu: 0.5", "min_runtime: 90", "env: {N: 4, T: true}")
    extra = "\n    ".join(["[rnd]", *given])
    document = policy.read_policy(good(("[rnd, devops]", extra), ("gpus: 1", "gpus: 0.25")))
    (profile,) = document.profiles
    assert (profile.gpus, profile.grace, profile.time_limit, profile.memory, profile.cpu, profile.min_runtime) == (
        250,
        120.0,
        5400.0,
        2048,
        500,
        90.0,
    )
    assert document.profile_facts["gpu1"].env == {"N": "4", "T": "true"}


def test_the_error_is_one_text_for_the_terminal(good) -> None:
    with pytest.raises(PolicyInvalid, match=r"^policy.yaml:6: profiles\[0\].gpus: -1 is too small"):
        policy.read_policy(good(("gpus: 1", "gpus: -1")))


DEPARTMENT = """\
pools: [{{name: p, size: 16}}, {{name: q, size: 16}}]
profiles: []
policies:
  - {{name: dep, quotas: [{dep}]}}
  - {{name: a, parent: dep, groups: [a], quotas: [{a}]}}
  - {{name: b, parent: {above}, groups: [b], quotas: [{b}]}}
"""


@pytest.mark.covers("F08")
@pytest.mark.parametrize(
    ("dep", "a", "b", "above", "line", "place"),
    [
        ("{pools: [p], limit: 3}", "{pools: [p], reserved: 4}", "", "dep", 5, "policies[1].quotas[0].reserved"),
        ("{limit: 3}", "{pools: [p], reserved: 4}", "", "dep", 5, "policies[1].quotas[0].reserved"),
        ("{limit: 3}", "", "{reserved: 4}", "a", 5, "policies[1]"),
        ("{limit: 3}", "{reserved: 2}", "{reserved: 2}", "dep", 6, "policies[2].quotas[0].reserved"),
        ("{limit: 3}, {pools: [p], reserved: 4}", "", "", "dep", 4, "policies[0].quotas[1].reserved"),
        ("{limit: 3}", "{pools: [p], reserved: 2}, {pools: [q], reserved: 2}", "", "dep", 5, "policies[1].quotas[0]"),
    ],
)
def test_no_more_is_reserved_than_a_limit_above_lets_run(issues, dep, a, b, above, line, place) -> None:
    text = DEPARTMENT.format(dep=dep, a=a, b=b, above=above)
    (issue,) = issues(text)
    assert (issue.line, issue.where.startswith(place)) == (line, True)
    assert "the limit of" in issue.message
    assert "3 GPUs" in issue.message
    assert policy.read_policy(text, stored=True).policy("a") is not None


@pytest.mark.parametrize(
    ("dep", "a", "b", "above"),
    [
        ("{limit: 4}", "{reserved: 2}", "{reserved: 2}", "dep"),
        ("{limit: 4}", "{reserved: 4}", "{reserved: 4}", "a"),
        ("{pools: [p], limit: 3}", "{pools: [q], reserved: 8}", "", "dep"),
        ("{pools: [p], limit: 3}", "{reserved: 8}", "", "dep"),
        ("{limit: 4}", "{reserved: 4}, {pools: [p], reserved: 4}", "", "dep"),
        ("{limit: 0}", "", "", "dep"),
        ("{reserved: 2}", "{reserved: 2}", "", "dep"),
    ],
)
def test_reservations_that_a_limit_above_lets_run_are_valid(dep, a, b, above) -> None:
    assert policy.read_policy(DEPARTMENT.format(dep=dep, a=a, b=b, above=above)).policy("a") is not None


@pytest.mark.parametrize("part", ["pod: {spec: {runtimeClassName: nvidia}}", "time_limit: 1h"])
def test_what_an_earlier_release_took_is_still_read_where_it_has_no_effect(part: str) -> None:
    text = (
        "{version: 1, pools: [{name: gpu}], policies: [], profiles: "
        f"[{{name: lab, gpus: 1, kinds: [session], {part}}}]}}"
    )
    with pytest.raises(PolicyInvalid):
        policy.read_policy(text)
    assert policy.read_policy(text, stored=True).profile("lab") is not None
    with pytest.raises(PolicyInvalid):
        policy.read_policy(text.replace("[{name: gpu}]", "[{name: gpu}, {name: gpu}]"), stored=True)


IMAGES = """
version: 1
pools: [{name: gpu}]
profiles: [{name: lab, gpus: 0, pools: [gpu], policies: [[a]], %s}]
policies: [{name: a, groups: [a]}]
"""


@pytest.mark.parametrize("key", ["image: '%s'", "images: [{name: x, image: '%s'}]"])
@pytest.mark.parametrize(
    "name", ["registry.example/Team/Torch:2", "Torch", "a b", "torch:", "torch:2:3", "/torch", "torch@sha256:1", "a//b"]
)
def test_a_name_that_no_image_can_have_is_refused_and_taken_of_a_stored_document(key: str, name: str) -> None:
    text = IMAGES % (key % name)
    with pytest.raises(policy.PolicyInvalid, match="is no name of an image"):
        policy.read_policy(text)
    assert policy.read_policy(text, stored=True).profile("lab") is not None


@pytest.mark.parametrize(
    "name",
    ["torch", "torch:2.9-CUDA", "Registry.Example:5000/a/b__c-d.e:1", f"quay.io/x/y:1@sha256:{'0' * 64}", "a/b---c"],
)
def test_a_name_that_an_image_can_have_is_taken(name: str) -> None:
    assert policy.read_policy(IMAGES % f"image: '{name}'").profile("lab") is not None
