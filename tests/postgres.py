"""A PostgreSQL server of the tests' own, and a network to it that can be cut."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from makeway_quota.store.database.database import parse
from makeway_quota.store.migrate import upgrade
from sqlalchemy import create_engine, text

from kube_cluster.certificates import Authority

AUTHORITY = Path("authority", "ca.crt")
"""In the folder of a server with TLS."""


def _tool(name: str) -> str | None:
    result = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(result[-1]) if result else None)


@contextmanager
def postgres_server(host: str = "", clients: str = "", *, tls: bool = False) -> Iterator[str]:
    """Start a server behind a socket in a temporary folder and yield its folder; it refuses to run as root.

    With `host`, an address of this machine, it also listens there, for clients of a network with the password; with
    `tls` over TLS only, and the certificate of its authority is in `AUTHORITY` of the folder.
    """
    pytest.importorskip("psycopg")
    initdb, postgres, ready = (_tool(name) for name in ("initdb", "postgres", "pg_isready"))
    if not (initdb and postgres and ready):
        pytest.skip("PostgreSQL's server is not installed")
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="makeway-pg-", ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        made = subprocess.run(
            [initdb, "-D", data, "-U", "makeway", "-A", "trust", "-E", "UTF8", "--no-sync"],
            user=user,
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"PostgreSQL cannot be set up here: {made.stderr.decode().strip()[-200:]}")
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
        if host:
            settings += _on_network(Path(folder), host, clients, tls=tls)
            settings += _with_certificate(Path(folder), host, user) if tls else []
        with open(f"{folder}/log", "wb") as log:
            server = subprocess.Popen([postgres, "-D", data, *settings], user=user, stdout=log, stderr=log)
        try:
            while subprocess.run([ready, "-q", "-h", folder], check=False).returncode:
                assert server.poll() is None, Path(folder, "log").read_text(encoding="utf-8")
                time.sleep(0.1)
            if host:
                _set_password(folder)
            yield folder
        finally:
            server.send_signal(signal.SIGINT)  # at once, also with open connections
            server.wait(60)


def _on_network(folder: Path, host: str, clients: str, *, tls: bool) -> list[str]:
    """Choose a password, let clients of a network in with it, and return the server's settings."""
    (folder / "network").write_text(f"{secrets.token_hex(16)}@{host}", encoding="utf-8")
    access = folder / "data" / "pg_hba.conf"  # whose first line that fits counts
    line = f"{'hostssl' if tls else 'host'} all all {clients} scram-sha-256\n"
    refused = f"hostnossl all all {clients} reject\n" if tls else ""
    access.write_text(line + refused + access.read_text(encoding="utf-8"), encoding="utf-8")
    return ["-c", f"listen_addresses={host}"]


def _with_certificate(folder: Path, host: str, owner: str | None) -> list[str]:
    """Have an authority certify the server, whose user `owner` is, and return the settings for it."""
    authority = Authority(folder / AUTHORITY.parent)
    given = authority.server_certificate("server", "postgres", [host])
    owned = [Path(shutil.copy(file, folder / file.name)) for file in given]
    for file in owned:
        file.chmod(0o600)
        if owner:
            shutil.chown(file, owner)
    return ["-c", "ssl=on", "-c", f"ssl_cert_file={owned[0]}", "-c", f"ssl_key_file={owned[1]}"]


def _set_password(folder: str) -> None:
    password, _, _ = (Path(folder) / "network").read_text(encoding="utf-8").partition("@")
    admin = create_engine(address(folder), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"ALTER USER makeway PASSWORD '{password}'"))
    admin.dispose()


def network_database(folder: str, database: str) -> str:
    """Make a database anew and return its URL for clients of the network."""
    empty_database(folder, f'"{database}"')
    return f"postgresql+psycopg://makeway:{(Path(folder) / 'network').read_text(encoding='utf-8')}/{database}"


def address(folder: str, database: str = "postgres") -> str:
    """Return the URL of a database of the server in this folder."""
    return f"postgresql+psycopg://makeway@/{database}?host={folder}"


def empty_database(folder: str, name: str = "one_test", template: str = "template1") -> str:
    """Make a database anew and return its URL."""
    admin = create_engine(address(folder), isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    finally:
        admin.dispose()
    return address(folder, name)


def migrated_database(folder: str) -> str:
    """Make a database anew as a copy of one that was migrated, which is the same, and return its URL."""
    return empty_database(folder, template=_template(folder))


@cache
def _template(folder: str) -> str:
    """Migrate a database once for each server and return its name."""
    upgrade(parse(empty_database(folder, "migrated")))
    return "migrated"


class Network:
    """A TCP proxy in front of the server: while it is cut, connections stay open and no byte passes either way."""

    def __init__(self, folder: str) -> None:
        self._socket = f"{folder}/.s.PGSQL.5432"
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self.refusing = False
        """whether new connections are closed at once"""
        self.port = 0

    def url(self, database: str = "one_test") -> str:
        """Return the URL that leads through this proxy."""
        return f"postgresql+psycopg://makeway@127.0.0.1:{self.port}/{database}"

    def cut(self) -> None:
        """Forward no byte from now on."""
        self._open.clear()

    def mend(self) -> None:
        """Forward everything again, the bytes that were held back first."""
        self._open.set()

    def lose_answers(self) -> None:
        """Close each connection that is open now as soon as the server answers something, which is lost."""
        self._unanswered = set(self._clients)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection, both ways."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if self.refusing:
                raise ConnectionRefusedError
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket)
        except (OSError, asyncio.CancelledError):
            writer.close()
            return
        self._clients.add(writer)
        ways = [self._pump(reader, far_writer), self._pump(far_reader, writer)]
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*ways)
        self._clients.discard(writer)
        for item in (writer, far_writer):
            item.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                if writer in self._unanswered:
                    break
                writer.write(data)
                await writer.drain()
        await self._open.wait()
        writer.close()

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def network(folder: str) -> AsyncIterator[Network]:
    """Serve a proxy for the server in this folder, on a free port."""
    proxy = Network(folder)
    server = await asyncio.start_server(proxy.carry, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
