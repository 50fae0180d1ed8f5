"""Save and resume the training of the Trainer of Hugging Face's Transformers.

    arguments = TrainingArguments(output_dir=checkpoint.transformers_dir(), …)
    trainer = Trainer(…, args=arguments, callbacks=[checkpoint.transformers()])
    trainer.train(resume_from_checkpoint=checkpoint.transformers_path())

The Trainer writes its own checkpoints; the callback asks for one when the job is preempted, marks each as complete when
all ranks have written it, and leaves. `makeway.checkpoint` imports this module when one of the three is used.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

from makeway import checkpoint
from makeway.checkpointing.folder import _sync as sync

from . import loaders, ranks

COMPLETE = "makeway-complete"
"""Written into a checkpoint when all of it is on disk; a folder without it is skipped"""
_NAME = re.compile(r"checkpoint-(\d+)")


def transformers(every: int | str | None = None) -> Any:
    """Return a callback that lets the Trainer save after a notice, then leaves; also every 500 steps or "5m"."""
    checkpoint.requested()  # from here on a notice needs no signal
    return _callback_class()(every)


def transformers_dir(name: str = "trainer") -> str:
    """Return the `output_dir` for TrainingArguments, which all attempts of the job share; a name for each Trainer."""
    return str(checkpoint.dir / name)


def transformers_path(name: str = "trainer") -> str | None:
    """Return what `resume_from_checkpoint` takes: the newest checkpoint that is complete, or None."""
    if not checkpoint._on_cluster():
        return None
    home = Path(transformers_dir(name))
    listed = home.iterdir() if home.is_dir() else ()
    checkpoints = [
        (int(match[1]), path) for path in listed if (match := _NAME.fullmatch(path.name)) and _is_complete(path)
    ]
    return str(max(checkpoints)[1]) if checkpoints else None


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint was written to its end, by as many ranks as there are now; ValueError for another number."""
    try:
        size = int((folder / COMPLETE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    ranks.check_size(size, folder)
    return True


class TrainerEvents:
    """A callback without its base: the Trainer saves where it can, and the process leaves when that is complete."""

    def __init__(self, every: int | str | None) -> None:
        self._agreement = ranks.Agreement(every)
        self._leaving = False
        self._trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._trains = checkpoint._on_cluster()
        self._agreement.saved(state.global_step)
        if args.save_total_limit == 1 and self._trains:
            args.save_total_limit = 2  # the one before stays until the new one is complete
        if (loader := more.get("train_dataloader")) is not None:
            loaders.ByEpoch(loader, args.seed + 1000 * ranks.rank_and_size()[0])
        ranks.completed(False)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        checkpoint.report(step=state.global_step, total=state.max_steps)
        if state.global_step >= state.max_steps:
            control.should_save = control.should_save or self._trains  # what follows may be interrupted, too
        elif not float(state.epoch or 0.5).is_integer():  # at the end of an epoch its evaluation comes first
            self._ask(state, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._ask(state, control)
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._ask(state, control)
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint.requested()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._trains:
            return
        ranks.exchange([0])  # all have written their part
        if args.should_save:
            _mark(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            checkpoint.saved(state.global_step)
        ranks.exchange([0])
        self._agreement.saved(state.global_step)
        if self._leaving:
            checkpoint.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if self._trains and "loss" in numbers:
            checkpoint.report(loss=numbers["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trains:
            ranks.completed(True)
        self._trains = False

    def _ask(self, state: Any, control: Any) -> None:
        if not self._trains or state.global_step >= state.max_steps:
            return
        save, leave = self._agreement.ask(state.global_step)
        self._leaving = self._leaving or leave
        control.should_save = control.should_save or save or self._leaving


@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8 has no functools.cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    return type("MakeWay", (TrainerEvents, TrainerCallback), {})


def _mark(folder: Path) -> None:
    """Mark a checkpoint as complete, once it is on disk."""
    sync(folder)
    with open(folder / COMPLETE, "w", encoding="ascii") as file:
        file.write(str(ranks.rank_and_size()[1]))
        file.flush()
        os.fsync(file.fileno())
    sync(folder)
