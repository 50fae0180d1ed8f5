"""Wording: amounts, and a sentence for every fact that the engine may state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from makeway_quota import engine
from makeway_quota.engine.plan import Fact
from makeway_quota.wording import Names, count, duration, gpus, names, sentence
from makeway_quota.wording.sentences import SENTENCES, WITH_VICTIMS


def test_half_a_gpu_is_said_in_one_way_everywhere() -> None:
    assert [gpus(milli) for milli in (0, 500, 1000, 1500)] == ["0 GPUs", "0.5 GPU", "1 GPU", "1.5 GPUs"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "0 s"),
        (0.3, "0.3 s"),
        (45, "45 s"),
        (90, "1 min 30 s"),
        (240, "4 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
        (259_200, "3 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_lists_end_with_and() -> None:
    assert names(["a"]) == "a"
    assert names(["a", "b", "c"]) == "a, b and c"
    assert names(list("abcdefg")) == "a, b, c, d, e and 2 more"
    assert names([]) == ""
    assert (count(1, "job"), count(2, "job")) == ("1 job", "2 jobs")


def engine_facts() -> set[str]:
    """Every code of a Fact in the engine's source."""
    found: set[str] = set()
    for file in Path(engine.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fact":
                found |= {n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and n.value}
                if isinstance(node.args[0], ast.Name):
                    found |= _assigned(tree, node.args[0].id)
    return found


def _assigned(tree: ast.AST, name: str) -> set[str]:
    """The strings that a variable of this name may get."""
    return {
        each.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        for branch in _results(node.value)
        for each in ast.walk(branch)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def _results(value: ast.expr) -> list[ast.expr]:
    """The expressions that an assignment may yield: not the conditions between them."""
    return [*_results(value.body), *_results(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def test_every_fact_of_the_engine_has_a_sentence() -> None:
    codes = engine_facts()
    known = SENTENCES.keys() | WITH_VICTIMS.keys() | {"by_victim"}
    assert len(codes) > 40
    assert not codes - known, "facts without a sentence"
    rules = {"reclaim", "reclaim_own_policy", "reclaim_fair_share", "preempt_in_team", "reclaim_own_limit"}
    assert not known - codes - rules, "sentences that no fact asks for"


def test_names_replace_ids() -> None:
    fact = Fact("limit", {"team": "rnd", "uses": 9, "limit": 9, "kind": "job", "needs": 3, "workers": 1, "each": 3})
    assert sentence((fact,)) == "rnd uses 9 of its limit of 9 GPUs; this job needs 3."
    names = Names(team={"rnd": "R&D"}.__getitem__)
    assert sentence((fact,), names) == "R&D uses 9 of its limit of 9 GPUs; this job needs 3."


def test_verbs_agree_with_amounts() -> None:
    values = {"free": 0.5, "total": 8, "pool": "p", "kind": "job", "needs": 1, "workers": 1, "each": 1}
    assert sentence((Fact("no_free_gpus", values),)) == "0.5 of the 8 GPUs of pool p is free; this job needs 1."
    assert "0 of the 8 GPUs of pool p are free" in sentence((Fact("no_free_gpus", values | {"free": 0}),))
