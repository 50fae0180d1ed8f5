"""Save and resume a training loop of PyTorch as it is written: epochs, batches and validation.

    state = checkpoint.torch_state(model=model, optimizer=optimizer, scheduler=scheduler, every="5m")
    for epoch in state.epochs(10):
        for batch in state.batches(loader):
            …                                    # one step
        for batch in state.watch(validation):
            …

A notice is noticed before each batch and in validation; the checkpoint holds every part, the position in the data and
all random generators, so that the resumed training computes what the undisturbed one would have. `makeway.checkpoint`
imports this module when `torch_state` is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from makeway import checkpoint

from . import generators, loaders, ranks
from .snapshot import Gradients, Snapshot, read, write

FILE = "state.pt"
"""What all ranks share, in the folder of a checkpoint; each rank adds a file of its own."""
INTERLEAVED = (
    "Two loops over state.batches(…) run at the same time, one inside the other or in zip(…). A checkpoint has the "
    "position of one loop only, so the job could not resume. Put both data sets into one loader, such as a DataLoader "
    "of torch.utils.data.StackDataset, or run one loop after the other."
)


def torch_state(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    every: int | str | None = None,
    skip: str = "exact",
    name: str = "",
    keep: int = checkpoint.KEEP,
    **more: Any,
) -> TrainingState:
    """Return the state of a training, resumed from the newest checkpoint if there is one.

    Each part is an object with `state_dict` and `load_state_dict`, or a list or dictionary of such; `more` are further
    ones under names of your own. Call it when all are made and, with torch.distributed, after its initialisation.
    `every`: also save every 500 steps (`500`) or 5 minutes (`"5m"`). `skip`: how a resumed epoch gets to its batch,
    "exact" loads and drops the ones before it, "index" leaves them out; it differs only for datasets that keep a state
    of their own. `name`: two states in one job need names. Outside of a job it neither saves nor resumes.
    """
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "ema": ema, **more}
    return TrainingState(dict(_flat(named)), every=every, skip=skip, name=name, keep=keep)


def _flat(parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every part with its name, those in lists and dictionaries as `name.0`; TypeError for what has no state."""
    for name, part in parts.items():
        if part is None:
            continue
        if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            yield f"{prefix}{name}", part
        elif isinstance(part, (list, tuple)):
            yield from _flat({str(number): one for number, one in enumerate(part)}, f"{prefix}{name}.")
        elif isinstance(part, Mapping):
            yield from _flat({str(key): one for key, one in part.items()}, f"{prefix}{name}.")
        else:
            raise TypeError(f"{prefix}{name} is a {type(part).__name__}, which has no state_dict and load_state_dict")


class TrainingState:
    """The parts of a training and how far it is; iterate with `epochs`, `batches` and `watch`."""

    def __init__(self, parts: dict[str, Any], *, every: int | str | None, skip: str, name: str, keep: int) -> None:
        ranks.claim(name, "torch_state")
        self.step = 0
        """Batches trained so far, over all epochs"""
        self.epoch = 0
        """Epochs that are complete, which is the number of the one that runs"""
        self._parts = parts
        self._skip, self._name, self._keep = skip, name, keep
        self._gradients = Gradients(parts)
        self._positions: dict[int, loaders.Position] = {}
        self._own: list[Any] = []
        """What the loaders of the checkpoint kept themselves, in the order of their first use"""
        self._running: loaders.Position | None = None
        self._phase = 0
        """How many iterations over batches this epoch has had"""
        self._iterations = 0
        """How many iterations over batches this process has started"""
        self._resumed: dict[str, Any] | None = None
        """The checkpoint's progress, until the training has reached it"""
        self._edge: Snapshot | None = None
        """The state after the last batch of an epoch or before its first one, where a validation may run"""
        self._kept: tuple[int, ...] = ()
        self._agreement = ranks.Agreement(every)
        self._lengths: dict[int, int | None] = {}
        self._number: int | None = None
        checkpoint.requested()  # from here on a notice needs no signal
        self._folder = ranks.newest(name)
        if self._folder is not None:
            self._load(self._folder)

    @property
    def batch(self) -> int:
        """The number of the current batch in its epoch, from 0; `enumerate` would begin anew after a resume."""
        return max(0, self._running.done - 1) if self._running is not None else 0

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are not complete, up to `number`; then save and report the end.

        After a `break` the end is not reported: call `checkpoint.done()`.
        """
        self._number = number
        ranks.completed(False)
        while self.epoch < number:
            self._begin_epoch()
            yield self.epoch
            self.epoch, self._phase, self._running, self._resumed = self.epoch + 1, 0, None, None
            self._edge = self._here()
            if self.epoch < number:
                self._between(self._edge)
        if self._edge is not None:
            self._save_and_go_on(self._edge)
        if not self._name:
            ranks.completed(True)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a DataLoader that are not trained yet; save where due, and leave after a notice.

        One loop at a time: RuntimeError where another one starts before it ends.
        """
        phase, self._phase = self._phase, self._phase + 1
        self._lengths[phase] = loaders.length(loader)
        if self._resumed is not None and phase < self._resumed["phase"]:
            return
        position = self._running = self._position(loader)
        if self._resumed is not None:
            self._reach(position)
        self._iterations += 1
        own = self._iterations
        self._between(None)
        for batch in position.batches(self._leave_in_replay):
            self._edge = None
            self._gradients.forget()
            yield batch
            if self._iterations != own:
                raise RuntimeError(INTERLEAVED)
            self.step += 1
            checkpoint.report(step=self.step, total=self._total())
            self._between(None)
        self._edge = self._here()
        self._between(self._edge)

    def watch(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a validation; after a notice, save the state of the last step, and leave.

        With several ranks, inside of a loop over `batches`, or where the validation has changed the parts (such as by
        putting averaged weights into the model), it goes on to its end, and the next step saves.
        """
        alone = ranks.rank_and_size()[1] == 1
        for batch in loader:
            if checkpoint.requested() and alone and self._edge is not None and not self._edge.is_changed():
                self._between(self._edge)
            yield batch

    def _begin_epoch(self) -> None:
        self._phase = 0
        if self._resumed is not None and self._resumed["position"] is None:
            generators.restore(self._resumed["generators"])
            self._resumed = None
        if self._edge is None and self._resumed is None:
            self._edge = self._here()
        if self._kept == () and self._edge is not None:
            self._kept = self._edge.key  # nothing is lost where nothing was trained

    def _position(self, loader: Any) -> loaders.Position:
        if id(loader) not in self._positions:
            position = loaders.Position(loader, self._skip)
            if len(self._positions) < len(self._own):
                position.set_own(self._own[len(self._positions)])
            self._positions[id(loader)] = position
        loaders.set_epoch(loader, self.epoch)
        self._positions[id(loader)].reset()
        return self._positions[id(loader)]

    def _reach(self, position: loaders.Position) -> None:
        """Go on where the checkpoint was made; the code before may have changed the parts: they are read again."""
        assert self._folder is not None
        self._load(self._folder)
        assert self._resumed is not None
        position.load_state_dict(self._resumed["position"])
        self._resumed = None

    def _between(self, edge: Snapshot | None) -> None:
        """Save if that is due, save and leave if the job is preempted; between two steps, on all ranks."""
        save, leave = self._agreement.ask(self.step)
        if leave:
            self._save(edge or self._here())
            checkpoint.stop()
        elif save:
            self._save_and_go_on(edge or self._here())

    def _leave_in_replay(self) -> None:
        """Leave after a notice while the batches before the checkpoint are loaded again; it is still the newest."""
        if self._agreement.ask(self.step)[1]:
            checkpoint.stop()

    def _total(self) -> int | None:
        lengths = self._lengths.values()
        return None if self._number is None or None in lengths else self._number * sum(n for n in lengths if n)

    def _here(self) -> Snapshot:
        """Return the state of this moment; tensors by reference."""
        position = self._running.state_dict() if self._running is not None else None
        progress = {
            "epoch": self.epoch,
            "phase": max(0, self._phase - 1),
            "step": self.step,
            "position": position,
            "own": [one.own() for one in self._positions.values()],
            "generators": generators.state() if position is None else None,
        }
        return Snapshot(self._states(), self._gradients.waiting(), progress)

    def _states(self) -> dict[str, Any]:
        """Return the states of all parts; on all ranks, because sharded parts gather theirs."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _save_and_go_on(self, state: Snapshot) -> None:
        """Save; a failure is a warning, because the training is well and older checkpoints are as they were."""
        with self._agreement.going_on(self.step):
            self._save(state)

    def _save(self, state: Snapshot) -> None:
        if state.key == self._kept or not checkpoint._on_cluster():
            return
        _, size = ranks.rank_and_size()
        with checkpoint.saving(state.step, keep=self._keep, together=size > 1, name=self._name) as folder:
            self._write(folder, state)
            own = {**state.progress, "gradients": state.gradients, "size": size}
            write(own, ranks.rank_file(folder))
        self._kept = state.key
        self._agreement.saved(state.step)

    def _write(self, folder: Path, state: Snapshot) -> None:
        """Write what all ranks share."""
        if ranks.rank_and_size()[0] == 0:
            write(state.parts, folder / FILE)

    def _load(self, folder: Path) -> None:
        """Read a checkpoint into the parts; the position in the data follows where the training reaches it."""
        path = ranks.rank_file(folder)
        own = read(path if path.exists() else folder / "rank-0.pt")
        ranks.check_size(int(own["size"]), folder)
        self._read(folder)
        self._gradients.load(own["gradients"])
        self.epoch, self.step, self._resumed, self._own = int(own["epoch"]), int(own["step"]), own, own["own"]
        self._kept = Snapshot.key_of(own)
        self._agreement.saved(self.step)

    def _read(self, folder: Path) -> None:
        """Read what all ranks share."""
        states = read(folder / FILE)
        if missing := sorted(set(self._parts) - set(states)):
            raise ValueError(
                f"{folder} has no state of {', '.join(missing)}; it has {', '.join(sorted(states))}. Give torch_state "
                "the parts that the checkpoint was made with, or remove it to begin anew."
            )
        for name, part in self._parts.items():
            part.load_state_dict(states[name])
