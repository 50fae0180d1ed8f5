"""A service that listens everywhere is reached by IPv4 and by IPv6, whichever its machine has."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from makeway_quota.web.server.listeners import listeners


def reached(family: int, address: str, port: int) -> bool:
    """Whether a connection is accepted."""
    with socket.socket(family, socket.SOCK_STREAM) as client:
        return client.connect_ex((address, port)) == 0


def without(monkeypatch: pytest.MonkeyPatch, *families: int, error: int = errno.EAFNOSUPPORT) -> None:
    """Have the machine lack some families."""
    made = socket.create_server

    def create(address: Any, *, family: int, **more: Any) -> socket.socket:
        if family in families:
            raise OSError(error, "not here")
        return made(address, family=family, **more)

    monkeypatch.setattr(socket, "create_server", create)


def test_everywhere_is_both_families_on_one_port() -> None:
    sockets = listeners("::", 0) or []
    port = sockets[0].getsockname()[1]
    assert reached(socket.AF_INET, "127.0.0.1", port)
    if socket.AF_INET6 in {listener.family for listener in sockets}:
        assert reached(socket.AF_INET6, "::1", port)
    assert {listener.getsockname()[1] for listener in sockets} == {port}
    for listener in sockets:
        listener.close()


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_machine_with_one_family_is_served_by_that(monkeypatch: pytest.MonkeyPatch, family: int, error: int) -> None:
    without(monkeypatch, family, error=error)
    (listener,) = listeners("::", 0) or []
    assert listener.family != family
    listener.close()


def test_a_machine_without_any_and_a_port_in_use_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(OSError) as used:
        listeners("::", other.getsockname()[1])
    assert used.value.errno == errno.EADDRINUSE
    without(monkeypatch, socket.AF_INET, socket.AF_INET6)
    with pytest.raises(OSError, match="not here"):
        listeners("::", 0)


def test_one_address_is_opened_by_the_server_itself() -> None:
    assert listeners("127.0.0.1", 8765) is None
    assert listeners("0.0.0.0", 8765) is None
