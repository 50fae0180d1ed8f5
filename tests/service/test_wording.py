"""Wording: amounts, and a sentence for every fact that the engine may state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from makeway_quota import engine
from makeway_quota.control.machines import machine_offers, machine_reasons
from makeway_quota.engine.plan import Fact
from makeway_quota.services.machines.machines import event_model
from makeway_quota.store.machines.log import MachineLogEvent
from makeway_quota.wording import Names, count, duration, gpus, names, outcomes, sentence
from makeway_quota.wording.machines import deployment_activity
from makeway_quota.wording.sentences import SENTENCES, WITH_VICTIMS


def test_half_a_gpu_is_written_in_one_way() -> None:
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
def test_a_duration_is_written_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("machines", "doing", "told"),
    [
        (3, {"deleting": True}, "Being deleted: 3 machines end first.{}"),
        (1, {"paused": True}, "Paused: nothing is launched, and 1 machine is being ended.{}"),
        (1, {"paused": True, "deleting": True}, "Being deleted: 1 machine ends first.{}"),
        (0, {"deleting": True}, "Being deleted: it has no machines any more."),
        (0, {"paused": True}, "Paused: nothing is launched."),
        (3, {}, "Nothing is launched: the service cannot use its provider, and tries again."),
    ],
)
def test_a_provider_that_cannot_be_used_hides_neither_a_pause_nor_a_deletion(
    machines: int, doing: dict[str, bool], told: str
) -> None:
    state = {"paused": False, "deleting": False} | doing
    held_up = " The service cannot use its provider, which may hold that up, and tries again."
    assert deployment_activity(machines, **state, unusable=True) == told.format(held_up)


def test_lists_end_with_and() -> None:
    assert names(["a"]) == "a"
    assert names(["a", "b", "c"]) == "a, b and c"
    assert names(list("abcdefg")) == "a, b, c, d, e and 2 more"
    assert names([]) == ""
    assert (count(1, "job"), count(2, "job")) == ("1 job", "2 jobs")


def engine_facts() -> set[str]:
    """Every code of a Fact in the source of the engine, and of the reasons that say what comes of machines."""
    result: set[str] = set()
    for file in (
        *Path(engine.__file__).parent.rglob("*.py"),
        *(Path(one.__file__) for one in (machine_reasons, machine_offers)),
    ):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fact":
                result |= {n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and n.value}
                if isinstance(node.args[0], ast.Name):
                    result |= _assigned(tree, node.args[0].id)
    return result


def _assigned(tree: ast.AST, name: str) -> set[str]:
    """The strings that a variable of this name may get."""
    return {
        item.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        for branch in _results(node.value)
        for item in ast.walk(branch)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
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


def test_like_victims_of_another_team_are_counted() -> None:
    victims = [("j-1", "job", 1.0), ("j-2", "job", 1.0), ("j-3", "job", 2.0), ("s-1", "session", 1.0)]
    facts = [Fact("ready_after_reclaim", {"within": 30.0, "moved": 0, "shrunk": 0})]
    facts += [
        Fact("by_victim", {"team": "rnd", "kind": kind, "victim": id, "owner": "ana", "gpus": size})
        for id, kind, size in victims
    ]
    told = sentence(facts, Names(team=lambda _: "R&D", reader="devops"))
    mine = sentence(facts[:3], Names(workload=lambda _: "fit", reader="rnd"))
    assert told == (
        "Ready in 30 s or less: 2 of R&D's jobs (1 GPU each), R&D's job (2 GPUs) and R&D's notebook (1 GPU) make way."
    )
    assert mine == "Ready in 30 s or less: rnd's job fit of ana (1 GPU) and rnd's job fit of ana (1 GPU) make way."


def test_names_replace_ids() -> None:
    fact = Fact("limit", {"team": "rnd", "uses": 9, "limit": 9, "kind": "job", "needs": 3, "workers": 1, "each": 3})
    assert sentence((fact,)) == "rnd uses 9 of its limit of 9 GPUs; this job needs 3."
    names = Names(team={"rnd": "R&D"}.__getitem__)
    assert sentence((fact,), names) == "R&D uses 9 of its limit of 9 GPUs; this job needs 3."


def test_verbs_agree_with_amounts() -> None:
    values = {"free": 0.5, "total": 8, "pool": "p", "kind": "job", "needs": 1, "workers": 1, "each": 1}
    assert sentence((Fact("no_free_gpus", values),)) == "0.5 of the 8 GPUs of pool p is free; this job needs 1."
    assert "0 of the 8 GPUs of pool p are free" in sentence((Fact("no_free_gpus", values | {"free": 0}),))


def test_the_sentence_about_the_end_of_a_job_names_it_the_preemptor_and_what_is_saved() -> None:
    job = outcomes.job_of("train", "ana")
    saved, unsaved = outcomes.SavedWork(True, 21, 3.0), outcomes.SavedWork(False, None, 90.0)
    by = outcomes.preemptor("bo", "DevOps")
    goes_on = "It waits for GPUs again and goes on from there."
    assert outcomes.made_way(job, by, saved) == f"“train” of ana made way for bo (DevOps); saved at step 21. {goes_on}"
    crash = outcomes.made_way(job, by, saved, "exit code 1 after the notice: ValueError: x")
    assert crash == (
        "“train” of ana had to make way for bo (DevOps) and failed: exit code 1 after the notice: ValueError: x; "
        f"saved at step 21, 3 s of work since then is lost. {goes_on}"
    )
    ends = outcomes.SavedWork(True, 21, 3600.0, durable=False)
    beginning = "Its checkpoint was not kept, so it starts from the beginning when it gets GPUs again."
    assert outcomes.made_way(job, by, ends).endswith(f"; saved at step 21, 1 h of work is lost. {beginning}")
    assert outcomes.killed_at_deadline(job, 30, ends).endswith(f"; saved at step 21, 1 h of work is lost. {beginning}")
    assert outcomes.killed_at_deadline(job, 30, unsaved) == (
        "“train” of ana did not leave within 30 s and was killed; no checkpoint, lost 1 min 30 s of work. "
        "It waits for GPUs again and starts from the beginning."
    )
    assert outcomes.lost(job, ["n1"], "its pod was deleted by others.", saved) == (
        "“train” of ana was lost on n1: its pod was deleted by others; saved at step 21, "
        f"3 s of work since then is lost. {goes_on}"
    )
    assert outcomes.lost_for_good(job, ["n1"], "its node n1 is down", 4) == (
        "“train” of ana was lost 4 times and is not tried again; the last time on n1: its node n1 is down."
    )
    assert outcomes.succeeded(job, 61, 500) == "“train” of ana succeeded after 1 min 1 s; 0.5 GPU is free again."
    assert outcomes.cancelled(job, 0).endswith("its CPU and memory are free again.")
    assert outcomes.failed_and_retried(job, "exit code 3", 1).endswith(
        "(exit code 3) and is tried again, 1 more try left."
    )


def test_the_sentence_about_the_end_of_a_session_names_the_gpus_that_it_frees() -> None:
    assert outcomes.session_ended("ana", "released", (3, 4), "n1") == (
        "ana's notebook ended (released); GPUs 3 and 4 of n1 are free again."
    )
    assert outcomes.session_ended("ana", "Its pod was evicted (low\non disk). ", (), None) == (
        "ana's notebook ended (its pod was evicted (low on disk))."
    )
    assert outcomes.session_runs("ana", (), None) == "ana's notebook runs."
    assert outcomes.lease_expired("ana", 90, True, 2000) == (
        "The lease of ana's notebook was not renewed for 1 min 30 s and the Hub has no such server; "
        "2 GPUs are free again."
    )


def test_cpu_and_memory_have_numbers() -> None:
    request = {"kind": "job", "needs": 2, "workers": 1, "each": 2, "cpu": 8, "memory": 65536}
    values = {**request, "pool": "p", "free": 4, "total": 8, "most_on_a_node": 4}
    message = sentence((Fact("no_cpu_or_memory", values),))
    assert (
        message
        == "4 GPUs of pool p are free, but on no node together with 8 cores and 64 GiB of memory; this job needs 2."
    )
    message = sentence((Fact("no_free_gpus", values | {"needs": 0, "each": 0, "free": 0, "cpu": 1}),))
    assert message == "No node of pool p has enough CPU and memory free; this job needs 1 core and 64 GiB of memory."


@pytest.mark.parametrize(
    ("machines", "booting", "ready", "expected"),
    [
        (1, 1, 0, "a machine: booting for longer than most do"),
        (1, 0, 0, "a machine: being launched, later than usual"),
        (3, 1, 1, "3 machines: 1 of 3 booting for longer than most do, 1 ready"),
        (2, 0, 1, "2 machines: 0 of 2 booting, 1 ready, later than usual"),
    ],
)
def test_machines_that_are_late_are_said_to_be_so(machines: int, booting: int, ready: int, expected: str) -> None:
    values = {"machines": machines, "booting": booting, "ready": ready, "late": True}
    values |= {"deployment": "cloud", "all_machines": 3, "limit": 3}
    assert sentence((Fact("machine_coming", values),)) == f"Waiting for {expected}. cloud has 3 of at most 3 machines."


@pytest.mark.parametrize(
    ("state", "reason", "facts", "message"),
    [
        ("joining", "joined", "instance i-7", "Its agent has joined, and runs the init script (instance i-7)."),
        ("failed", "stock_out", "g2, a, spot", "The provider has no such machine now (g2, a, spot)."),
        ("requested", "", "g2, any zone, on demand", "g2, any zone, on demand"),
        ("gone", "idle", "", "It had no work for the whole of idle_timeout."),
        ("", "throttled", "AWS: no.", "The provider takes no more calls for now. AWS: no."),
    ],
)
def test_a_line_of_a_machines_history_is_one_sentence_with_its_facts(
    state: str, reason: str, facts: str, message: str
) -> None:
    assert event_model(MachineLogEvent(1, 0.0, "demo", "m-1", state, reason, facts)).message == message
