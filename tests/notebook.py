"""Run cells in a real kernel, as JupyterLab does."""

from __future__ import annotations

import os
import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager


@dataclass
class EngineView:
    """Everything that one cell showed."""

    out: str = ""
    err: str = ""
    text: str = ""
    html: str = ""
    error: tuple[str, str] | None = None
    widgets: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def trouble(self) -> str:
        """The error output of the cell."""
        return self.error[1] if self.error else ""


class Notebook:
    """One kernel; `run` types a cell and waits for its end."""

    def __init__(self, folder: Path, **env: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKEWAY_", "JUPYTERHUB_", "PYTEST_"))}
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env={**clean, "IPYTHONDIR": str(folder / ".ipython"), **env})
        self.client: BlockingKernelClient = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(120)
        self.updates: list[dict[str, Any]] = []

    def run(self, cell: str, timeout: float = 120) -> EngineView:
        """Run a cell to its end."""
        started_now = time.monotonic()
        return self.finish(self.client.execute(cell), started_now + timeout, started_now)

    def finish(self, id: str, deadline: float, started_now: float = 0.0) -> EngineView:
        """Return the output of a running cell, when it has ended."""
        shown = EngineView()
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_msg":
                self.updates.append(content["data"].get("state", {}))
            if message["parent_header"].get("msg_id") != id:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                shown.seconds = time.monotonic() - started_now
                return shown
            _add(shown, kind, content)

    def prints(self, id: str, timeout: float = 120) -> str:
        """Return the first text that a running cell prints; `finish` returns what follows it."""
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") == id and message["msg_type"] == "stream":
                return str(message["content"]["text"])

    def updated(self, timeout: float) -> list[dict[str, Any]]:
        """Return the updates of widgets, waiting for the next one at most `timeout` seconds."""
        try:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["msg_type"] == "comm_msg":
                self.updates.append(message["content"]["data"].get("state", {}))
        except queue.Empty:
            pass
        found, self.updates = self.updates, []
        return found

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self._manager.interrupt_kernel()

    def complete(self, cell: str) -> list[str]:
        """Return the completions at the end of the cell."""
        reply = self.client.complete(cell, reply=True, timeout=60)
        return list(reply["content"]["matches"])

    def help(self, name: str) -> str:
        """Return the output of `name?`."""
        reply = self.client.inspect(name, reply=True, timeout=60)
        return str(reply["content"]["data"].get("text/plain", ""))

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


def _add(shown: EngineView, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        if content["name"] == "stdout":
            shown.out += content["text"]
        else:
            shown.err += content["text"]
    elif kind in ("execute_result", "display_data"):
        shown.text += content["data"].get("text/plain", "")
        shown.html += content["data"].get("text/html", "")
        if view := content["data"].get("application/vnd.jupyter.widget-view+json"):
            shown.widgets.append(view)
    elif kind == "error":
        shown.error = (content["ename"], "\n".join(content["traceback"]))
