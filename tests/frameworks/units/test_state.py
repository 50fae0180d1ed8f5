"""The state of a training: what is in its files, what is refused, and what is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import anew
from makeway import checkpoint
from makeway.frameworks import generators, ranks
from makeway.frameworks.snapshot import Gradients, Snapshot, read, write
from torch.utils.data import DataLoader

PROGRESS = {"epoch": 0, "phase": 0, "step": 0, "position": None}


def training(**more: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, checkpoint.torch_state(model=model, optimizer=optimizer, **more)


def loader() -> Any:
    return DataLoader(torch.ones(8, 2), batch_size=2, shuffle=True)


def interrupted(job: Path, at: int, **more: Any) -> Any:
    """Train until the notice before batch `at`; return what was trained."""
    anew()
    _, state = training(**more)
    with pytest.raises(SystemExit) as remaining:  # noqa: PT012
        for _ in state.epochs(3):
            for _ in state.batches(loader()):
                if state.step + 1 == at:
                    job.write_text("{}")
    assert remaining.value.code == 75
    job.unlink()
    return state


def test_a_checkpoint_is_read_with_weights_only(job: Path) -> None:
    np.random.rand()
    interrupted(job, 2)
    newest = checkpoint.latest()
    assert newest is not None
    for name in ("state.pt", "rank-0.pt"):
        assert torch.load(newest / name, weights_only=True)


def test_the_generators_go_on_where_they_were(tmp_path: Path) -> None:
    np.random.randn()  # leaves half a pair behind
    write(generators.state(), tmp_path / "file")
    drawn = np.random.randn(3).tolist(), torch.rand(2).tolist()
    np.random.seed(0)
    torch.manual_seed(0)
    generators.restore(torch.load(tmp_path / "file", weights_only=True))
    assert (np.random.randn(3).tolist(), torch.rand(2).tolist()) == drawn


def test_a_resumed_training_does_each_step_once(job: Path) -> None:
    done = 0
    for at in (1, 3, 4, 5, 9):
        state = interrupted(job, at)
        assert state.step == at
        done = at
    anew()
    _, state = training()
    steps = [state.step for _ in state.epochs(3) for _ in state.batches(loader())]
    assert steps == list(range(done, 12))
    assert json.loads((job.parent / "progress.json").read_text())["completed_at"]


def test_after_the_end_nothing_is_trained_again(job: Path) -> None:
    for _ in range(2):
        anew()
        model, state = training()
        for _ in state.epochs(2):
            for _ in state.batches(loader()):
                with torch.no_grad():
                    model.weight += 1
        assert state.step == 8
        kept = checkpoint.latest()
        assert kept is not None
        assert torch.equal(read(kept / "state.pt")["model"]["weight"], model.weight)


def test_outside_of_a_job_nothing_is_saved_and_nothing_resumed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(job, 3)
    monkeypatch.delenv("MAKEWAY_JOB_ID")
    _, state = training(every=1)
    before = sorted((job.parent / "checkpoints").iterdir())
    assert sum(1 for _ in state.epochs(1) for _ in state.batches(loader())) == 4
    assert sorted((job.parent / "checkpoints").iterdir()) == before


def test_it_saves_every_few_steps(job: Path) -> None:
    _, state = training(every=3, keep=5)
    for _ in state.epochs(2):
        for _ in state.batches(loader()):
            pass
    assert [path.name for path in sorted((job.parent / "checkpoints").glob("step-*"))] == [
        "step-000003", "step-000006", "step-000008",
    ]  # fmt: skip


def test_a_save_that_fails_between_ends_no_training(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Breaks:
        def state_dict(self) -> dict[str, Any]:
            return {"step": Unpicklable()}

        def load_state_dict(self, state: Any) -> None: ...

    _, state = training(every=2, breaks=Breaks())
    assert sum(1 for _ in state.epochs(1) for _ in state.batches(loader())) == 4
    assert "step 2 was not saved, and the training goes on" in capsys.readouterr().err


class Unpicklable:
    def __deepcopy__(self, memo: Any) -> Unpicklable:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def test_two_states_without_names_are_refused(job: Path) -> None:
    training()
    with pytest.raises(RuntimeError, match="a name of its own"):
        training()


def test_states_with_names_are_kept_apart(job: Path) -> None:
    for name, steps in (("first", 3), ("second", 6)):
        interrupted(job, steps, name=name)
    anew()
    assert training(name="first")[1].step == 3
    assert training(name="second")[1].step == 6


def test_another_number_of_ranks_is_refused(job: Path) -> None:
    interrupted(job, 2)
    newest = checkpoint.latest()
    assert newest is not None
    own = read(newest / "rank-0.pt")
    write({**own, "size": 4}, newest / "rank-0.pt")
    anew()
    with pytest.raises(ValueError, match="saved by 4 ranks, and now there is 1"):
        training()


def test_a_part_that_the_checkpoint_lacks_is_named(job: Path) -> None:
    interrupted(job, 2)
    anew()
    with pytest.raises(ValueError, match=r"has no state of ema; it has model, optimizer"):
        training(ema=torch.nn.Linear(2, 1))


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model\.1 is a int"):
        checkpoint.torch_state(model=[torch.nn.Linear(1, 1), 3])


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("form", ["zipped", "nested"])
def test_two_loops_over_batches_at_the_same_time_are_refused(form: str) -> None:
    """Their positions are not saved together: a resumed job left out the rest of the epoch, and said nothing."""
    first, second = (DataLoader(list(range(number)), batch_size=2) for number in (8, 4))
    state = checkpoint.torch_state(model=torch.nn.Linear(1, 1))
    for _ in state.epochs(1):
        with pytest.raises(RuntimeError, match="Two loops"):  # noqa: PT012
            if form == "zipped":
                list(zip(state.batches(first), state.batches(second), strict=False))
            for _ in state.batches(first):
                list(state.batches(second))
        break


@pytest.mark.usefixtures("job")
def test_loops_that_are_left_early_may_follow_each_other() -> None:
    first, second = (DataLoader(list(range(number)), batch_size=2) for number in (8, 4))
    state = checkpoint.torch_state(model=torch.nn.Linear(1, 1))
    for _ in state.epochs(2):
        remaining = state.batches(first)
        next(remaining)  # as a progress bar keeps it
        assert len(list(state.batches(second))) == 2
        assert len(list(state.batches(first))) == 4


def test_a_sharded_part_is_refused() -> None:
    class DTensor(torch.Tensor): ...

    with pytest.raises(TypeError, match=r"torch\.distributed\.checkpoint"):
        Snapshot({"model": {"weight": torch.ones(1).as_subclass(DTensor)}}, {}, PROGRESS)


def test_a_snapshot_notices_what_was_written_to_its_tensors() -> None:
    model = torch.nn.BatchNorm1d(2)
    snapshot = Snapshot({"model": model.state_dict()}, {}, PROGRESS)
    model.eval()
    model(torch.ones(2, 2))
    assert not snapshot.is_changed()
    model.train()
    model(torch.ones(2, 2))
    assert snapshot.is_changed()


def test_only_gradients_that_no_optimizer_has_used_are_kept() -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    used = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients({"model": model, "other": other, "optimizer": used})
    (model(torch.ones(1, 1)) + other(torch.ones(1, 1))).sum().backward()
    assert sorted(gradients.waiting()) == ["model.bias", "model.weight", "other.bias", "other.weight"]
    used.step()
    assert sorted(gradients.waiting()) == ["other.bias", "other.weight"]


def test_a_state_with_other_objects_is_read_all_the_same(tmp_path: Path) -> None:
    write({"best": np.float64(0.5), "path": Path("x")}, tmp_path / "file")
    assert read(tmp_path / "file")["path"] == Path("x")


@pytest.mark.parametrize("every", [0, "5 parsecs", "-1m"])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every is"):
        ranks.Agreement(every)
