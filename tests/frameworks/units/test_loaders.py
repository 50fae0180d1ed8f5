"""A position in a DataLoader is reached again exactly, whatever draws the order and the samples."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from makeway.frameworks import generators
from makeway.frameworks.lightning import resumable
from makeway.frameworks.loaders import ByEpoch, Position
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class Noisy(Dataset[Any]):
    """Samples that draw from all three libraries."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class Streamed(IterableDataset[Any]):
    """A stream in an order that it draws when it begins."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(40).tolist()


class Lazy:
    """A sampler that draws while it is iterated, from `random`."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(40) for _ in range(40))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "with a generator": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator()),
    "with a sampler's generator": lambda: DataLoader(Noisy(), 4, sampler=RandomSampler(Noisy(), generator=generator())),
    "with replacement": lambda: DataLoader(
        Noisy(), 4, sampler=RandomSampler(Noisy(), replacement=True, num_samples=40)
    ),
    "weighted": lambda: DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20 + [3.0] * 20, 40)),
    "by a sampler that draws lazily": lambda: DataLoader(Noisy(), batch_size=4, sampler=Lazy()),
    "without batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "of two workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2),
    "of workers that persist": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "of workers with a generator": lambda: DataLoader(
        Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    "streamed": lambda: DataLoader(Streamed(), batch_size=4),
    "streamed by a worker that persists": lambda: DataLoader(Streamed(), 4, num_workers=1, persistent_workers=True),
    "of torchdata": lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
}


def seed() -> None:
    generators.seed(7)


def epoch(position: Position, batches: int | None = None) -> list[str]:
    """Train some batches: each draws in the main process, as dropout does."""
    done = []
    for batch in position.batches():
        done.append(f"{batch} {torch.rand(()).item()} {random.random()}")
        if len(done) == batches:
            break
    return done


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("skip", ["exact", "index"])
def test_a_new_process_goes_on_at_the_same_batch(kind: str, skip: str) -> None:
    seed()
    whole = Position(LOADERS[kind](), skip)
    first = epoch(whole)
    whole.reset()
    second = epoch(whole)
    assert first != second, "another order in each epoch"

    seed()
    position = Position(LOADERS[kind](), skip)
    assert epoch(position) == first
    position.reset()
    seen: list[str] = []
    for part in (3, 1, 2):  # several resumes in one epoch
        seen += epoch(position, part)
        state = position.state_dict()
        torch.manual_seed(99)  # the new process has other generators
        random.seed(99)
        position = Position(LOADERS[kind](), skip)
        position.load_state_dict(state)
    assert seen + epoch(position) == second


@pytest.mark.parametrize("kind", LOADERS)
def test_the_end_of_an_epoch_is_no_epoch_of_its_own(kind: str) -> None:
    seed()
    whole = Position(LOADERS[kind]())
    epoch(whole)
    state = whole.state_dict()
    whole.reset()
    second = epoch(whole)

    position = Position(LOADERS[kind]())
    position.load_state_dict(state)
    assert epoch(position) == [], "the first epoch is complete"
    position.reset()
    assert epoch(position) == second


def test_what_a_loader_draws_leaves_the_training_alone() -> None:
    """The same random numbers for the model, with any number of workers, of this epoch or from the one before."""
    seen = set()
    for kind in ("of two workers", "of workers that persist"):
        seed()
        position = Position(LOADERS[kind]())
        epoch(position)
        position.reset()
        epoch(position)
        seen.add(torch.rand(()).item())
    assert len(seen) == 1


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Leave cycles of references where they are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("batches", [3, 10, None])
@pytest.mark.parametrize("kind", sorted(LOADERS.keys() - {"of torchdata"}))
@pytest.mark.parametrize("use", [Position, resumable])
def test_nothing_keeps_a_loader_that_is_out_of_use(kind: str, use: Callable[..., Any], batches: int | None) -> None:
    """The garbage collector would end its workers, too, but waits five seconds for each of them."""
    loader = LOADERS[kind]()
    used = use(loader)
    iterated = iter(used) if use is resumable else used.batches()
    assert len(list(islice(iterated, batches))) == (batches or (10 if "without" not in kind else 40))
    known = weakref.ref(loader)
    del loader, used, iterated
    assert known() is None


def test_the_order_of_other_iterations_is_untouched() -> None:
    loader = DataLoader(list(range(8)), batch_size=2)
    position = Position(loader)
    assert len(list(position.batches())) == 4
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert type(loader.batch_sampler).__name__ == "BatchSampler"


def test_a_loader_that_reads_ahead_gets_the_same_samples() -> None:
    class Ahead:
        """Fetches a batch before it yields the one before, as accelerate does."""

        def __init__(self) -> None:
            self.base_dataloader = DataLoader(Noisy(), batch_size=4, shuffle=True)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.base_dataloader, name)

        def __iter__(self) -> Iterator[Any]:
            before = None
            for batch in self.base_dataloader:
                if before is not None:
                    yield before
                before = batch
            yield before

    seed()
    whole = epoch(Position(Ahead()))
    for done in (1, 5, 9, 10):
        seed()
        position = Position(Ahead())
        seen = epoch(position, done)
        state = position.state_dict()
        torch.manual_seed(99)
        position = Position(Ahead())
        position.load_state_dict(state)
        assert seen + epoch(position) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_by_number_do_not_depend_on_those_before(workers: int) -> None:
    from accelerate import Accelerator, skip_first_batches

    def prepared() -> Any:
        torch.manual_seed(3)
        loader = Accelerator(cpu=True).prepare(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers))
        ByEpoch(loader, 5)
        loader.set_epoch(2)
        return loader

    whole = [str(batch) for batch in prepared()]
    loader = skip_first_batches(prepared(), 3)
    loader.batch_sampler.batch_sampler.set_epoch(2)
    drawn = torch.get_rng_state()
    assert [str(batch) for batch in loader] == whole[3:]
    if workers == 0:
        assert len(whole) == 10
        torch.set_rng_state(drawn)


def test_an_unknown_way_to_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="'exact' or 'index'"):
        Position([], skip="fast")
