"""Locate and create what the portal keeps on disk: secrets, ports, logs and homes below the state directory."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PORT = 8000
_PORTS = ("hub", "proxy_api", "service")
LISTENING = range(20_000, 32_768)
"""Ports that Linux gives to no outgoing connection."""


@dataclass(frozen=True, slots=True)
class StateDirectory:
    """The state directory: MAKEWAY_STATE_DIR, or `var/`."""

    root: Path

    @classmethod
    def of(cls, env: Mapping[str, str] = os.environ) -> StateDirectory:
        """Return the state directory of an environment; nothing is created."""
        return cls(Path(env.get("MAKEWAY_STATE_DIR") or "var").expanduser().absolute())

    @property
    def secrets(self) -> Path:
        """The generated secrets (mode 0700)."""
        return self.root / "secrets"

    @property
    def logs(self) -> Path:
        """The Hub's log."""
        return self.root / "logs"

    @property
    def notebook_logs(self) -> Path:
        """The logs of the notebook servers."""
        return self.logs / "notebooks"

    @property
    def homes(self) -> Path:
        """The homes of the demo's users."""
        return self.root / "homes"

    @property
    def sockets(self) -> Path:
        """The sockets of kernels in system mode, in one private folder for each account."""
        return self.root / "run"

    @property
    def problem_file(self) -> Path:
        """The file in which the quota service writes why it cannot start."""
        return self.root / "trouble.txt"

    @property
    def address_file(self) -> Path:
        """The file in which the Hub writes where its proxy listens, before it does."""
        return self.root / "address.json"

    @property
    def password_file(self) -> Path:
        """The demo's generated password."""
        return self.secrets / "password"

    @property
    def backend_file(self) -> Path:
        """The file with the backend of the demo's last start."""
        return self.root / "backend"

    @property
    def is_new(self) -> bool:
        """Whether no service has made its tables here yet; `create` makes an empty file."""
        database = self.root / "makeway.sqlite"
        return not database.exists() or not database.stat().st_size

    @property
    def proxy_pid(self) -> Path:
        """The pid file of JupyterHub's proxy."""
        return self.root / "proxy.pid"

    def create(self) -> None:
        """Create the directories and the databases' files with their modes; raise OSError if that is not allowed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for path, mode in ((self.secrets, 0o700), (self.logs, 0o700), (self.notebook_logs, 0o700), (self.homes, 0o711)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
        for name in ("jupyterhub.sqlite", "makeway.sqlite"):
            self._private(self.root / name, "")

    def secret(self, name: str, *, size: int = 32) -> str:
        """Return a secret, generated at the first call and kept from then on (mode 0600)."""
        path = self.secrets / name
        self._private(path, secrets.token_hex(size) + "\n")
        return path.read_text().strip()

    def password(self) -> str:
        """Return the demo's password: four groups of four characters, about 79 bits."""
        alphabet = "abcdefghjkmnpqrstuvwxyz23456789"
        groups = ("".join(secrets.choice(alphabet) for _ in range(4)) for _ in range(4))
        self._private(self.password_file, "-".join(groups) + "\n")
        return self.password_file.read_text().strip()

    def ports(self) -> dict[str, int]:
        """Return the inner ports, kept from the last run so that running notebooks find a restarted Hub.

        A port that another process took meanwhile is replaced.
        """
        path = self.root / "ports.json"
        try:
            known = {str(k): int(v) for k, v in json.loads(path.read_text()).items()}
        except (OSError, ValueError, AttributeError):
            known = {}
        chosen = {name: known[name] if is_free(known.get(name, 0)) else free_port() for name in _PORTS}
        if chosen != known:
            path.write_text(json.dumps(chosen) + "\n")
        return chosen

    @staticmethod
    def _private(path: Path, text: str) -> None:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except FileExistsError:
            path.chmod(0o600)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1 now."""
    if not 0 < port < 65536:
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now.

    It lies below the range from which Linux takes the ports of outgoing connections, so that none of them takes it
    before a server listens there.
    """
    for _ in range(100):
        port = secrets.choice(LISTENING)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
