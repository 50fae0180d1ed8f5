"""makeway.checkpoint in a plain Python: checkpoints are complete or absent, and nothing happens outside of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from job_process import CODE, ask, fresh, names, progress
from makeway.checkpointing.folder import Folder


@pytest.mark.covers("N12")
def test_outside_of_a_job_nothing_happens(away: ModuleType, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert away.requested() is False
    assert away.notice() is None
    assert away.latest() is None
    away.on_preempt(lambda notice: pytest.fail("there was no notice"))
    away.stop()
    assert away.dir == tmp_path / "checkpoints"
    assert list(away.loop(3)) == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_outside_of_a_job_checkpoints_go_beside_the_script(away: ModuleType, tmp_path: Path) -> None:
    with away.saving(7) as folder:
        (folder / "w").write_text("x")
    assert away.latest() == tmp_path / "checkpoints" / "step-000007"
    assert away.step_of(away.latest()) == 7


def test_a_checkpoint_counts_only_when_it_is_whole(job: ModuleType, tmp_path: Path) -> None:
    with job.saving(1) as folder:
        assert job.latest() is None
        (folder / "sub").mkdir()
        (folder / "sub" / "w").write_text("x")
        (folder / "link").symlink_to("nowhere")
    assert job.latest() == tmp_path / "kept" / "step-000001"
    assert (job.latest() / "sub" / "w").read_text() == "x"
    with pytest.raises(IsADirectoryError), job.saving(2) as folder:
        folder.write_text("half")
    assert names(job) == ["step-000001"]
    assert progress(tmp_path)["step"] == 1


def test_the_newest_two_are_kept(job: ModuleType) -> None:
    for step in (5, 50, 500_000, 5_000_000):
        with job.saving(step):
            pass
    assert names(job) == ["step-500000", "step-5000000"]
    assert job.step_of(job.latest()) == 5_000_000
    with job.saving(5_000_001, keep=1):
        pass
    assert names(job) == ["step-5000001"]
    assert os.listdir(job.dir / ".sizes") == ["step-5000001.json"]
    with pytest.raises(ValueError, match="keep is 0"), job.saving(1, keep=0):
        pass


def test_saving_a_step_again_never_breaks_the_first(job: ModuleType) -> None:
    for text in ("first", "second"):
        with job.saving(3) as folder:
            (folder / "w").write_text(text)
            if text == "second":
                assert (job.latest() / "w").read_text() == "first"
    assert (job.latest() / "w").read_text() == "second"
    assert job.step_of(job.latest()) == 3


def test_what_killed_saves_left_is_removed(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    job.dir.mkdir()
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    mine, dead = os.getpid(), int(gone.stdout)
    for name in (f".saving-000001-a1-r0-p{dead}-1", f".saving-000001-a0-r3-p{mine}-1"):
        (job.dir / name).mkdir()
    stays = {f".saving-000001-a1-r0-p{mine}-1", f".saving-000001-a1-r1-p{dead}-1"}
    for name in stays:
        (job.dir / name).mkdir()
    (job.dir / "mine.txt").write_text("other files stay")
    with job.saving(2):
        pass
    assert set(os.listdir(job.dir)) == {"step-000002", "mine.txt", ".sizes", *stays}


def test_the_notice_is_read_from_the_stop_file(job: ModuleType, tmp_path: Path) -> None:
    assert not job.requested()
    ask(tmp_path, preempt_test=True)
    assert job.requested()
    notice = job.notice()
    assert (notice.reason, notice.by_team, notice.by_owner, notice.preempt_test) == (
        "bo wants it",
        "devops",
        None,
        True,
    )
    assert 15 < notice.seconds_left <= 20


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"reason": 1}'])
def test_a_broken_stop_file_is_a_notice_all_the_same(job: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "stop.json").write_text(text)
    assert job.notice().reason == "the process was asked to stop"
    assert job.notice().seconds_left > 20


def test_a_signal_is_a_request_and_the_handler_before_it_is_called(job: ModuleType) -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    assert not job.requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert job.requested()
    assert called == [signal.SIGTERM]
    assert job.notice().reason == "the process was asked to stop"


def test_the_profile_chooses_the_signal(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_SIGNAL", "SIGUSR1")
    assert not job.requested()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert job.requested()


def test_it_works_outside_of_the_main_thread(job: ModuleType, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    answers: list[bool] = []

    def work() -> None:
        answers.append(job.requested())
        with job.saving(4):
            pass
        ask(tmp_path)
        answers.append(job.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [False, True]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_stop_acknowledges_and_leaves(job: ModuleType, tmp_path: Path) -> None:
    ask(tmp_path)
    with job.saving(9):
        pass
    with pytest.raises(SystemExit) as ended:
        job.stop()
    assert ended.value.code == 75
    report = progress(tmp_path)
    assert report["step"] == 9
    assert report["acknowledged_at"] >= report["saved_at"]


def test_the_loop_resumes_saves_and_leaves(job: ModuleType, tmp_path: Path) -> None:
    state = {"sum": 0}

    def save(folder: Path) -> None:
        (folder / "sum").write_text(str(state["sum"]))

    def load(folder: Path) -> None:
        state["sum"] = int((folder / "sum").read_text())

    def train() -> list[int]:
        steps = []
        for step in job.loop(10, save=save, load=load, every=3):
            state["sum"] += step
            steps.append(step)
            if step == 4:
                ask(tmp_path)
        return steps

    with pytest.raises(SystemExit):
        train()
    assert job.step_of(job.latest()) == 5
    assert "completed_at" not in progress(tmp_path)
    (tmp_path / "stop.json").unlink()
    state["sum"] = -1
    assert train() == [5, 6, 7, 8, 9]
    assert state["sum"] == sum(range(10))
    assert (job.latest() / "sum").read_text() == str(state["sum"])
    assert progress(tmp_path)["completed_at"] > 0
    assert list(fresh().loop(10, save=save, load=load)) == []


def test_the_loop_takes_any_iterable_and_any_length(job: ModuleType) -> None:
    def save(folder: Path) -> None:
        pass

    assert list(job.loop(iter("abc"), save=save)) == ["a", "b", "c"]
    assert list(fresh().loop("abcde", save=save)) == ["d", "e"]
    assert list(fresh().loop(0)) == []
    with pytest.raises(ValueError, match="every is 0"):
        list(job.loop(3, every=0))


def test_callbacks_run_once_even_where_one_fails(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = threading.Event()
    calls: list[str] = []

    def fails(notice: object) -> None:
        calls.append("fails")
        raise RuntimeError("oops")

    def works(notice: object) -> None:
        calls.append("works")
        called.set()

    job.on_preempt(fails)
    job.on_preempt(works)
    ask(tmp_path)
    assert called.wait(30)
    with pytest.raises(SystemExit):
        job.stop()
    assert calls == ["fails", "works"]
    assert "RuntimeError: oops" in capsys.readouterr().err


WORKERS = """
import multiprocessing, os, signal, sys, time
from makeway import checkpoint
assert not checkpoint.requested()

def work(n):
    time.sleep(1.0 if n == "slow" else 0.05)
    return os.getpid()

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        mine = pool.apply(work, ("",))
        later = pool.apply_async(work, ("slow",))
        time.sleep(0.2)
        open(os.environ["MAKEWAY_STOP_FILE"], "w").write("{}")
        os.killpg(0, signal.SIGTERM)
        assert later.get(5) > 0, "the worker finished its batch"
        assert checkpoint.requested()
    print("the pool was ended")
"""


def test_forked_workers_outlive_the_notice_but_not_their_pool(job: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=30, start_new_session=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the pool was ended\n", "")


LEAVES = """
import threading, time
from makeway import checkpoint
checkpoint.on_preempt(lambda notice: print("saved", flush=True), leave=True)
print("up", flush=True)
time.sleep(30)
"""


def test_a_callback_may_leave_for_the_whole_process(job: ModuleType, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    ask(tmp_path)
    assert process.wait(10) == 75
    assert process.stdout.read() == "saved\n"
    process.stdout.close()
    assert progress(tmp_path)["acknowledged_at"] > 0


def test_progress_that_cannot_be_written_disturbs_nothing(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEWAY_PROGRESS_FILE", "/no/such/place/progress.json")
    with job.saving(1):
        pass
    assert job.latest() is not None


def test_only_the_standard_library_is_imported() -> None:
    code = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, {str(CODE.parent)!r})
import checkpoint
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - sys.stdlib_module_names - {{"checkpoint"}}))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_unknown_names_are_an_error(away: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'latst'"):
        _ = away.latst


def test_the_error_of_a_save_is_not_replaced_by_one_of_looking_for_its_cause(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(folder: Folder) -> list[Path]:
        raise PermissionError(13, "the folder cannot be read any more")

    def save() -> None:
        with job.saving(1):
            monkeypatch.setattr(Folder, "complete", hidden)
            raise KeyError("a fault of the training")

    with pytest.raises(KeyError):
        save()
    assert list(job.dir.iterdir()) == []


def test_steps_that_begin_anew_are_told_once(job: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """As where the steps are those of an epoch: the training would resume from the end of an earlier one."""
    told = "from which the training resumes"
    for step in (10, 20, 20, 30):
        with job.saving(step):
            pass
    assert told not in capfd.readouterr().err
    for step in (5, 10):
        with job.saving(step):
            pass
    assert names(job)[-1] == "step-000030"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize("step", [2**53, 10**300], ids=["2**53", "10**300"])
def test_a_step_beyond_what_can_be_kept_is_refused(job: ModuleType, step: int) -> None:
    with pytest.raises(ValueError, match="the number of steps done"), job.saving(step):
        pass
    assert job.latest() is None


def test_a_checkpoint_of_a_negative_step_is_refused(job: ModuleType) -> None:
    """It would never be found again."""
    with pytest.raises(ValueError, match="step is -1; a checkpoint has the number of steps done"), job.saving(-1):
        pass
    assert job.latest() is None
