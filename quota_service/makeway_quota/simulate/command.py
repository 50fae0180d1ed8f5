"""`makeway-quota simulate`: play a trace against policies, and against clusters without one (baselines)."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ..engine.snapshot import GPU
from ..policy import read
from .baselines import NAMES, baseline
from .cluster import SimulatedCluster, of_document
from .incremental import IncrementalPlanner
from .page import page
from .replay import Outcome, replay
from .report import summary, text
from .trace import Arrival, read_trace


def simulate_command(
    policies: Sequence[str],
    trace: str,
    out: TextIO,
    *,
    gpus: int | None = None,
    node_gpus: int = 8,
    restart: float = 60.0,
    compare: Sequence[str] = (),
    json_file: str | None = None,
    html_file: str | None = None,
    progress: TextIO | None = None,
) -> int:
    """Simulate each policy file and baseline on the trace, and write the report; errors are ValueErrors."""
    arrivals = read_trace(Path(trace))
    outcomes: list[Outcome] = []
    for file in policies:
        cluster = _cluster(file, arrivals, gpus, node_gpus)
        mix = Counter(_profile_of(cluster, arrival) for arrival in arrivals)
        planner = IncrementalPlanner(cluster, {name: count for name, count in mix.items() if name})
        outcomes.append(replay(cluster, arrivals, planner, restart=restart, progress=_bar(progress, cluster.name)))
    if policies:
        first = _cluster(policies[0], arrivals, gpus, node_gpus)
        for kind in compare:
            named = replace(first, name=NAMES.get(kind, kind))
            outcomes.append(baseline(kind, named, arrivals, _bar(progress, named.name)))
    result = [summary(outcome) for outcome in outcomes]
    print(text(result), file=out)
    if json_file:
        Path(json_file).write_text(
            json.dumps({"trace": Path(trace).name, "simulated": result}, indent=1) + "\n", encoding="utf-8"
        )
    if html_file:
        Path(html_file).write_text(page(f"Simulation of {Path(trace).name}", outcomes, result), encoding="utf-8")
    return 0


def _cluster(file: str, arrivals: Sequence[Arrival], gpus: int | None, node_gpus: int) -> SimulatedCluster:
    """Read a policy file; without `gpus`, the cluster is as large as all reservations together."""
    document = read(Path(file).read_text(encoding="utf-8"), file)
    reserved = sum(line.reserved for p in document.policies if p.parent is None for line in p.quotas)
    total = gpus if gpus is not None else math.ceil(reserved / GPU)
    if total < node_gpus:
        raise ValueError(f"{file}: say with --gpus how many GPUs the cluster has; a node has {node_gpus}.")
    return of_document(Path(file).stem, document, arrivals, node_gpus=node_gpus, gpus=total)


def _profile_of(cluster: SimulatedCluster, arrival: Arrival) -> str:
    if arrival.profile:
        return arrival.profile if any(p.name == arrival.profile for p in cluster.profiles) else ""
    return next((p.name for p in cluster.profiles if p.gpus * p.workers == arrival.gpus), "")


def _bar(stream: TextIO | None, name: str) -> Callable[[float], None] | None:
    """Draw a bar that moves by whole percents."""
    if stream is None:
        return None
    last = -1

    def show(part: float) -> None:
        nonlocal last
        percent = int(100 * part)
        if percent != last:
            last = percent
            print(
                f"\r{name}: [{'#' * (percent // 4):<25}] {percent} %",
                end="\n" if percent == 100 else "",
                file=stream,
                flush=True,
            )

    return show


def interactive(stream: TextIO = sys.stderr) -> TextIO | None:
    """Return the stream for the progress bar, if it is a terminal."""
    return stream if stream.isatty() else None


__all__ = ["interactive", "simulate_command"]
