"""Send requests of a worker to the service, with the standard library alone: one connection for each thread.

Used by `remote.py`. A request is sent once; what it means that there was no answer is for the caller to decide.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import os
import re
import threading
import time
from urllib.parse import urlencode, urlsplit

from .outage import Outage
from .record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from typing import Any

TIMEOUT = 20.0
"""Seconds for one answer"""
POLL_MARGIN = 5.0
"""Seconds for the answer of a long poll, beyond those that it waits: a replica that is frozen says nothing, and the
notice that another one has meanwhile must reach the work"""
MAX_ANSWER = 16 * 2**20
"""Bytes of an answer in JSON"""
PART_BYTES = 65_536
FILE_SECONDS = 900.0
"""Seconds for a whole file of a job over a slow line"""
MAX_FILE = 2**30
"""Bytes of a file of a job; as many as the service takes with one submission at most, and more"""
MAX_WAIT = 60.0
"""Seconds after which a request is tried again, whatever the answer asked for"""


HASHED_NAME = re.compile(r"[0-9a-f]{8}\.[0-9]+")
"""A certificate in a folder that OpenSSL can look it up in"""
TOO_FAST = 429
"""The status of an answer that only asks for patience"""


class _Authorities:
    """The TLS context that all connections of a process share: it trusts what OpenSSL trusts on this machine.

    A folder of certificates that are named by their hashes is read when a certificate is verified, and then one file of
    it; the file of all of them takes 1.3 MB. It is read where there is no such folder, and where that was not enough.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._whole = False

    def context(self) -> ssl.SSLContext:
        """Return the context, made at the first call."""
        import ssl  # an agent whose service has a plain address does without it

        with self._lock:
            if self._context is None:
                folder = "" if self._whole or os.environ.get("SSL_CERT_FILE") else _hashed_folder()
                self._context = ssl.create_default_context(capath=folder or None)
                self._context.set_alpn_protocols(["http/1.1"])
            return self._context

    def reload(self) -> bool:
        """Read all authorities again, as there may be a new one; return whether the file had not been read before."""
        with self._lock:
            self._context, first, self._whole = None, not self._whole, True
            return first


def _hashed_folder() -> str:
    """Return the folder in which OpenSSL finds certificates by their hashes; "" where there is none."""
    import ssl

    folder = ssl.get_default_verify_paths().capath or ""
    with contextlib.suppress(OSError):
        if folder and any(HASHED_NAME.fullmatch(name) for name in os.listdir(folder)):
            return folder
    return ""


AUTHORITIES = _Authorities()


class ServiceUnavailable(OSError):
    """The service did not answer, or cannot now; `wait` are the seconds after which it wants to be asked again."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class RateLimited(ServiceUnavailable):
    """The service has taken much from this worker just now, and takes more after `wait` seconds."""


class TokenUnknown(ServiceUnavailable):
    """The service knows no such token; replicas with another secret say so for a while, too."""


class AttemptEnded(OSError):
    """The attempt has ended, or another launcher runs the worker: the service takes nothing more from this one."""


class RequestRejected(OSError):
    """The service refuses this request, and will again."""

    def __init__(self, status: int, code: str, detail: str, numbers: dict[str, Any]) -> None:
        super().__init__(status, detail)
        self.status = status
        self.code = code
        self.numbers = numbers


class Reply(Record):
    """An answer as it came."""

    status: int
    body: bytes
    wait: float
    sent_at: float
    """When its request was sent, by `clock`"""


class Service:
    """The service as one worker reaches it: its own address, and a token that the service replaces in time."""

    program = "launcher"
    """What it is called on standard error"""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"MAKEWAY_ATTEMPT_URL is no http address: {url!r}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._outage = Outage(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", self.program)
        self._threads = threading.local()
        self.token = token
        self.expired = False
        """Whether the token has expired; a claim or a report gets a new one."""
        self._heard_at = clock()
        self._token_unknown_since: float | None = None

    @property
    def silence(self) -> float:
        """Seconds since the service heard of this worker: since the newest request that it took was sent."""
        return clock() - self._heard_at

    @property
    def token_unknown_for(self) -> float:
        """Seconds for which each answer was that the token is unknown; 0 after any other."""
        return 0.0 if self._token_unknown_since is None else clock() - self._token_unknown_since

    def file(self, digest: str) -> bytes:
        """Return the content of a file of the job."""
        reply = self._send("GET", f"files/{digest}", {}, None, "", TIMEOUT, max_bytes=MAX_FILE)
        self._heard(reply)
        return self._checked(reply)

    def orders(self, known: str, wait: float) -> dict[str, Any]:
        """Return the orders for the worker, as soon as they are not `known`, or after `wait` seconds."""
        query = {"known": known, "wait": wait}
        return self._object(self._send("GET", "orders", query, None, "", POLL_MARGIN + wait))

    def post(self, what: str, value: dict[str, Any]) -> dict[str, Any]:
        """Send JSON and return the JSON that is answered."""
        body = json.dumps(value).encode()
        result = self._object(self._send("POST", what, {}, body, "application/json", TIMEOUT))
        if isinstance(result.get("token"), str):
            self.token, self.expired = result["token"], False
        return result

    def append(self, kind: str, offset: int, data: bytes, dropped: bool) -> int:
        """Send bytes of an output; return how far the service knows it."""
        query = {"offset": offset, "dropped": str(dropped).lower()}
        reply = self._send("POST", f"outputs/{kind}", query, data, "application/octet-stream", TIMEOUT)
        end = self._object(reply).get("end")
        if not isinstance(end, int):
            raise ServiceUnavailable("the answer cannot be read")
        return end

    def _send(
        self,
        method: str,
        what: str,
        query: dict[str, Any],
        body: bytes | None,
        kind: str,
        timeout: float,
        max_bytes: int = MAX_ANSWER,
    ) -> Reply:
        """Send one request; again on a new connection if the one that was kept open had been closed meanwhile."""
        path = f"{self._path}/{what}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        kept = getattr(self._threads, "connection", None) is not None
        while True:
            try:
                return self._exchange(method, path, body, headers, timeout, max_bytes)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.close()
                if self._secure and "CERTIFICATE_VERIFY_FAILED" in str(error) and AUTHORITIES.reload():
                    continue
                if not (kept and isinstance(error, (ConnectionError, http.client.RemoteDisconnected))):
                    self._outage.failed(str(error) or type(error).__name__)
                    raise ServiceUnavailable(f"the service does not answer: {error or type(error).__name__}") from error
                kept = False

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float, max_bytes: int
    ) -> Reply:
        sent_at = clock()
        connection = self._connection(timeout)
        seconds = max(timeout, FILE_SECONDS) if max_bytes == MAX_FILE else timeout
        connection.response_class = functools.partial(_TimedResponse, seconds=seconds)  # type: ignore[assignment]
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = _body(response, max_bytes)
        if response.will_close or response.status >= 500:  # a new connection may lead to another replica
            self.close()
        return Reply(response.status, data, _seconds(response.headers.get("Retry-After")), sent_at)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._threads, "connection", None)
        if connection is None:
            if self._secure:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=timeout, context=AUTHORITIES.context()
                )
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
            self._threads.connection = connection
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def close(self) -> None:
        """Close the connection of this thread."""
        connection = getattr(self._threads, "connection", None)
        self._threads.connection = None
        if connection is not None:
            connection.close()

    def _object(self, reply: Reply) -> dict[str, Any]:
        """Return the JSON object of a successful answer; ServiceUnavailable for any other, as a proxy's error page."""
        body = self._checked(reply)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self._outage.failed("something else answers for it")
            raise ServiceUnavailable("the answer cannot be read")
        self._heard(reply)
        return value

    def _heard(self, reply: Reply) -> None:
        """Note that the service has taken a request."""
        if 200 <= reply.status < 300:
            self._heard_at, self._token_unknown_since = max(self._heard_at, reply.sent_at), None
            self._outage.over()

    def _checked(self, reply: Reply) -> bytes:
        """Return the body of a good answer; raise what another one means."""
        if 200 <= reply.status < 300:
            return reply.body
        try:
            problem = json.loads(reply.body)
            code, detail, numbers = str(problem["code"]), str(problem["detail"]), dict(problem.get("numbers") or {})
        except (ValueError, KeyError, TypeError, RecursionError):
            code, detail, numbers = "", f"status {reply.status}", {}
        if code == "token_expired":
            self.expired = True
            raise ServiceUnavailable(detail)
        if code in ("attempt_ended", "claimed"):
            raise AttemptEnded(detail)
        if reply.status == 401 and code:
            self._token_unknown_since = clock() if self._token_unknown_since is None else self._token_unknown_since
            self._outage.failed(detail)
            raise TokenUnknown(detail)
        if reply.status in (400, 404, 409, 413, 422) and code:
            raise RequestRejected(reply.status, code, detail, numbers)
        # Others may come from a proxy while the service is unavailable.
        if reply.status == TOO_FAST and code == "too_fast":
            raise RateLimited(detail, reply.wait)
        if reply.status != TOO_FAST:
            self._outage.failed(detail)
        raise ServiceUnavailable(detail, reply.wait)


class _TimedResponse(http.client.HTTPResponse):
    """An answer that has to arrive whole within some seconds, however its bytes drip."""

    def __init__(self, sock: socket.socket, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(sock, self.fp.detach(), seconds))


class _TimedReader(io.RawIOBase):
    """What comes from a socket: each part within the timeout of the socket, and all of it within some seconds."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, seconds: float) -> None:
        self._socket = sock
        self._raw = raw
        self._timeout = sock.gettimeout() or TIMEOUT
        self._ends = clock() + seconds

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there; TimeoutError when the time is over."""
        remaining = self._ends - clock()
        if remaining <= 0:
            raise TimeoutError("its answer did not end in time")
        self._socket.settimeout(min(self._timeout, remaining))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Close the reader of the socket, too."""
        if not self.closed:
            super().close()
            self._raw.close()


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Return the body of an answer; ValueError where it is too long."""
    length, result = response.length, bytearray()
    while length is None and len(result) <= max_bytes and (part := response.read(PART_BYTES)):
        result += part
    if max(length or 0, len(result)) > max_bytes:
        raise ValueError(f"its answer is longer than {max_bytes} bytes")
    return bytes(result) if length is None else response.read()


def clock() -> float:
    """Return seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _seconds(text: str | None) -> float:
    return min(MAX_WAIT, float(text)) if text and text.isdigit() else 0.0
