"""Runs the benchmarks: `make bench`, or `python -m benchmarks --only reclaim --json out.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import (
    again,
    changes,
    connections,
    demand,
    engine_size,
    idle,
    large_commands,
    lease,
    machine_cycle,
    machine_history,
    machine_steps,
    notebook_reclaim,
    offers,
    panels,
    pod_reclaim,
    pods,
    queue_mix,
    reclaim,
    requests,
    soak,
    train,
    world_cycle,
)
from .measure import Measured, machine, report, with_section

BENCHMARKS: dict[str, Callable[[], Iterable[Measured]]] = {
    "again": again.measure,
    "lease": lease.measure,
    "reclaim": reclaim.measure,
    "train": train.measure,
    "idle": idle.measure,
    "change_set": changes.measure,
    "queue-mix": queue_mix.measure,
    "soak": soak.measure,
    "engine": engine_size.measure,
    "demand": demand.measure,
    "machines": machine_steps.measure,
    "machine-cycle": machine_cycle.measure,
    "machine-history": machine_history.measure,
    "nodes": world_cycle.measure,
    "offers": offers.measure,
    "requests": requests.measure,
    "panels": panels.measure,
    "large-commands": large_commands.measure,
    "connections": connections.measure,
    "pods": pods.measure,
    "pod-reclaim": pod_reclaim.measure,
    "notebook-reclaim": notebook_reclaim.measure,
}
ON_KUBERNETES = ("pods", "pod-reclaim", "notebook-reclaim")
SECTIONS = {
    "On one machine": tuple(name for name in BENCHMARKS if name not in ON_KUBERNETES),
    "On Kubernetes": ON_KUBERNETES,
}
"""The benchmarks of each section of docs/benchmarks.md."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write each section of docs/benchmarks.md of which everything was measured.

    Return the exit status: 1 where a goal was missed.
    """
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(BENCHMARKS), help="one benchmark; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample as JSON")
    parser.add_argument(
        "--soak",
        type=Path,
        metavar="FILE",
        help="read the soak from `python -m benchmarks.soak --json FILE`, run before",
    )
    wanted = parser.parse_args(arguments)
    measured: dict[str, list[Measured]] = {}
    for name, measure in BENCHMARKS.items():
        if name == "soak" and wanted.soak:
            measured[name] = list(soak.report(soak.read(wanted.soak)))
        elif not wanted.only or name in wanted.only:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            measured[name] = list(measure())
    result = [one for item in measured.values() for one in item]
    print(report(result))
    if wanted.json:
        text = json.dumps({"machine": machine(), "measured": [one.as_json() for one in result]}, indent=1)
        wanted.json.write_text(text + "\n", encoding="utf-8")
    for title, names in SECTIONS.items():
        if all(measured.get(name) for name in names):
            rows = [one for name in names for one in measured[name]]
            PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), title, rows), encoding="utf-8")
    if missed := [one.name for one in result if one.met is False]:
        print("Goals that were missed:", *missed, sep="\n  ", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
