"""Trainings as people write them compute the same to the last bit, however often they make way.

Each training runs undisturbed and with notices, one an attempt, at given moments: one in `make test`, ten and more in
`make test-frameworks`, which sets NOTICES and runs the tests marked `long`, too. What these train is trained by other
tests of `make test`: Lightning and Transformers by the examples and the reclaims, the gang by its example.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TORCHRUN, TRAININGS, Job, Outcome, gang

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.covers("N12")]

Make = Callable[..., Job]


def plan(part: str, full: str) -> list[str]:
    """Return the moments of a run: `part`, or `full` with NOTICES set; "step 3-8" is a step drawn with SEED."""
    drawn = random.Random(int(os.environ.get("SEED", "1")))
    result = []
    for moment in (full if os.environ.get("NOTICES") else part).split(", "):
        name, _, bounds = moment.partition(" ")
        low, _, high = bounds.partition("-")
        result.append(f"{name} {drawn.randint(int(low), int(high))}" if high else moment)
    return result


def compare(make: Make, script: str, planned: list[str], *before: str, **options: Any) -> Outcome:
    """Run a training undisturbed and with notices; return the second one, after comparing what both computed."""
    plain = make(script, *before, **options).run()
    assert [one.code for one in plain.attempts] == [0], plain.attempts[-1].log[-5000:]
    moved = make(script, *before, **options).run(planned)
    assert moved.attempts[-1].code == 0, moved.attempts[-1].log[-5000:]
    assert moved.noticed() == planned
    assert moved.results == plain.results
    for rank in plain.notes:
        assert trained(moved, rank) == trained(plain, rank)
    for before_one, after in zip(planned, moved.attempts, strict=False):
        assert_message(before_one, after)
    return moved


def trained(outcome: Outcome, rank: int) -> list[tuple[int, str]]:
    """Return every step of a training with its data; a step that ran twice is there twice."""
    return [(step, data) for _, step, data in outcome.steps(rank)]


def assert_message(moment: str, attempt: Any) -> None:
    status = attempt.status
    if moment == "import":
        assert "no checkpoint" in status["message"]
    elif status["exit_code"] == 0:
        assert status["completed"], "the work was done before the notice"
    else:
        assert status["exit_code"] == 75
        assert status["acknowledged"]
        assert status["message"].startswith("saved at step"), attempt.log[-3000:]


def test_a_plain_loop(job: Make) -> None:
    full = "import, step 1-4, save, step 9-12, load, step 14, step 15-19, save, step 23-27, step 28, end"
    compare(job, "loop.py", plan("save", full))


@pytest.mark.long
def test_a_compiled_model(job: Make) -> None:
    """The first step compiles for some seconds, in processes of its own."""
    full = "import, step 1, save, step 9-12, load, step 14, step 15-19, save, step 28, end"
    compare(job, "loop.py", plan("step 1, step 9-12", full), env={"COMPILED": "1"})


@pytest.mark.parametrize(
    ("workers", "part"),
    [
        pytest.param("0", "watch 3", marks=pytest.mark.long),
        ("2", "step 18"),
        pytest.param("persistent", "step 24", marks=pytest.mark.long),
    ],
)
def test_a_loop_over_epochs(job: Make, workers: str, part: str) -> None:
    full = (
        "import, step 1-4, save, step 9-11, watch 3, load, step 14, step 15-20, step 24, watch 1, step 26-33, step 36, "
        "end"
    )
    outcome = compare(job, "state.py", plan(part, full), env={"WORKERS": workers})
    validated = [text for _, kind, text in outcome.notes[0] if kind == "validated"]
    assert [line.split()[0] for line in validated] == ["0", "1", "2"]


@pytest.mark.long
def test_gradients_that_are_accumulated_over_batches(job: Make) -> None:
    full = "step 1-3, step 6, step 7, step 13, step 24, step 25, step 31-34"
    compare(job, "state.py", plan("step 13", full), env={"ACCUMULATE": "4"})


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(job: Make, method: str) -> None:
    compare(job, "state.py", ["step 5", "step 20"], env={"WORKERS": "2", "START_METHOD": method})


@pytest.mark.long
def test_batches_that_are_left_out_instead_of_loaded_again(job: Make) -> None:
    compare(job, "state.py", ["step 5", "step 8", "step 20"], env={"SKIP": "index"})


@pytest.mark.long
def test_a_validation_with_averaged_weights_in_the_place_of_the_models(job: Make) -> None:
    compare(job, "state.py", ["watch 2", "step 20", "watch 2"], env={"SWAP": "1"})


@pytest.mark.long
def test_lightning(job: Make) -> None:
    full = (
        "import, step 1-4, load, watch 2, save, step 9-11, step 12, step 15-17, watch 1, step 22-23, step 24, "
        "step 32-33, end"
    )
    compare(job, "fit.py", plan("watch 2", full), env={"VALIDATE": "0.5"})


@pytest.mark.long
@pytest.mark.parametrize(("workers", "accumulate", "last"), [("2", "1", "step 20"), ("0", "5", "step 7")])
def test_lightning_with_workers_or_accumulation(job: Make, workers: str, accumulate: str, last: str) -> None:
    env = {"WORKERS": workers, "ACCUMULATE": accumulate}
    compare(job, "fit.py", ["step 2", "watch 1", last], env=env)


@pytest.mark.long
def test_lightning_on_two_processes(job: Make) -> None:
    full = "import, step 1-2, load, step 4, watch 1, save, step 9, step 10-11, step 12, step 14-16, end"
    compare(job, "fit.py", plan("step 4", full), env={"RANKS": "2"})


@pytest.mark.long
def test_transformers(job: Make) -> None:
    full = (
        "import, step 1-3, load, step 5, watch 1, save, step 11, step 12-14, step 16, step 17, save, step 20-21, "
        "step 23, end"
    )
    compare(job, "language.py", plan("watch 1", full))


@pytest.mark.long
def test_transformers_with_workers_and_evaluations_between_steps(job: Make) -> None:
    env = {"WORKERS": "2", "EVALUATE": "steps", "ACCUMULATE": "1"}
    compare(job, "language.py", ["step 3", "watch 2", "step 16"], env=env)


def test_accelerate(job: Make) -> None:
    full = "import, step 1-4, step 7, watch 2, load, save, step 17-19, step 21, step 24, step 27, step 33, step 36, end"
    compare(job, "accelerated.py", plan("step 7", full), env={"ACCUMULATE": "2"})


def test_torchrun(job: Make, port: str) -> None:
    full = "import, step 1-2, save, load, step 10-11, step 12, step 13, step 14, step 15-16, step 18, end"
    compare(job, "distributed.py", plan("step 4", full), *TORCHRUN, port, env={"NOTICED_RANK": "1"})


@pytest.mark.long
def test_a_gang_of_two(job: Make, port: str) -> None:
    full = "import, step 1-2, step 3, watch 2, load, step 8, step 9-10, save, step 17, step 18, end"
    compare(job, "distributed.py", plan("watch 2", full), workers=gang(port))


@pytest.mark.long
def test_torchrun_in_a_validation_on_one_rank(job: Make, port: str) -> None:
    compare(job, "distributed.py", ["watch 2", "watch 1"], *TORCHRUN, port)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "last", "env"),
    [
        pytest.param("loop.py", "step 30", {}, id="loop"),
        pytest.param("fit.py", "step 36", {}, id="lightning"),
        pytest.param("fit.py", "step 36", {"VALIDATE": "0.5"}, id="lightning with a validation after it"),
        pytest.param("fit.py", "step 18", {"RANKS": "2"}, id="lightning on two processes"),
        pytest.param("language.py", "step 24", {}, id="transformers"),
    ],
)
def test_a_notice_at_the_last_step_lets_the_training_end(
    job: Make, script: str, last: str, env: dict[str, str]
) -> None:
    """Only its end is left, which needs no other attempt."""
    moved = compare(job, script, [last], env=env)
    assert [one.status["exit_code"] for one in moved.attempts] == [0]


OTHERWISE = """
import os
from pathlib import Path

read = Path.read_text

def read_otherwise(path, *args, **more):
    return '{{"last.ckpt": 1000000000}}' if path.name == "step-000016.json" else read(path, *args, **more)

if os.environ["MAKEWAY_ATTEMPT"] == "2" and os.environ.get("LOCAL_RANK") == "1":
    Path.read_text = read_otherwise
exec(compile(Path({script!r}).read_text(), {script!r}, "exec"))  # not `runpy`: Lightning starts this script again
"""


def test_lightning_resumes_from_no_checkpoint_that_one_rank_finds_damaged(job: Make, tmp_path: Path) -> None:
    script = tmp_path / "otherwise.py"
    script.write_text(OTHERWISE.format(script=str(TRAININGS / "fit.py")))
    first, second = job(script, env={"RANKS": "2"}).run(["step 16"]).attempts
    assert (first.code, first.status["message"]) == (75, "saved at step 16")
    assert second.code not in (0, 75)
    assert (
        "would resume from different checkpoints, one from step-000016 and another one from step-000014" in second.log
    )
