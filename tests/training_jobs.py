"""Runs a training as a job through the real launcher, with notices, until it ends; for the tests beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from makeway.payload import _library

ROOT = Path(__file__).resolve().parents[1]
TRAININGS = ROOT / "tests" / "frameworks" / "trainings"
PYTHON = ROOT / ".venvs" / "frameworks" / "bin" / "python"
LAUNCHER = ROOT / "widgets" / "makeway" / "launcher"
GRACE_SECONDS = 120
"""A hang, not a busy machine"""
LIMIT_SECONDS = 500
SAVED_AND_LEFT = 75
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
"""Two ranks on this machine; their port follows"""


def gang(port: str) -> list[dict[str, Any]]:
    """Return two workers of a job, one rank each, that meet at a port of this machine."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"env": {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}} for rank in range(2)]


@dataclass
class Attempt:
    """How one attempt ended."""

    code: int
    status: dict[str, Any]
    log: str

    @property
    def is_requeued(self) -> bool:
        """Whether the service would start the job again."""
        return bool(self.status["noticed"]) and not self.status["completed"]


@dataclass
class Outcome:
    """A training that has ended: its attempts, and what each rank noted and computed."""

    attempts: list[Attempt]
    notes: dict[int, list[tuple[int, str, str]]]
    results: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, attempts: list[Attempt], trace: Path) -> Outcome:
        """Read what the ranks wrote into a folder."""
        notes = {_number(file): _notes(file) for file in trace.glob("rank-*")}
        results = {_number(file): json.loads(file.read_text()) for file in trace.glob("result-*")}
        return cls(attempts, notes, results)

    def steps(self, rank: int = 0) -> list[tuple[int, int, str]]:
        """Return attempt, number and data of every step that a rank trained, in order."""
        result = [(attempt, *text.split()) for attempt, kind, text in self.notes[rank] if kind == "step"]
        return [(attempt, int(step), words[0] if words else "") for attempt, step, *words in result]

    def noticed(self) -> list[str]:
        """Return the moments at which the job was preempted."""
        return [text for notes in self.notes.values() for _, kind, text in notes if kind == "noticed"]


@dataclass
class Job:
    """A training in a folder of its own."""

    folder: Path
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    workers: Sequence[dict[str, Any]] = ()
    grace: float = GRACE_SECONDS

    def run(self, plan: Sequence[str] = (), most: int = 20) -> Outcome:
        """Run attempts until one does not leave because of a notice; the nth is preempted at the nth moment."""
        trace = self.folder / "trace"
        trace.mkdir(parents=True, exist_ok=True)
        library = self.folder / "lib.zip"
        library.write_bytes(_library())
        attempts: list[Attempt] = []
        while not attempts or attempts[-1].is_requeued:
            assert len(attempts) < most, attempts[-1].log
            attempts.append(self._attempt(len(attempts) + 1, plan, library, trace))
        return Outcome.of(attempts, trace)

    def _attempt(self, number: int, plan: Sequence[str], library: Path, trace: Path) -> Attempt:
        paths = f"{TRAININGS}{os.pathsep}{library}"
        env = {"PLAN": json.dumps(list(plan)), "TRACE": str(trace), "PYTHONPATH": paths, **QUIET, **self.env}
        order = {
            "workload": "j-1",
            "attempt": number,
            "grace": self.grace,
            "directory": str(self.folder / "job"),
            "command": list(self.command),
            "env": env,
            **({"workers": list(self.workers)} if self.workers else {}),
        }
        path = self.folder / "order"
        path.write_text(json.dumps(order) + "\n")
        launched = [sys.executable, "-I", "-S", str(LAUNCHER), str(path)]
        done = subprocess.run(launched, env=_clean(), stderr=subprocess.DEVNULL, timeout=LIMIT_SECONDS, check=False)
        home = self.folder / "job" / f"attempt-{number}"
        log = (home / "log").read_text(errors="replace")
        return Attempt(done.returncode, json.loads((home / "status.json").read_text()), log)


QUIET = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKEWAY", "PYTHON", "COV"))}


def _number(file: Path) -> int:
    return int(file.name.rpartition("-")[2])


def _notes(file: Path) -> list[tuple[int, str, str]]:
    lines = [line.split(" ", 2) for line in file.read_text().splitlines()]
    return [(int(attempt), kind, text) for attempt, kind, text in lines]
