"""checkpoint.loop: several loops in a job, what outlives a resume, and saves that fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from job_process import ask, fresh, names, progress, start


class Sum:
    """A training: its state is the sum of its steps."""

    def __init__(self) -> None:
        self.value = 0
        self.steps: list[Any] = []
        self.saves = 0

    def save(self, folder: Path) -> None:
        self.saves += 1
        (folder / "sum").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / "sum").read_text())

    def train(self, loop: Iterator[Any], until: Callable[[int], object] = bool) -> None:
        for step in loop:
            self.value += step
            self.steps.append(step)
            until(step)


def notice_at(tmp_path: Path, step: int) -> Callable[[int], None]:
    def until(done: int) -> None:
        if done == step:
            ask(tmp_path)

    return until


def nothing(folder: Path) -> None:
    pass


def test_a_second_loop_without_a_name_is_refused(job: ModuleType) -> None:
    assert len(list(job.loop(3, save=nothing))) == 3
    with pytest.raises(RuntimeError, match=r"has no name already.*name=f"):
        job.loop(3, save=nothing)


def test_a_second_loop_of_the_same_name_is_refused(job: ModuleType) -> None:
    list(job.loop(3, name="train"))
    with pytest.raises(RuntimeError, match="has the name 'train' already"):
        job.loop(3, name="train")


def test_loops_of_different_names_all_train(job: ModuleType) -> None:
    state = Sum()
    for epoch in range(5):
        state.train(job.loop(4, state.save, state.load, name=f"epoch-{epoch}"))
    assert len(state.steps) == 20


def test_a_finished_loop_is_skipped_and_the_next_goes_on_in_the_middle(job: ModuleType, tmp_path: Path) -> None:
    def run(module: ModuleType, until: Callable[[int], object] = bool) -> Sum:
        state = Sum()
        for epoch in range(3):
            state.train(module.loop(10, state.save, state.load, name=f"epoch-{epoch}"), until if epoch == 1 else bool)
        module.done()
        return state

    with pytest.raises(SystemExit):
        run(job, notice_at(tmp_path, 6))
    (tmp_path / "stop.json").unlink()
    resumed = run(fresh())
    assert resumed.steps == [7, 8, 9, *range(10)]
    assert resumed.value == 3 * sum(range(10))


def test_the_last_state_of_a_finished_loop_is_loaded_where_the_next_has_no_checkpoint(job: ModuleType) -> None:
    first = Sum()
    first.train(job.loop(5, first.save, first.load, name="first"))
    again, module = Sum(), fresh()
    assert list(module.loop(5, again.save, again.load, name="first")) == []
    assert again.value == sum(range(5))


def test_a_finished_loop_without_a_state_is_skipped_after_a_resume(job: ModuleType) -> None:
    assert list(job.loop(2, name="download")) == [0, 1]
    assert list(fresh().loop(2, name="download")) == []


def test_a_finished_loop_goes_on_where_it_gets_more_steps(job: ModuleType) -> None:
    state = Sum()
    state.train(job.loop(3, state.save, state.load, name="a"))
    state.train(fresh().loop(5, state.save, state.load, name="a"))
    assert state.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "ä" * 300, "Train", "train", " ", "\udc80", "step-000001", "-"])
def test_any_name_of_a_loop_is_a_folder_of_its_own(job: ModuleType, tmp_path: Path, name: str) -> None:
    state = Sum()
    state.train(job.loop(3, state.save, state.load, name=name))
    state.train(job.loop(2, state.save, state.load, name=name + "2"))
    (folder,) = {path.parent for path in job.dir.rglob("sum") if path.parent.name == "step-000003"}
    assert folder.parent.parent == job.dir
    assert job.latest(name) == folder
    assert job.latest() is None


def test_named_loops_do_not_report_the_end_of_the_job(job: ModuleType, tmp_path: Path) -> None:
    list(job.loop(3, save=nothing, name="one"))
    assert "completed_at" not in progress(tmp_path)
    job.done()
    at = progress(tmp_path)["completed_at"]
    job.done()
    assert progress(tmp_path)["completed_at"] >= at


def test_a_loop_after_the_end_of_another_takes_its_end_back(job: ModuleType, tmp_path: Path) -> None:
    list(job.loop(3))
    assert progress(tmp_path)["completed_at"]
    next(job.loop(3, name="more"))
    assert "completed_at" not in progress(tmp_path)


NEXT = """
import sys
from makeway import checkpoint
if sys.argv[1:] != ["saves"]:
    while not checkpoint.requested():
        pass
with checkpoint.saving(1) as folder:
    (folder / "w").write_text("x")
checkpoint.stop()
"""


@pytest.mark.parametrize("first", ["checkpoint.done()", "list(checkpoint.loop(1))"])
@pytest.mark.parametrize("how", ["requested", "saves"])
def test_the_next_process_of_a_job_takes_the_end_of_the_first_back(tmp_path: Path, first: str, how: str) -> None:
    train = start(tmp_path, f"from makeway import checkpoint; {first}")
    assert train.communicate(timeout=60) == ("", "")
    assert progress(tmp_path)["completed_at"]
    ask(tmp_path)
    finetune = start(tmp_path, NEXT.replace("sys.argv[1:]", repr([how])))
    assert finetune.communicate(timeout=60) == ("", "")
    assert finetune.returncode == 75, "the job is not done, so it is requeued"
    assert "completed_at" not in progress(tmp_path), "an exit with code 0 were no success either"


def test_a_save_after_the_end_takes_it_back_and_one_that_began_before_does_not(job: ModuleType, tmp_path: Path) -> None:
    with job.saving(1):
        job.done()
    assert progress(tmp_path)["done_at"]
    with job.saving(2):
        assert "done_at" not in progress(tmp_path)
    job.done()
    job.saved(3)
    assert "completed_at" not in progress(tmp_path)


def test_the_end_that_another_rank_reported_stays(job: ModuleType, tmp_path: Path) -> None:
    rank = start(tmp_path, "from makeway import checkpoint; checkpoint.done()")
    assert rank.communicate(timeout=60) == ("", "")
    ask(tmp_path)
    assert job.requested()
    with job.saving(4):
        pass
    with pytest.raises(SystemExit, match=r"^0$"):
        job.stop()
    assert progress(tmp_path)["done_at"]


def test_outside_of_a_job_every_run_trains_from_the_beginning(away: ModuleType, tmp_path: Path) -> None:
    for module in (away, fresh()):
        state = Sum()
        state.train(module.loop(5, state.save, state.load, every=2))
        state.train(module.loop(5, state.save, state.load, every="5m"))
        assert state.steps == [*range(5), *range(5)]
    away.done()
    away.report(loss=1.0)
    assert not away.agreed()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", [0, -1, "", "0s", "5", "m", "5 parsecs", "1h 5", "-5m", 2.5, "1.5.5m"])
def test_an_interval_that_is_none_is_refused_with_the_forms(job: ModuleType, every: Any) -> None:
    with pytest.raises(ValueError, match=f"every is .*{every}"):
        job.loop(3, every=every)


def test_an_interval_may_be_a_time(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from makeway.checkpointing import loop as module

    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    state = Sum()
    saved = []
    for _ in job.loop(10, state.save, state.load, every="1m 30s"):
        saved.append(state.saves)
        now[0] += 40
    assert saved == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("steps", [{"a", "b"}, frozenset((1,)), 1.5, None, object()])
def test_steps_without_an_order_are_refused(job: ModuleType, steps: Any) -> None:
    with pytest.raises(TypeError, match=r"loop (got a set|needs a number)"):
        job.loop(steps)


def test_the_random_generator_is_as_it_was_though_the_data_draw_from_it(job: ModuleType, tmp_path: Path) -> None:
    import random

    def save(folder: Path) -> None:
        (folder / "rng").write_text(json.dumps(random.getstate()))

    def load(folder: Path) -> None:
        version, words, gauss = json.loads((folder / "rng").read_text())
        random.setstate((version, tuple(words), gauss))

    def data() -> Iterator[int]:
        order = list(range(100))
        random.shuffle(order)
        yield from order

    def run(module: ModuleType) -> list[tuple[int, float]]:
        random.seed(7)
        return [(item, random.random()) for item in module.loop(data(), save, load)]

    whole = run(job)
    shutil.rmtree(job.dir)
    random.seed(7)
    stopping = fresh().loop(data(), save, load)
    first = [(next(stopping), random.random()) for _ in range(31)]
    ask(tmp_path)
    with pytest.raises(SystemExit):
        next(stopping)
    (tmp_path / "stop.json").unlink()
    assert first + run(fresh()) == whole


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail]"), ValueError("a bug")]
)
def test_a_periodic_save_that_fails_is_a_warning(
    job: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    state = Sum()

    def save(folder: Path) -> None:
        state.save(folder)
        if state.value == sum(range(4)):
            raise error

    state.train(job.loop(6, save, state.load, every=2))
    assert state.steps == list(range(6))
    warning = capsys.readouterr().err
    assert "step 4 was not saved; the newest checkpoint is that of step 2, and the training goes on" in warning
    assert job.step_of(job.latest()) == 6


def test_the_warning_of_a_save_that_fails_again_counts_the_failures(
    job: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"the disk .* is full"):
        list(job.loop(3, save, every=1))
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith("Makeway: step 1 was not saved; there is no checkpoint yet, and the training goes on: ")
    assert second.startswith("Makeway: step 2 was not saved, 2 failures in a row; there is no checkpoint yet, and ")


def test_a_save_that_fails_after_the_notice_is_an_error_and_older_checkpoints_stay(
    job: ModuleType, tmp_path: Path
) -> None:
    state = Sum()

    def save(folder: Path) -> None:
        if state.value > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        state.save(folder)

    with pytest.raises(OSError, match=r"the disk /.* is full: step 5 was not saved .* of .* are free; .*step-000002"):
        state.train(job.loop(10, save, state.load, every=2), notice_at(tmp_path, 4))
    assert sorted(os.listdir(job.dir / "step-000002")) == ["sum"]
    assert "acknowledged_at" not in progress(tmp_path)


@pytest.mark.parametrize("free", [0, 5_000_000])
def test_a_full_disk_is_named_though_the_framework_does_not(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    with pytest.raises(OSError, match=r"1\.0 GB are free; there is no other checkpoint") as caught, job.saving(1):
        raise RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/0")
    assert caught.value.errno == errno.ENOSPC
    assert "enforce fail" in str(caught.value.__cause__)


def test_an_error_on_a_disk_with_room_stays_what_it_is(job: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="shape"), job.saving(1):
        raise RuntimeError("shape mismatch")
    with pytest.raises(PermissionError), job.saving(1):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_save_needs_no_room_for_more_than_are_kept_and_one_always_stays(job: ModuleType) -> None:
    for keep, room in ((3, 2), (2, 1), (1, 1)):
        for step in range(1, 6):
            with job.saving(keep * 100 + step, keep=keep):
                if step > keep:
                    complete = [name for name in os.listdir(job.dir) if name.startswith("step-")]
                    assert len(complete) == room


def test_a_removal_that_is_interrupted_leaves_no_checkpoint_that_looks_complete(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree
    for step in (1, 2):
        with job.saving(step) as folder:
            (folder / "w").write_text("x")

    def interrupted(path: Path, **more: Any) -> None:
        remove(path, **more)
        if Path(path).name.startswith(".removed"):
            Path(path).mkdir()  # as if only its files were gone
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), job.saving(3):
        pass
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert [name for name in os.listdir(job.dir) if name.startswith("step-")] == ["step-000002"]
    with job.saving(3):
        pass
    assert names(job) == ["step-000002", "step-000003"]


def list_of(checkpoint: Path) -> Path:
    """Return the file with the sizes of a checkpoint's files."""
    return checkpoint.parent / ".sizes" / f"{checkpoint.name}.json"


def damage(checkpoint: Path, how: str) -> str:
    """Take bytes from a checkpoint; return what is said of it."""
    state, sizes = checkpoint / "sum", list_of(checkpoint)
    size = state.stat().st_size
    if how == "shorter":
        os.truncate(state, size - 1)
        return f"its file sum has {size - 1} of {size} bytes"
    if how == "missing":
        state.unlink()
        return "its file sum is missing"
    os.truncate(sizes, sizes.stat().st_size - 1)
    return f"the list of its files, {sizes}, is damaged"


@pytest.mark.covers("N12")
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("how", ["shorter", "missing", "half a list"])
def test_a_loop_resumes_from_the_checkpoint_before_a_damaged_one(
    job: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, ended: bool
) -> None:
    first = Sum()
    with nullcontext() if ended else pytest.raises(SystemExit):
        first.train(job.loop(50, first.save, first.load, every=20), bool if ended else notice_at(tmp_path, 47))
    (tmp_path / "stop.json").unlink(missing_ok=True)
    newest = job.latest()
    assert newest is not None
    what = damage(newest, how)
    again = Sum()
    again.train(fresh().loop(50, again.save, again.load))
    assert again.steps == list(range(40, 50))
    assert again.value == sum(range(50)), "nothing is lost, and nothing trained twice"
    said = (
        f"Makeway: {newest.name} in {job.dir} is damaged: {what}. The training resumes from the one before, step-000040"
    )
    assert capfd.readouterr().err.count(said) == 1


def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(job: ModuleType) -> None:
    for step in (1, 2):
        with job.saving(step) as folder:
            (folder / "sum").write_text(str(step))
    damage(job.dir / "step-000002", "shorter")
    with job.saving(3) as folder:
        assert (job.dir / "step-000001").exists(), "the only whole one, until another is"
        (folder / "sum").write_text("3")
    assert (job.dir / "step-000001" / "sum").read_text() == "1"
    with job.saving(4) as folder:
        (folder / "sum").write_text("4")
    assert names(job) == ["step-000003", "step-000004"]


def test_a_failed_save_ends_no_training_though_only_damaged_checkpoints_are_left(
    job: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    state = Sum()

    def save(folder: Path) -> None:
        if len(state.steps) == 4:
            damage(job.dir / "step-000002", "shorter")
            raise OSError(errno.EIO, "Input/output error")
        state.save(folder)

    state.train(job.loop(7, save, state.load, every=2))
    assert state.steps == list(range(7))
    assert "step 4 was not saved; there is no checkpoint yet, and the training goes on" in capfd.readouterr().err
    assert names(job)[-1] == "step-000007"


@pytest.mark.parametrize("copy", [shutil.copy2, os.link])
def test_a_save_that_begins_with_the_checkpoint_before_leaves_both_whole(
    job: ModuleType, capfd: pytest.CaptureFixture[str], copy: Callable[[str, str], object]
) -> None:
    for step in (1, 2):
        with job.saving(step) as folder:
            if (newest := job.latest()) is not None:
                shutil.copytree(newest, folder, copy_function=copy, dirs_exist_ok=True)
                for part in range(9):
                    (folder / f"part-{part}").unlink()
            for part in range(10 - 9 * (step - 1)):
                (folder / f"part-{part}").unlink(missing_ok=True)
                (folder / f"part-{part}").write_text("x")
            (folder / ".nfs0001").touch()  # as of an open file that was removed; it goes when that is closed
        (job.dir / f"step-00000{step}" / ".nfs0001").unlink()
        assert job.latest().name == f"step-00000{step}"
    shutil.rmtree(job.dir / "step-000002")
    assert sorted(os.listdir(job.latest())) == [f"part-{part}" for part in range(10)], "what was saved, nothing else"
    assert "damaged" not in capfd.readouterr().err


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(job: ModuleType) -> None:
    for step in (1, 2):
        with job.saving(step) as folder:
            (folder / "sum").write_text(str(step))
    sizes = list_of(job.dir / "step-000002")
    content = sizes.read_text()
    sizes.unlink()
    sizes.mkdir()  # a file that cannot be read, also by root
    with pytest.raises(OSError, match=r"step-000002 cannot be read, so that nothing tells whether .*: Is a directory"):
        job.latest()
    with job.saving(3) as folder:
        assert names(job) == ["step-000001", "step-000002"], "a save does not fail of it, and removes no whole one"
        (folder / "sum").write_text("3")
    assert job.latest().name == "step-000003"
    shutil.rmtree(job.dir / "step-000003")
    sizes.rmdir()
    sizes.write_text(content)
    assert job.latest().name == "step-000002"


def test_a_list_is_of_one_checkpoint_only(job: ModuleType) -> None:
    for step in (1, 2, 3, 3):
        with job.saving(step) as folder:
            (folder / "sum").write_text("long")
    assert sorted(os.listdir(job.dir / ".sizes")) == ["step-000003-r1.json", "step-000003.json"]
    for name in names(job):
        shutil.move(job.dir / name, job.dir.parent / name)
    assert job.latest() is None
    with job.saving(3) as folder:
        (folder / "sum").write_text("x")  # shorter than that of the one that was moved away
        (job.dir / ".sizes" / "step-000007.json.1").touch()  # as of another save that was killed
    assert job.latest().name == "step-000003"
    with job.saving(4):
        assert os.listdir(job.dir / ".sizes") == ["step-000003.json"]


@pytest.mark.parametrize("how", ["killed", "a file of this name"])
def test_a_checkpoint_whose_list_was_not_written_counts(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with job.saving(1) as folder:
        (folder / "sum").write_text("long")
    if how == "killed":
        with monkeypatch.context() as patch:
            patch.setattr("makeway.checkpointing.folder.replace_json", killed)
            with pytest.raises(KeyboardInterrupt), job.saving(2) as folder:
                (folder / "sum").write_text("2")
    else:
        shutil.rmtree(job.dir / ".sizes")
        (job.dir / ".sizes").write_text("notes")
        with job.saving(2) as folder:
            (folder / "sum").write_text("2")
    assert job.latest().name == "step-000002"
    with job.saving(3, keep=1):
        pass
    assert names(job) == ["step-000003"]


def test_two_ranks_that_save_a_step_at_one_moment_both_keep_it(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def second(source: Path, target: Path) -> None:
        if not target.exists():  # another rank is faster by a moment
            target.mkdir()
            (target / "weights-0").write_text("whole")
            monkeypatch.setattr(os, "rename", rename)
        rename(source, target)

    monkeypatch.setattr(os, "rename", second)
    with job.saving(7) as folder:
        (folder / "weights-2").write_text("whole")
    assert sorted(path.name for path in job.dir.glob("step-*/weights*")) == ["weights-0", "weights-2"]
    assert job.latest().name == "step-000007-r1"


def test_the_only_checkpoint_is_not_passed_over_where_it_is_damaged(job: ModuleType) -> None:
    state = Sum()
    state.train(job.loop(3, state.save, state.load))
    what = damage(job.dir / "step-000003", "shorter")
    with pytest.raises(
        OSError, match=f"step-000003 in .* is damaged: {what}. There is no other checkpoint; move it away"
    ):
        state.train(fresh().loop(5, state.save, state.load))
    assert os.listdir(job.dir / "step-000003"), "what is left of it stays"


def test_a_checkpoint_of_an_earlier_release_has_no_sizes_and_counts(job: ModuleType) -> None:
    with job.saving(3) as folder:
        (folder / "sum").write_text("3")
    list_of(job.dir / "step-000003").unlink()
    assert job.step_of(fresh().latest()) == 3


def test_a_rank_with_nothing_to_write_makes_no_checkpoint(job: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with job.saving(4) as folder:
        (folder / "w").write_text("of rank 0")
    monkeypatch.setenv("RANK", "1")
    for step in (4, 5):
        with job.saving(step) as folder:
            (folder / "empty").mkdir()
    monkeypatch.setenv("RANK", "0")
    with job.saving(4):
        pass
    assert names(job) == ["step-000004"]


def test_how_long_a_save_took_is_reported(job: ModuleType, tmp_path: Path) -> None:
    with job.saving(4):
        pass
    assert 0 <= progress(tmp_path)["save_seconds"] < 60


class DataLoader:
    """What a shuffling DataLoader of torch looks like from outside."""

    __module__ = "torch.utils.data.dataloader"

    def __init__(self, generator: object = None) -> None:
        self.sampler = type("RandomSampler", (), {"generator": generator})()

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(("seed", "generator", "warned"), [(2**52, None, True), (42, None, False), (2**52, 1, False)])
def test_a_loader_that_shuffles_without_a_seed_is_warned_about(
    job: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int, generator: object, warned: bool
) -> None:
    import sys

    torch = ModuleType("torch")
    torch.initial_seed = lambda: seed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.warns(RuntimeWarning) if warned else nullcontext() as caught:
        assert list(job.loop(DataLoader(generator), save=nothing)) == [0, 1, 2]
    assert not warned or "some samples come twice and others never" in str(caught[0].message)
