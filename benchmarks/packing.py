"""Measure how full a cluster gets: the engine's placement code on the public openb trace, beside published results.

`python -m benchmarks.packing [TRACES] [--only P1] [--json FILE]`; TRACES is the folder with openb_gpu_v2023/.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from makeway_quota.engine.index.cluster import Cluster
from makeway_quota.engine.placement.fit import find_placement
from makeway_quota.engine.placement.pack_index import PackIndex
from makeway_quota.engine.request import Shape
from makeway_quota.engine.snapshot import GPU, Node, Pool, Profile, Snapshot, TeamQuota, Workload

from . import openb
from .measure import machine
from .numbers import insert, markdown, page_for
from .openb import SEEDS, VARIANTS, Machine, NoTraces, Report, Task
from .rivals import RIVALS, Rival

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PAGE = "docs/explanation/packing.md"
POOL = "openb"
SPECS = ("gpuspec10", "gpuspec25", "gpuspec33")


@dataclass(frozen=True, slots=True)
class Case:
    """One run: variant, seed, placing policy, and whether the nodes change their order before every decision."""

    traces: Path
    variant: str
    seed: int
    policy: str = "makeway"
    reshuffled: bool = False


class Placer:
    """The engine's `find` and `start` on one pool of all nodes, as a scheduling pass uses them."""

    def __init__(self, nodes: Sequence[Machine], mix: Iterable[Task]) -> None:
        counts = Counter(mix)
        profiles = tuple(_profile(at, task) for at, task in enumerate(sorted(counts)))
        self.profile = dict(zip(sorted(counts), profiles, strict=True))
        inventory = tuple(Node(f"n{at:05}", POOL, m.gpus, m.cpu, m.memory, model=m.model) for at, m in enumerate(nodes))
        self.cluster = Cluster(Snapshot(0.0, pools=(Pool(POOL),), nodes=inventory, profiles=profiles, policies=(TEAM,)))
        self.pool = self.cluster.pools[POOL]
        self.pool.mix = {Shape(t.gpus, t.cpu, t.memory, t.models): count for t, count in counts.items()}
        self.placed = 0

    def place(self, task: Task) -> bool:
        """Start the task where the engine says; False if it fits nowhere."""
        self.placed += 1
        workload = Workload(f"w{self.placed}", TEAM.name, self.profile[task].name)
        need = self.cluster.need(workload)
        parts = find_placement(self.pool, need)
        if parts:
            self.cluster.start(workload, need, parts)
        return bool(parts)


TEAM = TeamQuota("all")


def _profile(at: int, task: Task) -> Profile:
    gpus = task.milli if task.devices == 1 and task.milli < GPU else GPU * task.devices
    return Profile(f"p{at}", gpus, cpu=task.cpu, memory=task.memory, pools=(POOL,), models=task.models)


class Reshuffled:
    """Another order of the nodes before every decision: what may not depend on the order, does not."""

    def __init__(self, placer: Placer, seed: int) -> None:
        self.placer = placer
        self.chance = random.Random(seed)

    def place(self, task: Task) -> bool:
        """Permute which node comes first among equals, then place."""
        pool = self.placer.pool
        if isinstance(pool.packing, PackIndex):
            pool.packing.packing.prefer(self.chance.sample(range(len(pool.nodes)), len(pool.nodes)))
        return self.placer.place(task)


def run(case: Case) -> Report:
    """Play one case."""
    nodes = openb.machines(case.traces)
    random.Random(case.seed).shuffle(nodes)
    mix = openb.tasks(case.traces, case.variant)
    capacity = sum(node.gpus for node in nodes) * GPU
    order = openb.arrivals(mix, capacity, case.seed)
    place: Placer | Reshuffled | Rival
    if case.policy == "makeway":
        placer = Placer(nodes, mix)
        place = Reshuffled(placer, case.seed) if case.reshuffled else placer
    else:
        place = RIVALS[case.policy](nodes, mix, case.seed)
    return openb.inflate(order, capacity, place.place)


def cases(traces: Path, wanted: Sequence[str]) -> list[Case]:
    """List what has to be played for the checks that are wanted."""
    result: list[Case] = []
    if "P1" in wanted:
        result += [Case(traces, "default", seed) for seed in SEEDS]
    if "P2" in wanted or "P3" in wanted:
        result += [Case(traces, v, s) for v in VARIANTS[1:] if "P2" in wanted or v in SPECS for s in SEEDS]
    if "P4" in wanted:
        result += [Case(traces, "default", seed, reshuffled=True) for seed in SEEDS]
    if "P5" in wanted:
        result += [Case(traces, "default", seed, policy) for policy in RIVALS for seed in SEEDS]
    return result


Results = dict[tuple[str, str, bool], list[Report]]


def play(every: Sequence[Case], workers: int) -> Results:
    """Play the cases on some processes, saying how far it is."""
    result: Results = defaultdict(list)
    began = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        for at, (case, report) in enumerate(zip(every, pool.map(run, every), strict=True), 1):
            result[case.variant, case.policy, case.reshuffled].append(report)
            passed = time.monotonic() - began
            print(f"\r{at} of {len(every)} runs, {passed:.0f} s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return result


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was reached, what was asked, and whether that holds."""

    check: str
    what: str
    reached: float
    at_130: float
    goal: str
    met: bool
    published: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The line as the cells of a table row."""
        base = f"{self.published:.2f}" if self.published is not None else "–"
        ratio = f"{self.reached / self.published:.4f}" if self.published else "–"
        return (
            self.check, self.what, f"{self.reached:.2f}", f"{self.at_130:.2f}", self.goal,
            "yes" if self.met else "NO", base, ratio,
        )  # fmt: skip


HEAD = ("check", "what", "% at 100 %", "% at 130 %", "goal", "met", "published best", "ratio")


def checks(reports_by_case: Results, published: dict[tuple[str, str], Report]) -> list[Check]:
    """Compare what was reached with what was asked and with what the authors published."""
    lines = []
    for (variant, policy, reshuffled), reports in reports_by_case.items():
        reached, later = mean(a for a, _ in reports), mean(b for _, b in reports)
        best = max(a for (v, _), (a, _) in published.items() if v == variant)
        if policy != "makeway":
            theirs = published[variant, policy][0]
            lines.append(Check("P5", policy, reached, later, "published", abs(reached - theirs) <= 0.5, theirs))
        elif reshuffled:
            lines.append(Check("P4", f"{variant}, any order", reached, later, ">= 95.0", reached >= 95.0, best))
        elif variant == "default":
            lines.append(Check("P1", variant, reached, later, ">= 95.2", reached >= 95.2, best))
        elif variant in SPECS:
            lines.append(Check("P3", variant, reached, later, f"> {best:.2f}", reached > best, best))
        else:
            goal = best - 0.2
            lines.append(Check("P2", variant, reached, later, f">= {goal:.2f}", reached >= goal, best))
    return lines + _harness([line for line in lines if line.check == "P5"])


def _harness(lines: Sequence[Check]) -> list[Check]:
    """Sum up the check of the harness: the mean difference, and orderings that are the other way round."""
    if not lines:
        return []
    apart = [line.reached - (line.published or 0.0) for line in lines]
    turned = [
        f"{a.what}/{b.what}"
        for a in lines
        for b in lines
        if (a.published or 0.0) - (b.published or 0.0) > 0.5 and a.reached < b.reached
    ]
    size = mean(abs(item) for item in apart)
    return [
        Check("P5", "mean difference", size, mean(apart), "<= 0.2", size <= 0.2, None),
        Check("P5", "orderings reversed", float(len(turned)), 0.0, "0", not turned, None),
    ]


def table(lines: Sequence[Check]) -> str:
    """Write the lines for a terminal."""
    rows = [HEAD, *(line.cells for line in lines)]
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, print, write JSON; exit status 1 if a check does not hold, 2 without the traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument(
        "traces", nargs="?", type=Path, default=TRACES, help=f"default: {TRACES.name} beside the project"
    )
    parser.add_argument("--only", action="append", choices=["P1", "P2", "P3", "P4", "P5"], help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    into = f"write the table into this page (e.g. {PAGE})"
    parser.add_argument("--page", type=page_for("packing"), metavar="FILE", help=into)
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    wanted = parser.parse_args(arguments)
    try:
        published = openb.published(wanted.traces)
    except NoTraces as missing:
        print(missing, file=sys.stderr)
        return 2
    result = play(cases(wanted.traces, wanted.only or ["P1", "P2", "P3", "P4", "P5"]), wanted.workers)
    lines = checks(result, published)
    print(f"{machine()}; {len(SEEDS)} seeds each\n\n{table(lines)}")
    if wanted.json:
        rows = [dict(zip(HEAD, line.cells, strict=True)) for line in lines]
        wanted.json.write_text(json.dumps({"machine": machine(), "checks": rows}, indent=1) + "\n", encoding="utf-8")
    if wanted.page:
        insert(wanted.page, "packing", markdown(HEAD, [line.cells for line in lines]))
    return 0 if all(line.met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
