"""The position in a DataLoader: what is saved of it, and how a new process goes on at the same batch.

An epoch has a seed, drawn from torch's generator when it begins. The sampler draws from generators of its own, seeded
with it, and a worker process seeds its generators anew for each batch. So the order of the samples and what the workers
draw depend on nothing but that seed and the number of the batch: not on how often the training was interrupted, nor on
whether the workers are those of the epoch before (`persistent_workers`). What the main process draws while it loads a
batch comes from the global generators as ever; those are saved, and restored where the next batch is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from . import generators

END = object()


class Position:
    """Iterates over a DataLoader, can be saved after any batch, and goes on there in another process."""

    def __init__(self, loader: Any, skip: str = "exact", iterate: Callable[[], Iterator[Any]] | None = None) -> None:
        """`skip`: how a new process reaches the position, "exact" loads the batches before it again, "index" none.

        `iterate` returns the loader's own iterator, where `iter` would return ours.
        """
        if skip not in ("exact", "index"):
            raise ValueError(f"skip is {skip!r}; it has to be 'exact' or 'index'")
        self.loader = loader
        self.done = 0
        self.complete = False
        self._skip = skip
        self._iterate_loader = iterate or (lambda: iter(loader))
        self._keeps_its_own = iterate is None and _keeps_its_own(loader)
        self._epoch: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._indices: Indices | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position with the global generators, as tensors and numbers."""
        if self._resumed is not None:
            return self._resumed
        state = {**self._epoch, **self.between_epochs(), "done": self.done, "complete": self.complete}
        if self._indices is not None:
            state["fetched"] = {
                n: generators.portable(one) for n, one in self._indices.fetched.items() if n >= self.done
            }
        return state

    def between_epochs(self) -> dict[str, Any]:
        """Return the position before the first batch of the next epoch."""
        return {"done": 0, "complete": False, "now": generators.state(), "own": self.own()}

    def own(self) -> Any:
        """Return what the loader keeps itself: the states of its generators, or its `state_dict`."""
        if self._keeps_its_own:
            return self.loader.state_dict()
        return [generator.get_state() for generator in _own_generators(self.loader)]

    def set_own(self, own: Any) -> None:
        """Set what the loader keeps itself."""
        if self._keeps_its_own:
            self.loader.load_state_dict(own)
            return
        for generator, before in zip(_own_generators(self.loader), own):  # noqa: B905 (not in Python 3.9)
            generator.set_state(before)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position, at the next iteration."""
        self._resumed = dict(state)
        self.done, self.complete = int(state["done"]), bool(state["complete"])

    @property
    def is_resumed(self) -> bool:
        """Whether a position was loaded that no iteration has reached yet."""
        return self._resumed is not None

    def reset(self) -> None:
        """Begin another epoch."""
        self.done, self.complete = 0, False
        self._epoch, self._resumed = {}, None
        if self._indices is not None:
            self._indices.fetched = {}

    def batches(self, waiting: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """Yield the batches of an epoch from the position on; `waiting()` is called after each that is skipped."""
        resumed = self._resumed
        in_epoch = resumed is not None and "seed" in resumed
        if resumed is not None and (resumed["complete"] or not in_epoch):
            self.set_own(resumed["own"])
            generators.restore(resumed["now"])
            if resumed["complete"]:
                self._resumed = None
                return
        plan = resumed if resumed is not None and in_epoch else self._begin()
        self.done, self.complete = int(plan["done"]), False
        self._epoch = {name: plan[name] for name in ("seed", "generators", "start")}
        if self._keeps_its_own:
            result = self._iterate_its_own(plan)
        else:
            result = self._iterate(plan, waiting)
        for batch in result:
            self._resumed = None
            self.done += 1
            yield batch
        self._resumed = None
        self.complete = True

    def _begin(self) -> dict[str, Any]:
        self._resumed = None
        seed = generators.draw()
        own = [] if self._keeps_its_own else self.own()
        now = generators.state()
        return {"seed": seed, "generators": own, "start": now, "done": 0, "fetched": {}, "now": now}

    def _iterate(self, plan: dict[str, Any], waiting: Callable[[], None]) -> Iterator[Any]:
        loader, done = _inner(self.loader), int(plan["done"])
        by_index = done > 0 and self._skip == "index" and not _is_iterable(loader)
        if _is_iterable(loader) and getattr(loader, "_iterator", None) is not None:
            loader._iterator._shutdown_workers()  # their generators go on from the epoch before
            loader._iterator = None
        if self._indices is None:
            self._indices = Indices(loader)
        own = list(zip(_own_generators(self.loader), plan["generators"]))  # noqa: B905
        self._indices.arm(plan, done if by_index else 0, own)
        with self._indices.installed(loader):
            iterator = self._iterate_loader()
            first = next(iterator, END)
        if by_index:
            yield from _chain(first, iterator)
            return
        for number, batch in enumerate(_chain(first, iterator)):
            if number < done:
                waiting()
            else:
                yield batch

    def _iterate_its_own(self, plan: dict[str, Any]) -> Iterator[Any]:
        """Iterate over a loader such as torchdata's StatefulDataLoader, which keeps its position itself."""
        if "own" in plan:  # not an epoch that begins
            self.set_own(plan["own"])
        iterator = self._iterate_loader()
        generators.restore(plan["now"])  # it has drawn more or less, as it is the first one or not
        yield from iterator


class Indices:
    """Stands before the sampler of a loader: draws apart from the training, skips, and marks batches for workers.

    It has no reference to the loader, whose iterator refers to it: with one, only the garbage collector would find
    both, and torch then waits five seconds for each worker, which never learns that it is to end.
    """

    def __init__(self, loader: Any) -> None:
        self.fetched: dict[int, generators.CpuStates] = {}
        """The global generators before the main process loaded a batch, by its number; the newest few"""
        self._workers = loader.num_workers > 0
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self._sampler = getattr(loader, self._name)
        self._plan: tuple[dict[str, Any], int, list[tuple[Any, Any]]] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def arm(self, plan: dict[str, Any], skip: int, own: list[tuple[Any, Any]]) -> None:
        """Prepare the next iteration: the epoch's plan, how many batches to skip, and states of other generators."""
        self._plan = plan, skip, own
        self.fetched = {}

    @contextlib.contextmanager
    def installed(self, loader: Any) -> Iterator[None]:
        """Stand before the loader's sampler while an iterator is made, which keeps it."""
        loader.__dict__[self._name] = self  # DataLoader refuses it as an assignment
        try:
            yield
        finally:
            loader.__dict__[self._name] = self._sampler

    def __iter__(self) -> Iterator[Any]:
        if self._plan is None:  # an iteration that is not ours
            yield from self._sampler
            return
        (plan, skip, own), self._plan = self._plan, None
        restore = _Once(plan["now"])
        aside = generators.IsolatedGenerators(plan["seed"])
        for generator, before in own:
            generator.set_state(before)
        with aside:
            iterator = iter(self._sampler)
        for number in count():
            with aside:
                index = next(iterator, END)
            if index is END:
                restore()
                return
            if number < skip:
                continue
            if self._workers:
                restore()
                yield ForWorker(index, plan["seed"], number)
                continue
            if number >= plan["done"]:
                self._before_load(number, plan["fetched"].get(number), restore)
            elif number == 0:
                generators.restore(plan["start"])  # a stream that shuffles does so when it begins
            yield index

    def _before_load(self, number: int, before: dict[str, Any] | None, restore: _Once) -> None:
        if before is not None:
            generators.restore(before)
        else:
            restore()
        self.fetched[number] = generators.cpu_states()
        self.fetched.pop(number - 8, None)


class _Once:
    """Restores the global generators at the first call."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states: dict[str, Any] | None = states

    def __call__(self) -> None:
        if self._states is not None:
            generators.restore(self._states)
            self._states = None


class ForWorker:
    """The index of a batch on its way to a worker, which seeds its generators when it receives it."""

    def __init__(self, index: Any, seed: int, number: int) -> None:
        self.index, self.seed, self.number = index, seed, number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.index, self.seed, self.number)


def _received(index: Any, seed: int, number: int) -> Any:
    """Return the index in the worker, whose generators then depend on the epoch and the batch alone."""
    generators.seed(_mixed(seed, number))
    return index


def _mixed(seed: int, number: int) -> int:
    word = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "big") >> 1


class ByEpoch:
    """Stands before the sampler of a loader whose framework skips batches itself: each batch draws by its number.

    The generators are seeded with the epoch and the number of the batch while it is loaded, in a worker or in the main
    process, and are afterwards what they were. So it makes no difference which batches were loaded before.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        inner = _inner(loader)
        name = "batch_sampler" if inner.batch_sampler is not None else "sampler"
        self._sampler = getattr(inner, name)
        self._workers = inner.num_workers > 0
        self._seed, self._epoch = seed, 0
        self._aside: generators.IsolatedGenerators | None = None
        self._collate = inner.collate_fn
        inner.__dict__[name] = self
        inner.__dict__["collate_fn"] = self._collated

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, here and in the sampler."""
        self._epoch = epoch
        for one in (self._sampler, getattr(self._sampler, "sampler", None)):
            if callable(setter := getattr(one, "set_epoch", None)):
                setter(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number, index in enumerate(self._sampler):
            self._end()
            if self._workers:
                yield ForWorker(index, self._seed + self._epoch, number)
                continue
            self._aside = generators.IsolatedGenerators(_mixed(self._seed + self._epoch, number))
            self._aside.__enter__()
            yield index
        self._end()

    def _collated(self, samples: Any) -> Any:
        try:
            return self._collate(samples)
        finally:
            self._end()

    def _end(self) -> None:
        if self._aside is not None:
            self._aside.__exit__(None, None, None)
            self._aside = None


def length(loader: Any) -> int | None:
    """Return the number of batches of an epoch; None where a loader does not know it."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the number of the epoch in the loader's samplers that shuffle by it, such as DistributedSampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "batch_sampler", None)
    if hasattr(loader, "iteration"):  # of accelerate
        loader.iteration = epoch
    for one in (getattr(loader, "sampler", None), batch_sampler, inner, getattr(inner, "sampler", None)):
        if callable(setter := getattr(one, "set_epoch", None)):
            setter(epoch)


def _inner(loader: Any) -> Any:
    """Return the DataLoader in a loader that accelerate has prepared."""
    return loader.__dict__.get("base_dataloader", loader)


def _keeps_its_own(loader: Any) -> bool:
    """Whether a loader keeps its position itself: it has a state_dict, and is none of accelerate's wrappers."""
    return hasattr(_inner(loader), "state_dict") and hasattr(_inner(loader), "load_state_dict")


def _is_iterable(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _own_generators(loader: Any) -> list[Any]:
    """Return the generators that the loader and its samplers were given, in a fixed order."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    result: list[Any] = []
    for one in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(one, "generator", None)
        if (
            generator is not None
            and hasattr(generator, "get_state")
            and all(generator is not known for known in result)
        ):
            result.append(generator)
    return result


def _chain(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    if first is not END:
        yield first
        yield from others
