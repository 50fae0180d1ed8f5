"""Forward connections to the portal, until the wire is cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Wire:
    """A TCP forwarder that can be cut and mended."""

    def __init__(self, url: str) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        self._target = int(host.partition(":")[2])
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}/{path}"
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._whole = False
        for end in self._ends:
            _shut(end)
        self._ends.clear()

    def mend(self) -> None:
        """Forward connections again."""
        self._whole = True

    def close(self) -> None:
        self.cut()
        _shut(self._server)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with source, sink:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        _shut(source)
        _shut(sink)
