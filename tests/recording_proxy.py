"""A forward proxy on loopback that records every request it gets and refuses it, as a company's proxy does."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

SPELLINGS = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class RecordingProxy:
    """Listens from `with RecordingProxy() as proxy:` until the end of the block; `got` has what reached it."""

    def __init__(self) -> None:
        self.got: list[str] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def _refuse(self) -> None:
                got.append(f"{self.requestline}\n{self.headers}")
                self.send_response(403)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_CONNECT = _refuse

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, folder: Path) -> dict[str, str]:
        """Return all spellings of the variables with this proxy, and credentials for every host in a .netrc file."""
        netrc = folder / "netrc"
        netrc.write_text("default login operator password of-the-operator\n")
        netrc.chmod(0o600)
        return {**dict.fromkeys(SPELLINGS, self.url), "NETRC": str(netrc)}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
