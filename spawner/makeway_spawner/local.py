"""Spawn notebooks as processes of this machine, with a lease.

Two modes. *demo*: every notebook runs as the account that started the Hub, each user in a home of their own below
`homes`. *system*: the Hub runs as root and a notebook belongs to the Unix account that logged in, with its groups
and home, as JupyterHub's LocalProcessSpawner does it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from jupyterhub.orm import User
from jupyterhub.spawner import LocalProcessSpawner
from makeway_api.accounts import account_of_user
from makeway_api.durations import duration
from makeway_api.open_files import lower_limit, soft_limit_of_jobs
from makeway_api.proxies import USERS_VARIABLES
from traitlets import Enum, Unicode, default

from . import listening
from .home import earlier_file_name, file_name, home_of, prepare
from .lease_mixin import LeaseMixin
from .process import kill_marked, start_ticks
from .refusal import Refused
from .server_log import last_line_of, quoted

_POLL_SECONDS = 0.1
"""Seconds between two looks at the process of a server that is starting."""
_MAX_NAME_LENGTH = 120
"""Characters of a user's or a server's name in the name of a log file."""
_MARGIN = 5.0
"""Seconds by which the wait for an answer ends before the Hub gives up the start; the Hub then asks by itself."""


class MakewayLocalSpawner(LeaseMixin, LocalProcessSpawner):  # type: ignore[misc]
    """A notebook on this machine whose GPUs come with a lease."""

    mode = Enum(
        ["demo", "system"],
        default_value="demo",
        help="demo: notebooks run as the account of the Hub; system: as the Unix account that logged in.",
    ).tag(config=True)
    homes = Unicode("", help="demo: the directory of the users' homes.").tag(config=True)

    logs = Unicode("", help="The directory of the notebooks' logs, one file for each; empty: into the Hub's log.").tag(
        config=True
    )

    sockets = Unicode(
        "", help="system: the directory below which every account gets a private folder for its kernels' sockets."
    ).tag(config=True)

    _start_ticks = 0
    """The server's start time: a process that got its pid later is not mistaken for it."""
    _log = ""
    """The name of the server's log file; empty for one that an earlier release started."""

    @default("cmd")
    def _default_cmd(self) -> list[str]:
        return [sys.executable, "-m", "jupyterhub.singleuser"]

    @default("env_keep")
    def _default_env_keep(self) -> list[str]:
        locale = [name for name in os.environ if name.startswith("LC_")]
        return sorted({*USERS_VARIABLES, *locale, "JUPYTERHUB_SINGLEUSER_APP"})

    @default("default_url")
    def _default_default_url(self) -> str:
        return "/lab"

    @default("interrupt_timeout")
    def _default_interrupt_timeout(self) -> int:
        return 8

    @default("term_timeout")
    def _default_term_timeout(self) -> int:
        return 4

    def get_args(self) -> list[str]:
        """Return the arguments: no requests to outside, root allowed where the demo runs as root, private kernels."""
        args = [
            *super().get_args(),
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]
        if self.mode == "demo" and os.geteuid() == 0:
            args.append("--allow-root")
        if self.mode == "system" and self.sockets:
            # Kernels listen on TCP ports otherwise, where every account of this machine can read what they print.
            args.append("--KernelManager.transport=ipc")
        return args

    # -- the account -------------------------------------------------------------------------------------------

    @property
    def home(self) -> Path:
        """The user's home in the demo, which needs no Unix account."""
        return home_of(Path(self.homes or "homes").absolute(), self.user.name)

    def _earlier_home(self) -> Path | None:
        """Return where an earlier release made this user's home; None where it may be that of an older user.

        Names of several users could lead to one home.
        """
        if self.home.is_dir() or file_name(self.user.name) == (name := earlier_file_name(self.user.name)):
            return None
        users = (
            self.user.db.query(User.name).order_by(User.id)
            if isinstance(getattr(self.user, "orm_user", None), User)
            else ()
        )
        first = next((user for (user,) in users if earlier_file_name(user) == name), self.user.name)
        return self.home.with_name(name) if first == self.user.name else None

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the child runs before the server: become the account; in the demo only change to the home."""
        home, soft = str(self.home), soft_limit_of_jobs()
        become: Callable[[], None] = partial(os.chdir, home)
        if self.mode == "system":
            become = super().make_preexec_fn(account_of_user(name).pw_name)

        def preexec() -> None:
            lower_limit(soft)
            become()

        return preexec

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return the variables with the user's name, home and shell."""
        if self.mode == "system":
            account = account_of_user(self.user.name)
            env.update(USER=account.pw_name, HOME=account.pw_dir, SHELL=account.pw_shell or "/bin/sh")
            return env
        env.update(USER=self.user.name, LOGNAME=self.user.name, HOME=str(self.home), SHELL="/bin/bash")
        return env

    def get_env(self) -> dict[str, str]:
        """Return the variables; the environment of this Python comes first in PATH."""
        env: dict[str, str] = super().get_env()
        here = os.path.dirname(sys.executable)
        paths = [part for part in env.get("PATH", os.defpath).split(os.pathsep) if part != here]
        env["PATH"] = os.pathsep.join([here, *paths])
        env.setdefault("LANG", "C.UTF-8")
        if self.mode == "system" and self.sockets:
            env["JUPYTER_RUNTIME_DIR"] = str(self._private_folder())
        return env

    def _private_folder(self) -> Path:
        """Return this account's private folder for sockets; outside of the home, because socket paths must be short."""
        account = account_of_user(self.user.name)
        folder = Path(self.sockets) / str(account.pw_uid)
        folder.parent.mkdir(mode=0o711, exist_ok=True)
        folder.parent.chmod(0o711)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            os.chown(folder, account.pw_uid, account.pw_gid)
        return folder

    # -- the process -------------------------------------------------------------------------------------------

    async def start(self) -> Any:
        """Start the server with its output in a log file."""
        if self.mode == "demo":
            await asyncio.to_thread(prepare, self.home, self._earlier_home())
        with self._open_log() as log:
            own: Any = self
            own.popen_kwargs = {**own.popen_kwargs, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            return await super().start()

    async def start_server(self) -> Any:
        """Start the server and wait until it answers; raise Refused at once where it ends before.

        The Hub would go on asking a server that has ended for `http_timeout`, while its GPUs are taken.
        """
        where = await super().start_server()
        self._store()  # a Hub that is killed while it waits must find the process
        began = time.monotonic()
        until = began + self.start_timeout - min(_MARGIN, self.start_timeout / 10)
        own: Any = self
        path = f"{own.server.base_url if own.server else '/'}api"
        answering = asyncio.ensure_future(listening.answer(where, path))
        try:
            while not answering.done() and time.monotonic() < until:
                await asyncio.wait([answering], timeout=_POLL_SECONDS)
                if (status := own.proc.poll()) is not None:
                    raise Refused(
                        self._ended_at_start(status, time.monotonic() - began), code="server_ended", status=503
                    )
        finally:
            answering.cancel()
        return where

    def _ended_at_start(self, status: int, seconds: float) -> str:
        message = f"The notebook server ended {duration(max(1.0, seconds))} after its start, {_exit_text(status)}."
        where = f" The whole log is {self._log_path}." if self.logs else " Its log is in that of the Hub."
        return f"{message}{quoted(last_line_of(self._log_path)) if self.logs else ''}{where}"

    def how_server_ended(self, status: int) -> str:
        """Return how the server ended, with the last line of its log."""
        line = quoted(last_line_of(self._log_path)) if self.logs else ""
        return f"Its server ended by itself, {_exit_text(status)}.{line}"

    @property
    def _log_path(self) -> Path:
        if not self._log:  # started by an earlier release
            return Path(self.logs) / earlier_file_name(f"{self.user.name}{'-' if self.name else ''}{self.name}.log")
        return Path(self.logs) / self._log

    def _open_log(self) -> IO[bytes]:
        """Open a new log for this server, or the Hub's own."""
        if not self.logs:
            return os.fdopen(os.dup(2), "wb")
        self._log = log_name(self.user.name, self.name)
        path = self._log_path
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")

    async def _signal(self, sig: int) -> bool:
        """Signal the server, unless its pid belongs to another process by now; return whether it is there."""
        if self._start_ticks and start_ticks(self.pid) != self._start_ticks:
            return False
        there: bool = await super()._signal(sig)
        return there

    async def run_post_stop_hook(self) -> None:
        """Kill every process of the session that could still use its GPUs, then release them."""
        if self._lease is not None and self._lease.gpus:
            killed = await asyncio.to_thread(kill_marked, "MAKEWAY_SESSION", self._lease.id)
            if killed:
                self.log.info("Killed %i processes left over from %s", killed, self._log_name)
        await super().run_post_stop_hook()

    def load_state(self, state: dict[str, Any]) -> None:
        """Read the process back after a restart of the Hub."""
        super().load_state(state)
        self._start_ticks = int(state.get("ticks") or 0)
        self._log = str(state.get("log") or "")

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores, with the start time beside the pid."""
        state: dict[str, Any] = super().get_state()
        if self.pid:
            self._start_ticks = self._start_ticks or start_ticks(self.pid)
            state["ticks"] = self._start_ticks
            state["log"] = self._log
        return state

    def clear_state(self) -> None:
        """Forget the process."""
        super().clear_state()
        self._start_ticks = 0


def log_name(user: str, server: str) -> str:
    """Return the name of a server's log file; no two servers have the same."""
    part = _MAX_NAME_LENGTH
    return f"{file_name(user, part)}+{file_name(server, part)}.log" if server else f"{file_name(user, part)}.log"


def _exit_text(status: int) -> str:
    """Return how a process ended, in words: with its exit code, or by which signal."""
    if status >= 0:
        return f"with exit code {status}"
    with suppress(ValueError):
        return f"by the signal {signal.Signals(-status).name}"
    return f"by the signal {-status}"
