"""Run cells in a real kernel, as JupyterLab does."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
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
        self.folder = folder
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(folder), env={**clean, "IPYTHONDIR": str(folder / ".ipython"), **env})
        self.client: BlockingKernelClient = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(120)
        self.updates: list[dict[str, Any]] = []
        self.displays: dict[str, dict[str, str]] = {}
        """what each display shows now, by its id, in the order in which they were made"""
        self.updated_at: dict[str, list[datetime]] = {}
        """when the kernel sent an update of each display"""
        self.kinds: list[str] = []
        """the kinds of messages that `until_shown` has read"""

    def run(self, cell: str, timeout: float = 120, cell_id: str = "") -> EngineView:
        """Run a cell to its end; `cell_id` is what JupyterLab sends along."""
        started_now = time.monotonic()
        return self.finish(self.begin(cell, cell_id), started_now + timeout, started_now)

    def begin(self, cell: str, cell_id: str = "") -> str:
        """Send a cell and return the id by which `finish` knows it."""
        content = {"code": cell, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        metadata = {"cellId": cell_id} if cell_id else {}
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def text(self, *ids: str) -> str:
        """Return what displays show now as plain text."""
        return "\n".join(self.displays[id]["text/plain"] for id in ids or self.displays)

    def until_shown(self, good: Callable[[], bool], seconds: float = 60) -> None:
        """Read what the kernel sends, while no cell is sent to it, until the displays are as expected."""
        deadline = time.monotonic() + seconds
        while not good():
            if time.monotonic() > deadline:
                raise TimeoutError(self.text())
            with suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.5)
                self._display(message)
                self.kinds.append(message["msg_type"])

    def _display(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        id = (content.get("transient") or {}).get("display_id")
        if id and kind in ("display_data", "update_display_data"):
            self.displays[id] = content["data"]
            if kind == "update_display_data":
                self.updated_at.setdefault(id, []).append(message["header"]["date"])

    def finish(self, id: str, deadline: float, started_now: float = 0.0) -> EngineView:
        """Return the output of a running cell, when it has ended."""
        shown = EngineView()
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            self._display(message)
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
            self._display(message)
            if message["msg_type"] == "comm_msg":
                self.updates.append(message["content"]["data"].get("state", {}))
        except queue.Empty:
            pass
        result, self.updates = self.updates, []
        return result

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
        shown.text += content["data"].get("text/plain", "") + "\n" * (kind == "display_data")
        shown.html += content["data"].get("text/html", "")
        if view := content["data"].get("application/vnd.jupyter.widget-view+json"):
            shown.widgets.append(view)
    elif kind == "error":
        shown.error = (content["ename"], "\n".join(content["traceback"]))
