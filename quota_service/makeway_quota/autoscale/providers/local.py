"""A cloud in a folder: machines are processes of this host, with all that goes wrong in clouds.

For the demo and for tests. Each machine boots for a while and then runs the agent, or, without data to join, its init
script, with the rights of the service: it behaves like a machine, but isolates nothing. `faults.json` in the folder has
what the cloud does wrong, and several processes may use one folder at a time. Prices are those of the deployment's
document.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..instances import Instance, InstanceList, InstanceState
from ..provider import CallOutcomeUnknown, Denied, InvalidLaunch, JoinData, QuotaReached, StockOut, Throttled
from . import local_machine
from .local_machine import MARK, boot_id, processes, read_json, start_ticks, write_json

ID = re.compile(r"i-[0-9a-f]{12}")
TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
STARTS_WITHIN = 60.0
"""Seconds after which an instance without a process has failed"""
FORGOTTEN = 3600.0
"""Seconds after which an instance that has ended is removed, with its console"""
CONSOLE_TAIL = 65_536
KILLED_WITHIN = 2.0
"""Seconds for which the processes of a machine that ends are waited for; the next call goes on"""


@dataclass(slots=True)
class LocalFaults:
    """What the cloud does wrong, and how slow it is; numbers of calls are counted down.

    `stock`: how many of an instance type there are, others without a limit; `quota`: instances of all types. `denied`,
    `throttled`, `lost_before`, `lost_after`: calls that are refused, and launches without an answer, before and after
    they were done. `hidden` and `stale`: seconds until an instance is listed, and the age of lists. `partial`: lists
    lack half of the instances, and say so. `init_fails`, `full_disk`: what goes wrong on a machine that starts.
    """

    boot_seconds: float = 8.0
    stock: dict[str, int] = field(default_factory=dict)
    quota: int | None = None
    denied: bool = False
    throttled: int = 0
    lost_before: int = 0
    lost_after: int = 0
    hidden: float = 0.0
    stale: float = 0.0
    partial: bool = False
    init_fails: bool = False
    full_disk: bool = False


class LocalProvider:
    """The cloud of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "instances").mkdir(parents=True, exist_ok=True)
        (folder / "tokens").mkdir(exist_ok=True)

    def check(self) -> None:
        """Raise a ProviderError if the folder cannot be used, or the cloud refuses the credentials."""
        if not os.access(self.folder, os.W_OK):
            raise Denied(f"{self.folder} cannot be written to")
        if self.faults().denied:
            raise Denied("the credentials are refused")

    def list(self, deployment: str, now: float) -> InstanceList:
        """Return the instances of a deployment."""
        with self._call() as faults:
            at = time.time() - faults.stale
            result = []
            for folder in sorted((self.folder / "instances").iterdir()):
                facts = read_json(folder / "instance.json")
                if facts is None:
                    self._forget_remains(folder)
                    continue
                if facts["launched_at"] + faults.hidden > at:
                    continue
                ended = self._ended_at(folder, facts)
                if ended is not None and ended < time.time() - FORGOTTEN:
                    self._forget(folder, facts)
                elif facts["deployment"] == deployment:
                    result.append(self._instance(folder, facts, at))
            shown = result[: len(result) // 2] if faults.partial else result
            return InstanceList(now, tuple(shown), complete=not faults.partial)

    def launch(self, request: str, token: str, join: JoinData | None = None) -> Instance:
        """Launch a machine; the same token, request and join data return the same one, also if it has ended."""
        if not TOKEN.fullmatch(token):
            raise InvalidLaunch("the token has characters that are not allowed")
        with self._call() as faults:
            if faults.lost_before:
                self._count_down("lost_before")
                raise CallOutcomeUnknown("no answer")
            known = read_json(self.folder / "tokens" / token)
            if known is not None:
                return self._repeated(known, request, join, faults)
            made = self._create(request, token, join, faults)
            if faults.lost_after:
                self._count_down("lost_after")
                raise CallOutcomeUnknown("no answer")
            return made

    def terminate(self, instance: str) -> bool:
        """End a machine with all of its processes. False if there is none, or none any more."""
        with self._call():
            folder = self.folder / "instances" / instance
            facts = read_json(folder / "instance.json") if ID.fullmatch(instance) else None
            if facts is None or self._ended_at(folder, facts) is not None:
                return False
            self._end(folder)
            return True

    def console(self, instance: str) -> str:
        """Return the newest output of a machine's agent and init script."""
        try:
            with (self.folder / "instances" / instance / "console.log").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CONSOLE_TAIL))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def within(self, instance: str) -> Sequence[str]:
        """Return the command by which a machine is started within a network of its own; none: in that of this host."""
        return ()

    def interrupt(self, instance: str, seconds: float) -> None:
        """Take a spot machine back after some seconds; its notice is in its folder at once."""
        write_json(self.folder / "instances" / instance / "spot-notice.json", {"deadline": time.time() + seconds})

    def faults(self) -> LocalFaults:
        """Return what the cloud does wrong now."""
        known = {one.name for one in fields(LocalFaults)}
        given = read_json(self.folder / "faults.json") or {}
        return LocalFaults(**{name: value for name, value in given.items() if name in known})

    def set_faults(self, faults: LocalFaults) -> None:
        """Make the cloud do something wrong, or nothing any more."""
        write_json(self.folder / "faults.json", asdict(faults))

    # ── Calls ───────────────────────────────────────────────────────────────

    @contextmanager
    def _call(self) -> Iterator[LocalFaults]:
        """Hold the folder's lock for one call, which the cloud may refuse."""
        try:
            with (self.folder / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.check()
                if self.faults().throttled:
                    self._count_down("throttled")
                    raise Throttled("too many calls")
                yield self.faults()
        except OSError as error:
            raise CallOutcomeUnknown(f"{self.folder}: {error.strerror}") from error

    def _count_down(self, name: str) -> None:
        faults = self.faults()
        setattr(faults, name, getattr(faults, name) - 1)
        self.set_faults(faults)

    def _repeated(self, known: dict[str, Any], request: str, join: JoinData | None, faults: LocalFaults) -> Instance:
        """Return the machine of a token; one whose launch was cut off by a kill is completed."""
        if (known["request"], known.get("join")) != (request, _user_data(join)):
            raise CallOutcomeUnknown("this token belongs to another request")
        folder = self.folder / "instances" / known["instance"]
        facts = read_json(folder / "instance.json")
        if facts is None:
            self._check_stock(known["type"], faults)
            return self._complete(folder, known | {"launched_at": time.time()})
        if self._ended_at(folder, facts) is None and not (folder / "process.json").exists():
            self._start(folder)
        return self._instance(folder, facts, time.time())

    def _create(self, request: str, token: str, join: JoinData | None, faults: LocalFaults) -> Instance:
        """Launch a machine. Its token is written first, with all that makes it: whatever follows can be repeated."""
        wanted = _parsed(request)
        self._check_stock(wanted["instance"], faults)
        facts = {
            "instance": f"i-{uuid.uuid4().hex[:12]}",
            "machine": wanted["machine"],
            "deployment": wanted["deployment"],
            "type": wanted["instance"],
            "token": token,
            "request": request,
            "join": _user_data(join),
            "launched_at": time.time(),
            "boot_seconds": faults.boot_seconds,
            "init_fails": faults.init_fails,
            "full_disk": faults.full_disk,
        }
        write_json(self.folder / "tokens" / token, facts)
        return self._complete(self.folder / "instances" / facts["instance"], facts)

    def _complete(self, folder: Path, facts: dict[str, Any]) -> Instance:
        folder.mkdir(exist_ok=True)
        write_json(folder / "instance.json", facts)
        self._start(folder)
        return self._instance(folder, facts, time.time())

    def _start(self, folder: Path) -> None:
        """Start the machine's process: not a child of this one, and with nothing of the service's environment."""
        try:
            subprocess.run(
                [
                    *self.within(folder.name),
                    "/bin/sh",
                    "-c",
                    '"$0" -I "$1" "$2" </dev/null >/dev/null 2>&1 &',
                    sys.executable,
                    local_machine.__file__,
                    ".",
                ],
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), MARK: str(folder.resolve())},
                cwd=folder,
                check=True,
                timeout=30,
            )
        except subprocess.SubprocessError as error:
            raise CallOutcomeUnknown(f"the process of {folder.name} was not started: {error}") from error

    def _check_stock(self, kind: str, faults: LocalFaults) -> None:
        running = []
        for folder in (self.folder / "instances").iterdir():
            facts = read_json(folder / "instance.json")
            if facts is not None and self._ended_at(folder, facts) is None:
                running.append(facts["type"])
        if faults.quota is not None and len(running) >= faults.quota:
            raise QuotaReached(f"{faults.quota} machines are allowed")
        if running.count(kind) >= faults.stock.get(kind, sys.maxsize):
            raise StockOut(f"no {kind} is to be had now")

    # ── Machines ────────────────────────────────────────────────────────────

    def _instance(self, folder: Path, facts: dict[str, Any], at: float) -> Instance:
        return Instance(
            folder.name, facts["machine"], facts["deployment"], self._state(folder, facts, at), facts["launched_at"]
        )

    def _state(self, folder: Path, facts: dict[str, Any], at: float) -> InstanceState:
        ended = self._ended_at(folder, facts)
        if ended is not None and ended <= at:
            return "terminated"
        return "running" if at >= facts["launched_at"] + facts["boot_seconds"] else "pending"

    def _ended_at(self, folder: Path, facts: dict[str, Any]) -> float | None:
        """Return when a machine ended; None if it has not. One whose process died has ended, with all that it ran."""
        ended = read_json(folder / "ended.json")
        if ended is None:
            if self._alive(folder, facts):
                return None
            ended = self._end(folder)
        elif not ended.get("killed"):
            self._kill(folder, ended)
        return float(ended["at"])

    def _alive(self, folder: Path, facts: dict[str, Any]) -> bool:
        process = read_json(folder / "process.json")
        if process is None:
            return bool(time.time() - facts["launched_at"] < STARTS_WITHIN)
        return _runs(process)

    def _end(self, folder: Path) -> dict[str, Any]:
        ended = {"at": time.time()}
        write_json(folder / "ended.json", ended)  # a process that starts later ends at once
        self._kill(folder, ended)
        return ended

    def _kill(self, folder: Path, ended: dict[str, Any]) -> None:
        """End all processes of a machine, also those that are started meanwhile; note it when none is left."""
        give_up = time.monotonic() + KILLED_WITHIN
        while result := processes(folder.resolve(), read_json(folder / "process.json")):
            for pid in result:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > give_up:
                return
            time.sleep(0.01)
        write_json(folder / "ended.json", ended | {"killed": True})

    def _forget(self, folder: Path, facts: dict[str, Any]) -> None:
        (self.folder / "tokens" / facts["token"]).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _forget_remains(self, folder: Path) -> None:
        """Remove what is left of a machine without facts: one that was being made or removed, long ago."""
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)


def _user_data(join: JoinData | None) -> dict[str, Any] | None:
    return None if join is None else asdict(join)


def _runs(process: dict[str, Any]) -> bool:
    """Whether a machine's process still runs, and its pid is not that of another one."""
    return bool(process["boot"] == boot_id() and start_ticks(process["pid"]) == process["ticks"])


def _parsed(request: str) -> dict[str, Any]:
    """Return a request; InvalidLaunch if it lacks what a machine needs."""
    try:
        wanted = json.loads(request)
        names = [wanted[name] for name in ("machine", "deployment", "instance")]
    except (ValueError, TypeError, KeyError):
        raise InvalidLaunch("the request is not complete") from None
    if not all(isinstance(name, str) and name for name in names):
        raise InvalidLaunch("the request is not complete")
    return dict(wanted)
