"""Speak the agent protocol: join, report, and ask for orders; requests and their failures are the launcher's."""

from __future__ import annotations

import contextlib
import json
from urllib.parse import quote

from ..launcher.service import Reply, RequestRejected, Service, ServiceUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AGENTS = "/api/v1/agents"
GONE = 410
CONFLICT = 409
POLL_SECONDS = 25.0
"""Seconds that one request for orders is held at most"""


class MachineEnded(OSError):
    """The service needs this machine no more, or another boot of it has joined: nothing may go on here."""


class AgentClient(Service):
    """The service as the agent of one machine reaches it; `token` is replaced in time by the answers to reports."""

    program = "agent"

    def __init__(self, url: str, machine: str, token: str) -> None:
        super().__init__(f"{url}{AGENTS}/{quote(machine, safe='')}", token)

    def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Send a report; MachineEnded where another boot of this machine has joined."""
        return _unless_another_boot(self, "report", report)

    def asked(self, known: str) -> dict[str, Any]:
        """Return the orders of this machine, as soon as their revision is not the known one, or after a while."""
        return self.orders(known, POLL_SECONDS)

    def _checked(self, reply: Reply) -> bytes:
        if reply.status == GONE and (detail := _detail(reply.body)):
            raise MachineEnded(detail)
        return super()._checked(reply)


class Joining(AgentClient):
    """The service before the machine has joined, with the token of its user data."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, "join", token)
        self._path = self._path.rpartition("/")[0]

    def join(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Join and return the answer, with the token of the machine; MachineEnded where another boot has joined."""
        answer = _unless_another_boot(self, "join", facts)
        if not isinstance(answer.get("token"), str):
            raise ServiceUnavailable("the answer has no token")
        return answer


def _unless_another_boot(service: Service, what: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return service.post(what, body)
    except RequestRejected as error:
        if error.status == CONFLICT:
            raise MachineEnded(str(error.strerror)) from error
        raise


def _detail(body: bytes) -> str:
    """Return what the service says; "" for an answer that is not the service's, but a proxy's."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        problem = json.loads(body)
        return str(problem["detail"]) if problem["code"] else ""
    return ""
