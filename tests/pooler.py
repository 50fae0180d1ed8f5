"""A connection pooler in front of PostgreSQL, as pgbouncer with `pool_mode = transaction` or `session` is one."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENCRYPTION = (80877103, 80877104)
"""Requests for TLS and GSSAPI, which this pooler does not have"""


class Pooler(socketserver.ThreadingTCPServer):
    """Lends connections to a server: for one transaction each, or for as long as their client stays."""

    daemon_threads = True

    def __init__(self, folder: str, database: str, *, mode: str, size: int) -> None:
        super().__init__(("127.0.0.1", 0), Client)
        self.mode = mode
        self._free = threading.Condition()
        self._connections = [connected(folder, database) for _ in range(size)]
        self.greeting = self._connections[0][1]

    @property
    def url(self) -> str:
        """The address of the database through this pooler."""
        return f"postgresql+psycopg://makeway@127.0.0.1:{self.server_address[1]}/one_test"

    def lend(self) -> socket.socket:
        with self._free:
            self._free.wait_for(lambda: self._connections)
            return self._connections.pop()[0]

    def take_back(self, connection: socket.socket) -> None:
        with self._free:
            self._connections.append((connection, b""))
            self._free.notify()


class Client(socketserver.BaseRequestHandler):
    """One client of the pooler."""

    server: Pooler

    def handle(self) -> None:
        lent: socket.socket | None = None
        try:
            while (code := struct.unpack("!i", startup(self.request)[:4])[0]) in ENCRYPTION:
                self.request.sendall(b"N")
            assert code
            self.request.sendall(self.server.greeting)
            while (message := one_message(self.request))[:1] != b"X":
                lent = lent or self.server.lend()
                lent.sendall(message)
                if message[:1] in (b"Q", b"S"):
                    idle = self._answer(lent)
                    if idle and self.server.mode == "transaction":
                        self.server.take_back(lent)
                        lent = None
        except (ConnectionError, OSError):
            pass
        finally:
            if lent is not None:
                self.server.take_back(lent)

    def _answer(self, lent: socket.socket) -> bool:
        """Pass on the answer of the server; return whether no transaction is open."""
        while True:
            message = one_message(lent)
            self.request.sendall(message)
            if message[:1] == b"Z":
                return message[5:] == b"I"


def connected(folder: str, database: str) -> tuple[socket.socket, bytes]:
    """Return a connection to the server behind a socket, and what it said at the beginning."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(f"{folder}/.s.PGSQL.5432")
    words = b"".join(word.encode() + b"\0" for word in ("user", "makeway", "database", database)) + b"\0"
    made.sendall(struct.pack("!ii", len(words) + 8, 196608) + words)
    text = b""
    while (message := one_message(made))[:1] != b"Z":
        text += message
    return made, text + message


def startup(connection: socket.socket) -> bytes:
    return exactly(connection, struct.unpack("!i", exactly(connection, 4))[0] - 4)


def one_message(connection: socket.socket) -> bytes:
    head = exactly(connection, 5)
    return head + exactly(connection, struct.unpack("!i", head[1:])[0] - 4)


def exactly(connection: socket.socket, size: int) -> bytes:
    result = b""
    while len(result) < size:
        data = connection.recv(size - len(result))
        if not data:
            raise ConnectionResetError
        result += data
    return result


@contextmanager
def pooler(folder: str, *, mode: str = "transaction", size: int = 3, database: str = "one_test") -> Iterator[Pooler]:
    """Serve a pooler for the server in this folder, on a free port."""
    with Pooler(folder, database, mode=mode, size=size) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
            for connection, _ in made._connections:
                connection.close()
