"""Write how a worker ended where its machine keeps it, for a service that its launcher does not reach any more."""

from __future__ import annotations

import contextlib
import json
from typing import Any

MAX_SIZE = 3000
"""Bytes: the kubelet keeps 4096 of a container, and 12 KiB of all containers of a pod together"""
TAIL = 2000
"""Characters of the log, for people who look at the pod"""


def write_termination_message(path: str, report: dict[str, Any], lines: list[str]) -> None:
    """Write a report with `exit`, and the newest lines of the log, shortened until both fit."""
    report = {key: value for key, value in report.items() if key != "progress"}
    tail, message = "\n".join(lines)[-TAIL:], report["exit"]["message"]
    while len(data := _encoded(report, message, tail)) > MAX_SIZE and (tail or message):
        if tail:
            tail = tail[len(tail) // 2 + 1 :]
        else:
            message = message[: len(message) // 2]
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(data)


def _encoded(report: dict[str, Any], message: str, tail: str) -> bytes:
    return json.dumps({**report, "exit": {**report["exit"], "message": message}, "tail": tail}).encode()
