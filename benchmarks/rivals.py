"""The six policies that the authors of the openb study published, rebuilt from their text to check our harness.

Every score is an integer, higher is better; ties go to the first node of the run's order, as in the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from makeway_quota.engine.snapshot import GPU

from .openb import Machine, Task

Array = npt.NDArray[Any]
MAX_CPU, MAX_GPU = 128_000, 8 * GPU
"""The largest node, which the scores are measured against."""
COVER = 0.95
"""FGD looks at the most popular shapes that make up so much of the tasks."""


class Rival:
    """Nodes as arrays; subclasses say how good each node is for a task."""

    def __init__(self, nodes: Sequence[Machine], mix: Iterable[Task], seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.cpu = np.array([n.cpu for n in nodes])
        self.memory = np.array([n.memory for n in nodes])
        self.devices = np.array([n.gpus for n in nodes])
        self.free = np.where(np.arange(8) < self.devices[:, None], GPU, 0)
        self.names = sorted({n.model for n in nodes})
        self.model = np.array([self.names.index(n.model) for n in nodes])

    def place(self, task: Task) -> bool:
        """Place the task on the best node; False if it fits nowhere."""
        fits = (self.cpu >= task.cpu) & (self.memory >= task.memory)
        if task.models:
            fits &= np.isin(self.model, [self.names.index(m) for m in task.models if m in self.names])
        if task.devices:
            fits &= (self.free >= task.milli).sum(axis=1) >= task.devices
        rows = np.flatnonzero(fits)
        if not rows.size:
            return False
        at = int(rows[self.score(task, rows).argmax()])
        if task.devices:
            self.free[at, self.choose(task, at)] -= task.milli
        self.cpu[at] -= task.cpu
        self.memory[at] -= task.memory
        self.placed(task, at)
        return True

    def score(self, task: Task, rows: Array) -> Array:
        """Score the nodes on which it fits."""
        raise NotImplementedError

    def choose(self, task: Task, at: int) -> Array:
        """Choose the devices of a node: those with the least left that have enough."""
        able = np.flatnonzero(self.free[at] >= task.milli)
        return able[np.argsort(self.free[at, able], kind="stable")[: task.devices]]

    def placed(self, task: Task, at: int) -> None:
        """Take note of where a task went."""


class Random(Rival):
    """Any node, any device."""

    def score(self, task: Task, rows: Array) -> Array:
        """Score by chance."""
        return self.chance.random(len(rows))

    def choose(self, task: Task, at: int) -> Array:
        """Choose by chance."""
        able = np.flatnonzero(self.free[at] >= task.milli)
        return self.chance.permutation(able)[: task.devices]


class DotProd(Rival):
    """The smallest product of what is free and what is asked."""

    def score(self, task: Task, rows: Array) -> Array:
        """Score by 1 − (cpu · cpu + gpu · gpu) / 2, each as a part of the largest node."""
        product = self.cpu[rows] * (task.cpu / MAX_CPU**2) + self.free[rows].sum(axis=1) * (task.gpus / MAX_GPU**2)
        score: Array = np.floor(100 * (1 - product / 2))
        return score


class BestFit(Rival):
    """The node that is left with the least."""

    def score(self, task: Task, rows: Array) -> Array:
        """Score by what is left of CPU and GPUs, half and half."""
        cpu = (self.cpu[rows] - task.cpu) / MAX_CPU
        gpu = (self.free[rows].sum(axis=1) - task.gpus) / MAX_GPU
        score: Array = np.floor(100 * (1 - (0.5 * cpu + 0.5 * gpu)))
        return score


class GpuClustering(Rival):
    """Tasks of the same number of GPUs together."""

    def __init__(self, nodes: Sequence[Machine], mix: Iterable[Task], seed: int) -> None:
        super().__init__(nodes, mix, seed)
        self.kinds: list[Counter[int]] = [Counter() for _ in nodes]

    @staticmethod
    def _kind(task: Task) -> int:
        return 0 if task.milli < GPU else task.devices

    def score(self, task: Task, rows: Array) -> Array:
        """Score same kind only, then same kind among others, then idle, then other kinds."""
        if not task.devices:
            return np.zeros(len(rows))
        kind = self._kind(task)
        base = [
            (75 if len(self.kinds[at]) == 1 else 50) if self.kinds[at][kind] else 0 if self.kinds[at] else 25
            for at in rows
        ]
        score: Array = np.array(base) + 25 * (MAX_GPU - self.free[rows].sum(axis=1)) // MAX_GPU
        return score

    def placed(self, task: Task, at: int) -> None:
        """Remember the kind."""
        self.kinds[at] = +self.kinds[at]
        if task.devices:
            self.kinds[at][self._kind(task)] += 1


class GpuPacking(Rival):
    """Shared devices first, then used nodes, then idle ones."""

    def score(self, task: Task, rows: Array) -> Array:
        """Score the three cases."""
        if not task.devices:
            return np.zeros(len(rows))
        free = self.free[rows]
        whole = (free == GPU).sum(axis=1)
        idle = np.maximum(33 - whole, whole)
        minimum = np.where(free >= task.milli, free, 2 * GPU).min(axis=1)
        shared = np.maximum(100 - minimum * 100 // GPU // 10, 50)
        used = np.maximum(50 - task.devices, 33)
        score: Array = np.where(whole == self.devices[rows], idle, np.where(minimum == GPU, used, shared))
        return score


class Fgd(Rival):
    """The steepest descent of fragmentation, over the most popular shapes."""

    def __init__(self, nodes: Sequence[Machine], mix: Iterable[Task], seed: int) -> None:
        super().__init__(nodes, mix, seed)
        counts = Counter(mix)
        total, covered = sum(counts.values()), 0
        typical: list[tuple[Task, int]] = []
        for shape, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            if covered >= COVER * total:
                break
            typical.append((shape, count))
            covered += count
        typical = [entry for entry in typical if entry[0].devices]
        self.share = np.array([count / total for _, count in typical])
        self.need_cpu = np.array([t.cpu for t, _ in typical])
        self.need_milli = np.array([t.milli for t, _ in typical])
        self.need_devices = np.array([t.devices for t, _ in typical])
        self.reach = np.array([[not t.models or m in t.models for t, _ in typical] for m in self.names])
        self.device = np.zeros(len(nodes), dtype=int)
        self.known: dict[Task, tuple[Array, Array, int]] = {}
        self.log: list[int] = []

    def score(self, task: Task, rows: Array) -> Array:
        """Score by how much fragmentation falls, in hundredths of its logistic curve; nodes that changed only."""
        if task in self.known:
            scores, devices, seen = self.known[task]
            stale = np.unique(np.array(self.log[seen:], dtype=int))
        else:
            scores, devices = np.zeros(len(self.cpu)), np.zeros(len(self.cpu), dtype=int)
            stale = np.arange(len(self.cpu))
        stale = np.intersect1d(stale, rows, assume_unique=True) if task in self.known else rows
        skipped = np.setdiff1d(np.arange(len(self.cpu)), rows) if task not in self.known else None
        if stale.size:
            scores[stale], devices[stale] = self._fresh(task, stale)
        if skipped is not None:
            scores[skipped] = -1
        self.known[task] = (scores, devices, len(self.log))
        self.device = devices
        return scores[rows]

    def _fresh(self, task: Task, rows: Array) -> tuple[Array, Array]:
        free, cpu, model = self.free[rows], self.cpu[rows], self.model[rows]
        if 0 < task.gpus < GPU:
            options = np.repeat(free[:, None, :], 8, axis=1)
            options[:, range(8), range(8)] -= task.milli
        else:
            taken = free.copy()
            order = np.cumsum(free == GPU, axis=1)
            taken[(free == GPU) & (order <= task.devices)] = 0
            options = taken[:, None, :]
        before = self._fragments(free[:, None, :], cpu, model)
        after = self._fragments(options, cpu - task.cpu, model)
        scores = np.floor(100 / (1 + np.exp(-(before - after) / 1000)))
        if 0 < task.gpus < GPU:
            scores = np.where(free >= task.milli, scores, -1)
        best = scores.argmax(axis=1)
        return scores[np.arange(len(rows)), best], best

    def _fragments(self, free: Array, cpu: Array, model: Array) -> Array:
        """Return the milli-GPUs that a task drawn from the shapes cannot use, for nodes × options."""
        enough = free[..., None] >= self.need_milli
        able = (enough.sum(axis=2) >= self.need_devices) & (cpu[:, None, None] >= self.need_cpu)
        usable = np.where(enough, free[..., None], 0).sum(axis=2) * (able & self.reach[model][:, None, :])
        score: Array = free.sum(axis=2) * self.share.sum() - usable @ self.share
        return score

    def choose(self, task: Task, at: int) -> Array:
        """Choose the device that scored best."""
        return np.array([self.device[at]]) if 0 < task.gpus < GPU else super().choose(task, at)

    def placed(self, task: Task, at: int) -> None:
        """Remember which node changed."""
        self.log.append(at)


RIVALS: dict[str, type[Rival]] = {
    "Random": Random,
    "DotProd": DotProd,
    "GpuClustering": GpuClustering,
    "GpuPacking": GpuPacking,
    "BestFit": BestFit,
    "FGD": Fgd,
}
