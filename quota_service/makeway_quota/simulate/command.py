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

from ..autoscale.deployment import Deployment
from ..autoscale.document import read_deployment
from ..engine.snapshot import GPU
from ..policy import Document, read_policy
from .baselines import NAMES, baseline
from .cluster import SimulatedCluster, of_document
from .incremental import IncrementalPlanner
from .page import page
from .replay import Outcome, replay
from .report import comparison_tables, summary
from .trace import Arrival, read_trace


def simulate_command(
    policies: Sequence[str],
    trace: str,
    out: TextIO,
    *,
    deployments: Sequence[str] = (),
    boot: float = 180.0,
    gpus: int | None = None,
    node_gpus: int = 8,
    restart: float = 60.0,
    compare: Sequence[str] = (),
    json_file: str | None = None,
    html_file: str | None = None,
    progress: TextIO | None = None,
) -> int:
    """Simulate each policy file and baseline on the trace, and write the report; errors are ValueErrors.

    `deployments`: files of deployments, whose machines take `boot` seconds until they are ready.
    """
    if not 0 <= boot < math.inf:
        raise ValueError("--boot is the time until a machine is ready: 0 seconds or more.")
    arrivals = read_trace(Path(trace))
    texts = [(file, _text(file)) for file in deployments]
    outcomes: list[Outcome] = []
    for file in policies:
        cluster = _cluster(file, arrivals, gpus, node_gpus, texts)
        mix = Counter(_profile_of(cluster, arrival) for arrival in arrivals)
        planner = IncrementalPlanner(cluster, {name: count for name, count in mix.items() if name})
        shown = _bar(progress, cluster.name)
        outcomes.append(replay(cluster, arrivals, planner, restart=restart, boot=boot, progress=shown))
    if policies and compare:
        first = _cluster(policies[0], arrivals, gpus, node_gpus)
        for kind in compare:
            named = replace(first, name=NAMES.get(kind, kind))
            outcomes.append(baseline(kind, named, arrivals, _bar(progress, named.name)))
    result = [summary(outcome) for outcome in outcomes]
    print(comparison_tables(result), file=out)
    if json_file:
        Path(json_file).write_text(
            json.dumps({"trace": Path(trace).name, "simulated": result}, indent=1) + "\n", encoding="utf-8"
        )
    if html_file:
        Path(html_file).write_text(page(f"Simulation of {Path(trace).name}", outcomes, result), encoding="utf-8")
    return 0


def _cluster(
    file: str,
    arrivals: Sequence[Arrival],
    gpus: int | None,
    node_gpus: int,
    deployments: Sequence[tuple[str, str]] = (),
) -> SimulatedCluster:
    """Read a policy file; without `gpus`, the nodes have as many GPUs as all reservations together.

    `deployments`: files with their documents. Where all pools are theirs, there are no other nodes.
    """
    document = read_policy(Path(file).read_text(encoding="utf-8"), file)
    launching = [_deployment(text, name, document) for name, text in deployments]
    if len({one.name for one in launching}) < len(launching):
        raise ValueError("Two of the deployments have the same name; give each its own.")
    growing = {machine_type.pool for one in launching for machine_type in one.types}
    static = [pool.name for pool in document.pools if pool.name not in growing]
    if launching and not static:
        if gpus is not None:
            raise ValueError(f"{file}: --gpus is for pools that do not grow, and deployments serve all pools.")
        return of_document(Path(file).stem, document, arrivals, node_gpus=node_gpus, gpus=0, deployments=launching)
    if launching and gpus is None:
        raise ValueError(f"{file}: say with --gpus how many GPUs the other pools have: {', '.join(static)}.")
    reserved = sum(line.reserved for p in document.policies if p.parent is None for line in p.quotas)
    total = gpus if gpus is not None else math.ceil(reserved / GPU)
    if total < node_gpus:
        raise ValueError(f"{file}: say with --gpus how many GPUs the cluster has; a node has {node_gpus}.")
    name = Path(file).stem
    return of_document(name, document, arrivals, node_gpus=node_gpus, gpus=total, deployments=launching)


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{file} cannot be read: {why}.") from None


def _deployment(text: str, file: str, document: Document) -> Deployment:
    """Read a deployment whose machines are for autoscaled pools of a policy document."""
    deployment = read_deployment(text, file, [pool.name for pool in document.pools])
    kinds = {pool.name: pool.kind for pool in document.pools}
    for machine_type in deployment.types:
        if kinds[machine_type.pool] != "autoscaled":
            raise ValueError(
                f"{file}: no machine is launched for the pool {machine_type.pool}: give it kind: autoscaled."
            )
    return deployment


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
