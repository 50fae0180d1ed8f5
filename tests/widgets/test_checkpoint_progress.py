"""What a job reports of its progress: bounded, readable by everyone, and never a reason for the training to fail."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from job_process import ask, fresh, progress
from makeway.checkpointing import progress as module
from makeway.launcher.attempt import Attempt
from makeway.launcher.report import report_of, without_progress
from makeway.launcher.termination_message import write_termination_message
from makeway_api.models.progress import read_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def shown(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = progress(tmp_path)["progress"]
    return result


def test_the_loop_reports_steps_and_their_rate(job: ModuleType, tmp_path: Path, clock: list[float]) -> None:
    for step in job.loop(10):
        job.report(loss=1.0 / (step + 1))
        clock[0] += 2.0
    result = shown(tmp_path)
    assert (result["step"], result["total"], result["rate"]) == (10, 10, 0.5)
    assert result["metrics"] == {"loss": 0.1}
    assert result["curve"]["name"] == "loss"


def test_many_steps_are_few_writes_and_the_last_one_is_there(
    job: ModuleType, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = []
    update = module._update
    monkeypatch.setattr(module, "_update", lambda values: (writes.append(values), update(values)))
    for step in job.loop(5000):
        job.report(loss=float(step))
        clock[0] += 0.001
    assert len(writes) < 15
    assert shown(tmp_path)["step"] == 5000
    assert shown(tmp_path)["metrics"] == {"loss": 4999.0}


class Tensor:
    """What a value on a GPU looks like from outside: reading it waits for the GPU."""

    is_cuda = True
    reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> Tensor:
        return self

    def __float__(self) -> float:
        Tensor.reads += 1
        return float(self.value)


def test_a_value_of_a_gpu_is_read_only_when_it_is_written(job: ModuleType, tmp_path: Path, clock: list[float]) -> None:
    for step in range(1000):
        job.report(step=step, loss=Tensor(step))
    job.done()
    assert shown(tmp_path)["metrics"] == {"loss": 999.0}
    assert Tensor.reads <= 3


@pytest.mark.parametrize(
    ("value", "kept"),
    [(float("nan"), None), (float("inf"), None), (10**400, None), (True, 1.0), (Decimal("0.5"), 0.5), (3, 3.0)],
)
def test_numbers_of_any_kind_are_numbers_or_null(job: ModuleType, tmp_path: Path, value: Any, kept: Any) -> None:
    job.report(step=1, loss=value)
    job.done()
    assert "NaN" not in (tmp_path / "progress.json").read_text()
    assert shown(tmp_path)["metrics"] == {"loss": kept}


def test_a_scalar_of_numpy_is_a_number(job: ModuleType, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    job.report(step=numpy.int64(3), total=numpy.int32(9), loss=numpy.float32(0.5), one=numpy.array(2.0))
    assert shown(tmp_path)["metrics"] == {"loss": 0.5, "one": 2.0}
    assert (shown(tmp_path)["step"], shown(tmp_path)["total"]) == (3, 9)


class Broken:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", ["0.5", b"1", None, [1, 2], {"a": 1}, 1j, object(), Broken()])
def test_what_is_no_number_is_left_out_with_one_warning(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    for _ in range(3):
        job.report(step=1, loss=0.5, other=value)
    job.done()
    assert shown(tmp_path)["metrics"] == {"loss": 0.5}
    assert capsys.readouterr().err.count("'other' is a") == 1


def test_huge_reports_stay_small(job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {f"{n}/{'layer' * 100}": float(n) for n in range(5000)}
    odd = {"eval/loss": 1.0, "\udc80\0": 2.0, "": 3.0}
    for step in range(3):
        job.report(step=step, **odd, **names)
    job.done()
    text = (tmp_path / "progress.json").read_text()
    assert len(text) < 10_000
    assert len(shown(tmp_path)["metrics"]) <= 32
    assert "only the first 32 metrics are shown" in capsys.readouterr().err
    assert read_progress(shown(tmp_path)) is not None


@pytest.mark.parametrize("step", ["one", None, [1], float("nan"), 2**80, -5])
def test_a_step_that_is_none_disturbs_nothing(job: ModuleType, tmp_path: Path, step: Any) -> None:
    job.report(step=step, total=step, loss=1.0)
    job.done()
    assert shown(tmp_path)["step"] is None


def test_the_curve_keeps_its_shape_and_its_size(job: ModuleType, tmp_path: Path, clock: list[float]) -> None:
    for step in job.loop(2_000):
        job.report(lr=0.1, loss=float(step))
        clock[0] += 1.0
    points = shown(tmp_path)["curve"]["points"]
    assert shown(tmp_path)["curve"]["name"] == "loss"
    assert 32 <= len(points) <= 64
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    assert steps[-1] >= 1_999
    assert max(b - a for a, b in pairwise(steps)) < 140


def test_the_curve_goes_on_where_the_job_resumes(job: ModuleType, tmp_path: Path, clock: list[float]) -> None:
    def save(folder: Path) -> None:
        (folder / "w").write_text("x")

    loop = job.loop(100, save=save)
    for _ in range(41):
        job.report(loss=100.0 - next(loop))
        clock[0] += 1.0
    ask(tmp_path)
    with pytest.raises(SystemExit):
        next(loop)
    (tmp_path / "stop.json").unlink()
    again = fresh()
    loop = again.loop(100, save=save)
    for _ in range(3):
        step = next(loop)
        again.report(loss=100.0 - step)
        clock[0] += 1.0
    points = shown(tmp_path)["curve"]["points"]
    assert points[0][0] <= 1
    assert [int(step) for step, _ in points] == sorted({int(step) for step, _ in points})
    assert any(30 <= step <= 41 for step, _ in points)


def test_named_loops_tell_which_one_runs(job: ModuleType, tmp_path: Path, clock: list[float]) -> None:
    for epoch in range(2):
        for _ in job.loop(3, name=f"epoch-{epoch}"):
            clock[0] += 5.0
    assert shown(tmp_path)["stage"] == "epoch-1"


def test_progress_and_checkpoints_do_not_overwrite_each_other(job: ModuleType, tmp_path: Path) -> None:
    job.report(step=7, loss=1.0)
    with job.saving(5):
        pass
    job.done()
    result = progress(tmp_path)
    assert (result["step"], result["progress"]["step"]) == (5, 7)
    assert result["completed_at"]


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"progress": 4}', "[" * 100_000, "1" * 5000], ids=len)
def test_a_broken_progress_file_is_replaced(job: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.json").write_text(text)
    job.report(step=7)
    assert shown(tmp_path)["step"] == 7


def test_a_forked_process_does_not_report_for_its_parent(job: ModuleType, tmp_path: Path) -> None:
    job.report(step=7)
    pid = os.fork()
    if pid == 0:
        job.report(step=9)
        job._parts.progress.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    assert shown(tmp_path)["step"] == 7


def test_a_forked_process_does_not_wait_for_a_thread_of_its_parent(job: ModuleType, tmp_path: Path) -> None:
    job.report(step=7)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with job._parts.progress._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    with contextlib.closing(multiprocessing.get_context("fork").Process(target=job.saved, args=(5,))) as child:
        child.start()
        child.join(10)
        code = child.exitcode
        child.kill()
        child.join()
    done.set()
    thread.join()
    assert code == 0
    assert progress(tmp_path)["step"] == 5


class Odd:
    """A number of a library, which fails in a way of its own."""

    def __float__(self) -> float:
        raise KeyError("not loaded")

    __int__ = __index__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "odd",
    [-1, -(10**400), 2**53, 10**400, 10**5000, float("nan"), float("inf"), "x", b"3", [], 1j, Odd(), object()],
    ids=lambda odd: type(odd).__name__,
)
@pytest.mark.parametrize("name", ["step", "total", "loss"])
def test_nothing_that_is_reported_disturbs_the_training(
    job: ModuleType, tmp_path: Path, clock: list[float], name: str, odd: object
) -> None:
    for number in (0, 1, odd, odd, 2):
        job.report(**{"step": 3, name: number})
        clock[0] += 2
    job.done()
    assert read_progress(shown(tmp_path)) is not None
    assert shown(tmp_path)["step"] == (2 if name == "step" else 3)


def test_only_rank_0_reports(job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    job.report(step=7)
    assert not (tmp_path / "progress.json").exists()
    monkeypatch.setenv("RANK", "0")
    job.report(step=8)
    assert json.loads((tmp_path / "progress.json").read_text())["progress"]["step"] == 8


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ({"step": 5, "metrics": {"loss": 0.5}}, {"step": 5, "metrics": {"loss": 0.5}}),
        ({"metrics": {f"m{n}": 1.0 for n in range(5000)}}, None),
        ({"step": 10**29}, {"step": 10**29}),
        ("x", None),
        (None, None),
    ],
)
def test_the_launcher_sends_what_is_small_and_keeps_it_out_of_the_termination_message(
    tmp_path: Path, written: object, sent: object
) -> None:
    attempt = Attempt({"attempt": 1, "directory": str(tmp_path)})
    (tmp_path / "attempt-1").mkdir()
    Path(attempt.path("progress.json")).write_text(json.dumps({"progress": written}))
    result = report_of(attempt, None)
    assert result["progress"] == sent
    assert without_progress(result) == {key: value for key, value in result.items() if key != "progress"}
    write_termination_message(str(tmp_path / "message"), {**result, "exit": {"message": "failed"}}, [])
    assert "progress" not in json.loads((tmp_path / "message").read_text())
