"""Count what the machine has: its GPUs by nvidia-smi, its processors and its memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from urllib.parse import urlsplit

from ..launcher.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader,nounits")
QUERY_SECONDS = 60.0
"""The driver of a machine that has just booted may take long for the first answer"""
VIRTUAL_MODEL = "virtual GPU"


class MachineFacts(Record):
    """What a machine has: `cpu` in thousandths of a processor, `memory` in MiB."""

    gpus: int
    model: str
    cpu: int
    memory: int
    virtual: bool

    def as_report(self) -> dict[str, Any]:
        """Return the facts as the service takes them."""
        return dict(self._asdict())


def count_facts(virtual_gpus: int | None) -> MachineFacts:
    """Return what this machine has; with a number of virtual GPUs no real one is looked for."""
    models = [VIRTUAL_MODEL] * virtual_gpus if virtual_gpus is not None else _gpus()
    return MachineFacts(
        gpus=len(models),
        model=" + ".join(sorted(set(models))),
        cpu=len(os.sched_getaffinity(0)) * 1000,
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        virtual=virtual_gpus is not None,
    )


def address_towards(url: str) -> str | None:
    """Return the address of this machine in the network in which it reaches the service; None if it reaches none.

    Nothing is sent. Workers of a gang on other machines find this one by it.
    """
    parts = urlsplit(url)
    with contextlib.suppress(OSError, ValueError):
        result = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(result[0], socket.SOCK_DGRAM) as probe:
            probe.connect(result[4])
            return str(probe.getsockname()[0])
    return None


def _gpus() -> list[str]:
    """Return the models of the GPUs that the driver shows, one for each; none without a driver that answers.

    A GPU that cannot be used any more is a line with an error, or none: it does not count.
    """
    try:
        done = subprocess.run(QUERY, stdin=subprocess.DEVNULL, capture_output=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode != 0:
        return []
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [line for line in lines if line and "error" not in line.lower() and "unable" not in line.lower()]
