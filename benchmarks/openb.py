"""The public openb trace: nodes, tasks, and the inflation experiment of the FGD paper (USENIX ATC'23)."""

from __future__ import annotations

import csv
import gzip
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

VARIANTS = (
    "default", "cpu050", "cpu200", "cpu250", "gpushare40", "gpushare80", "gpushare100",
    "gpuspec10", "gpuspec25", "gpuspec33", "multigpu20", "multigpu40", "multigpu50",
)  # fmt: skip
SEEDS = tuple(range(42, 52))
FULL = 1.3
"""Tasks arrive until they ask for so many times the cluster."""
Report = tuple[float, float]
"""Allocated GPUs in %, when 100 % and when 130 % have arrived."""


class NoTraces(Exception):
    """The trace files are not where they were looked for."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node: milli-cores, MiB, devices, GPU model."""

    name: str
    cpu: int
    memory: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One task: `devices` times `milli` of a GPU; `models` may be empty."""

    cpu: int
    memory: int
    devices: int
    milli: int
    models: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Return the milli-GPUs requested in total."""
        return self.devices * self.milli


def folder(traces: Path) -> Path:
    """Find the openb files below the traces, or say what is missing."""
    result = traces / "openb_gpu_v2023"
    if not (result / "openb_node_list_gpu_node.csv.gz").exists():
        raise NoTraces(
            f"There are no openb traces at {result}: give the folder that holds openb_gpu_v2023/ as the argument "
            "(from hkust-adsl/kubernetes-scheduler-simulator, data/csv, gzipped)."
        )
    return result


def rows(file: Path) -> list[dict[str, str]]:
    """Read one gzipped table."""
    with gzip.open(file, "rt", newline="") as text:
        return list(csv.DictReader(text))


def machines(traces: Path) -> list[Machine]:
    """Read the nodes, in the order of the file."""
    return [
        Machine(r["sn"], int(r["cpu_milli"]), int(r["memory_mib"]), int(r["gpu"]), r["model"])
        for r in rows(folder(traces) / "openb_node_list_gpu_node.csv.gz")
    ]


def tasks(traces: Path, variant: str) -> list[Task]:
    """Read the tasks of one variant."""
    result = []
    for r in rows(folder(traces) / f"openb_pod_list_{variant}.csv.gz"):
        devices = int(r["num_gpu"])
        models = tuple(sorted({m for m in (r.get("gpu_spec") or "").split("|") if m}))
        milli = int(r["gpu_milli"]) if devices else 0
        result.append(Task(int(r["cpu_milli"]), int(r["memory_mib"]), devices, milli, models))
    return result


def published(traces: Path) -> dict[tuple[str, str], Report]:
    """Read the authors' results: (variant, policy) to the mean over their ten seeds."""
    result: dict[tuple[str, str], list[Report]] = defaultdict(list)
    for r in rows(folder(traces) / "published_results_1020.csv.gz"):
        result[r["trace"], r["policy"]].append((float(r["alloc_100"]), float(r["alloc_130"])))
    return {key: (mean(a for a, _ in every), mean(b for _, b in every)) for key, every in result.items()}


def arrivals(mix: Sequence[Task], capacity: int, seed: int) -> list[Task]:
    """Shuffle the tasks by the seed, then draw more with replacement until 130 % of the capacity is asked for."""
    chance = random.Random(seed)
    order = list(mix)
    chance.shuffle(order)
    asked = sum(task.gpus for task in order)
    while asked < FULL * capacity:
        order.append(chance.choice(mix))
        asked += order[-1].gpus
    return order


def inflate(order: Sequence[Task], capacity: int, place: Callable[[Task], bool]) -> Report:
    """Offer tasks one at a time; one that fits nowhere is dropped but counts as arrived."""
    arrived = allocated = 0
    points: dict[int, list[float]] = defaultdict(list)
    for task in order:
        arrived += task.gpus
        if place(task):
            allocated += task.gpus
        points[round(100 * arrived / capacity)].append(100 * allocated / capacity)
    return mean(points[100]), mean(points[130])
