"""Open the sockets that a service listens on: for `::`, of IPv4 and of IPv6, whichever the machine has.

Called by `main`. One socket for both would show clients of IPv4 with mapped addresses (`::ffff:…`), and asyncio opens
none where one of two families is switched off.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

EVERYWHERE = "::"
"""The host that means all addresses of this machine"""
UNAVAILABLE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
"""The errors of a family that the kernel does not have, or that is switched off"""
BACKLOG = 2048
"""How many connections wait until they are accepted, as uvicorn has it"""


def listeners(host: str, port: int) -> list[socket.socket] | None:
    """Return the sockets of a host and port; None where that is one address, which the server opens itself.

    OSError where the machine has neither family, or the port is in use in one of them.
    """
    if host != EVERYWHERE:
        return None
    result: list[socket.socket] = []
    unavailable: list[OSError] = []
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, EVERYWHERE)):
        try:
            made = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno in UNAVAILABLE:
                unavailable.append(error)
                continue
            _close(result)
            raise
        port = made.getsockname()[1]  # that was chosen for 0
        result.append(made)
    if not result:
        raise unavailable[0]
    return result


def _close(sockets: Iterable[socket.socket]) -> None:
    for listener in sockets:
        listener.close()
