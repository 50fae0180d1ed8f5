"""The launcher alone, in the foreground, as a container runs it; used by tests of the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "widgets" / "makeway" / "launcher"


class Container:
    """A job's folder, and the launcher started in the foreground for it."""

    def __init__(self, root: Path, launcher: Path = FOLDER) -> None:
        self.root = root
        self.launcher = [sys.executable, "-I", "-S", str(launcher)]

    def start(self, *command: str, **order: Any) -> subprocess.Popen[bytes]:
        """Write an order and start the launcher."""
        order = {"workload": "j-1", "attempt": 1, "grace": 5, "directory": str(self.root / "job"), **order}
        path = self.root / "order"
        path.write_text(json.dumps({**order, "command": command}) + "\n")
        return subprocess.Popen([*self.launcher, str(path)], stderr=subprocess.DEVNULL)

    def run(self, *command: str, **order: Any) -> int:
        """Start it and wait for its end."""
        return self.start(*command, **order).wait(20)

    def file(self, name: str, attempt: int = 1) -> Path:
        return self.root / "job" / f"attempt-{attempt}" / name

    def status(self, attempt: int = 1) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.file("status.json", attempt).read_text())
        return result

    def until(self, name: str, text: str = "", attempt: int = 1) -> None:
        """Wait until a file exists and is not empty."""
        ends = time.monotonic() + 60
        while not ((path := self.file(name, attempt)).exists() and text in path.read_text()):
            assert time.monotonic() < ends, f"{name}: {path.read_text() if path.exists() else 'not there'}"
            time.sleep(0.01)
