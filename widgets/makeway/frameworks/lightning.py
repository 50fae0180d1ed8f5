"""Save and resume the training of PyTorch Lightning's Trainer.

    trainer = Trainer(callbacks=[checkpoint.lightning(every="10m")])
    trainer.fit(model, checkpoint.resumable(loader), ckpt_path=checkpoint.lightning_path())

`makeway.checkpoint` imports this module when one of the three is used; for `lightning` and for `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from makeway import checkpoint

from . import generators, loaders, ranks
from .snapshot import read, write

FILE = "last.ckpt"


def lightning(every: int | str | None = None, keep: int = checkpoint.KEEP) -> Any:
    """Return a callback that saves every `every` steps (500) or minutes ("5m") and, after a notice, saves and leaves.

    It saves after an optimizer's step; with a validation due, after that. All ranks save and leave at the same step.
    """
    checkpoint.requested()  # from here on a notice needs no signal
    return _callback_class(_callback_base())(every, keep)


def lightning_path() -> str | None:
    """Return what `ckpt_path` of `Trainer.fit` takes: the newest checkpoint, or None."""
    newest = checkpoint.latest() if checkpoint._on_cluster() else None
    return None if newest is None else str(newest / FILE)


def resumable(loader: Any) -> Any:
    """Return the training's DataLoader, which from now on can go on in the middle of an epoch, at the same samples.

    The loader itself, so that Lightning finds a DataLoader. One that keeps its position itself is left as it is.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        loader.__class__ = _resumable_class(type(loader))  # type: ignore[arg-type]
    return loader


class Resumable:
    """What `resumable` adds to a DataLoader: the position, as Lightning asks for it."""

    _plain: type
    """The class of the loader before"""

    def makeway_position(self) -> loaders.Position:
        """Return the position in this loader."""
        if "_makeway_position" not in self.__dict__:
            here = weakref.proxy(self)  # the loader keeps its position, which must not keep the loader
            own = loaders.Position(here, iterate=lambda: here._plain.__iter__(here))
            self.__dict__["_makeway_position"] = own
        position: loaders.Position = self.__dict__["_makeway_position"]
        return position

    def __iter__(self) -> Iterator[Any]:
        position = self.makeway_position()
        if not position.is_resumed:
            position.reset()
        return position.batches()

    def state_dict(self) -> dict[str, Any]:
        """Return the position; at the end of an epoch, that before the next one."""
        position = self.makeway_position()
        ended = position.complete or position.done == loaders.length(self)
        return position.between_epochs() if ended and not position.is_resumed else position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position, at the next iteration."""
        self.makeway_position().load_state_dict(state)


@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8 has no functools.cache
def _resumable_class(kind: Any) -> type:
    names = ("makeway_position", "__iter__", "state_dict", "load_state_dict")
    # Not a second base: a loader that is there could not become one.
    return type(
        f"Resumable{kind.__name__}", (kind,), {"_plain": kind, **{name: vars(Resumable)[name] for name in names}}
    )


def _callback_base() -> Any:
    """Return the Callback of the package that the script uses: they are two that do not know each other."""
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" not in sys.modules:
        try:
            import lightning.pytorch as package
        except ImportError:
            import pytorch_lightning as package
    else:
        package = sys.modules.get("lightning.pytorch") or sys.modules["pytorch_lightning"]
    return package.Callback


class TrainerHooks:
    """A callback without its base: saves, resumes and leaves at hooks at which the Trainer's own counters agree."""

    def __init__(self, every: int | str | None, keep: int) -> None:
        self._agreement = ranks.Agreement(every)
        self._keep = keep

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self in trainer.callbacks:  # the last one, so that a checkpoint holds what the others did
            trainer.callbacks.remove(self)
            trainer.callbacks.append(self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ranks.completed(False)
        self._agreement.saved(trainer.global_step)
        newest = Path(os.fspath(trainer.ckpt_path)).parent if trainer.ckpt_path else None
        ranks.same(newest)  # each has called `lightning_path` before there were ranks
        if newest is not None:
            _resume_rank(trainer, newest)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        _report(trainer, batch_idx)
        if loop._should_accumulate() or loop._num_ready_batches_reached():
            return  # gradients are not in a checkpoint; the end of an epoch has a hook of its own
        if not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            self._between(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        checkpoint.requested()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if fitting and not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._between(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.fit_loop.done:
            self._between(trainer, epoch_ended=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with self._agreement.going_on(trainer.global_step):
            self._save(trainer, epoch_ended=True)
        ranks.completed(True)

    def _between(self, trainer: Any, epoch_ended: bool = False) -> None:
        save, leave = self._agreement.ask(trainer.global_step)
        if leave:
            self._save(trainer, epoch_ended)
            _leave(trainer)
        elif save:
            with self._agreement.going_on(trainer.global_step):
                self._save(trainer, epoch_ended)

    def _save(self, trainer: Any, epoch_ended: bool) -> None:
        if not checkpoint._on_cluster():
            return
        step, size = trainer.global_step, trainer.world_size
        with checkpoint.saving(step, keep=self._keep, together=size > 1) as folder:
            trainer.save_checkpoint(folder / FILE)
            positions = [
                loader.makeway_position().between_epochs() if epoch_ended else loader.state_dict()
                for loader in _resumables(trainer)
            ]
            own = {"size": size, "positions": positions, "generators": generators.state()}
            write(own, ranks.rank_file(folder))
        self._agreement.saved(step)


@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8 has no functools.cache
def _callback_class(base: Any) -> Any:
    return type("MakeWay", (TrainerHooks, base), {})


def _resumables(trainer: Any) -> list[Any]:
    """Return the training's loaders that `resumable` has returned, in order."""
    combined = trainer.fit_loop._combined_loader
    return [
        loader for loader in (combined.flattened if combined is not None else ()) if hasattr(loader, "makeway_position")
    ]


def _resume_rank(trainer: Any, folder: Path) -> None:
    """Load what this rank has in a checkpoint besides Lightning's own file."""
    path = ranks.rank_file(folder)
    if not (folder / "rank-0.pt").exists():
        return  # a checkpoint of other origin
    own = read(path if path.exists() else folder / "rank-0.pt")
    ranks.check_size(int(own["size"]), folder)
    result = _resumables(trainer)
    if len(result) != len(own["positions"]):
        raise ValueError(
            f"{folder} was saved with {len(own['positions'])} resumable loaders, and now there are {len(result)}: pass "
            "the training's DataLoader through checkpoint.resumable(…), each time."
        )
    for loader, state in zip(result, own["positions"]):  # noqa: B905 (not in Python 3.9)
        loader.load_state_dict(state)
    generators.restore(own["generators"])


def _leave(trainer: Any) -> None:
    """Leave; ranks that Lightning started itself with code 0, because it kills the others when one of them fails."""
    try:
        checkpoint.stop()
    except SystemExit:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if trainer.global_rank > 0 and type(environment).__name__ == "LightningEnvironment":
            raise SystemExit(0) from None
        raise


def _report(trainer: Any, batch_idx: int) -> None:
    total = trainer.estimated_stepping_batches
    checkpoint.report(step=trainer.global_step, total=int(total) if total != float("inf") else None)
    if trainer.log_every_n_steps and batch_idx % trainer.log_every_n_steps == 0:
        metrics: dict[str, Any] = {str(name): float(value) for name, value in trainer.callback_metrics.items()}
        checkpoint.report(**{name: value for name, value in metrics.items() if name not in ("step", "total")})
