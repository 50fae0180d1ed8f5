"""Preempts the job that imports this at planned moments, and notes what it trains; for the trainings beside it.

`PLAN` is a list, as JSON, with a moment for each attempt, such as "import", "step 7", "save", "watch 3" or "end": when
an attempt reaches its moment, the launcher gets the signal that a node sends, and the job goes on once it has notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

ATTEMPT = int(os.environ.get("MAKEWAY_ATTEMPT", "1"))
PLAN = json.loads(os.environ.get("PLAN", "[]"))
STOP_FILE = Path(os.environ.get("MAKEWAY_STOP_FILE", "stop.json"))
LIMIT_SECONDS = 30.0
HOLD = int(os.environ.get("HOLD", "0"))
"""The step after which the first attempt waits until it has notice from outside; 0: none"""
HOLD_SECONDS = 600.0
count: dict[str, int] = {}


def reach(name: str, number: int | None = None) -> None:
    """Preempt the job if its attempt is to be preempted here; without a number, at the nth call of this name."""
    count[name] = count.get(name, 0) + 1
    planned = PLAN[ATTEMPT - 1] if len(PLAN) >= ATTEMPT else ""
    if planned not in (name, f"{name} {count[name] if number is None else number}"):
        return
    if rank() != int(os.environ.get("NOTICED_RANK", "0")):
        return
    if not STOP_FILE.exists():
        note("noticed", planned)
        launcher = json.loads((STOP_FILE.parent / "launcher.json").read_text())
        os.kill(launcher["pid"], signal.SIGTERM)
        wait_for_notice(LIMIT_SECONDS)


def wait_for_notice(seconds: float) -> None:
    """Return once the launcher has written the notice."""
    ends = time.monotonic() + seconds
    while not STOP_FILE.exists():
        if time.monotonic() > ends:
            raise TimeoutError("the launcher wrote no notice")
        time.sleep(0.005)


def trained(step: int, data: Any = None) -> None:
    """Note a step, counted from 1, with what it was trained on; the step's own moment follows."""
    note("step", f"{step} {fingerprint(data)}")
    if ATTEMPT == 1 and step == HOLD:
        wait_for_notice(HOLD_SECONDS)
    reach("step", step)


def note(kind: str, text: str) -> None:
    """Append a line to this rank's trace."""
    with open(Path(os.environ["TRACE"]) / f"rank-{rank()}", "a", encoding="utf-8") as file:
        file.write(f"{ATTEMPT} {kind} {text}\n")


def finish(model: Any, **more: Any) -> None:
    """Keep the fingerprint of all parameters and buffers as the result of the training."""
    state = model.state_dict() if hasattr(model, "state_dict") else model
    names = sorted(state)
    result = {"parameters": fingerprint([state[name] for name in names]), **more}
    Path(os.environ["TRACE"], f"result-{rank()}").write_text(json.dumps(result), encoding="utf-8")
    reach("end")


def fingerprint(value: Any) -> str:
    """Return a hash of tensors, in lists and dictionaries, to the last bit."""
    total = hashlib.sha256()
    _add(total, value)
    return total.hexdigest()[:16]


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def _add(total: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            _add(total, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(total, one)
    elif hasattr(value, "detach"):
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    else:
        total.update(repr(value).encode())


reach("import")
