"""Find the process that listens on a port of this machine."""

from __future__ import annotations

import psutil


def holder(port: int) -> str | None:
    """Return the process that listens on a TCP port ("node, process 4711"), None where it cannot be seen."""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                getattr(connection.laddr, "port", None) == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
    except psutil.Error:
        return None
    return None
