"""Jobs as processes of this machine, with its own GPUs or virtual ones.

The backend of the embedded default and of a single shared server. Every job has a launcher that outlives the
service; a restarted service finds it again by its spooled order, its pid and its start time.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ...quarantine import Quarantine
from ...values import Notice
from ..base import (
    AttemptElsewhere,
    Backend,
    BackendError,
    BackendUnavailable,
    Key,
    NodeStatus,
    Observation,
    StartOrder,
    TerminationProgress,
)
from ..untrusted import UnreadableJson
from ..versions import ObservationTracker
from .attempts import LAUNCHER_GRACE, MAX_TRIES, LocalAttempt
from .gpus import nodes_here
from .held_devices import holding
from .jobdir import AttemptFiles, Layout, read_order, remove_order, write_order
from .launch import check_shared, install_launcher, spawn, spool
from .machine_loss import VanishedLaunchers
from .processes import Mark, Process, carried, marked, sweep
from .users import UnixAccount, account_of, this_account

log = logging.getLogger("makeway.local")

T = TypeVar("T")

OBSERVING = "looking at its attempt"
LOG_LIMIT = 64 * 2**20
FULL = (errno.ENOSPC, errno.EDQUOT)
"""A job whose disk is full waits until there is room again"""
CLOSE_SECONDS = 10.0
"""The longest grace that jobs get when Makeway itself stops."""
CLAIM_SECONDS = 5.0
"""Seconds for which a launcher that an earlier process started may still claim its attempt"""
ORDER_FIELDS = {"owner": "", "grace": 30.0}
"""What is taken for an attempt whose order is damaged"""


class LocalBackend(Backend):
    """Starts, watches and ends jobs on this machine; see `base.Backend` for what each method guarantees."""

    name = "local"
    shared = False
    durable_checkpoints = True
    keeps_outputs = True

    def __init__(
        self,
        state_dir: str | Path,
        *,
        pool: str = "",
        nodes: Sequence[NodeStatus] | None = None,
        virtual_gpus: int = 10,
        virtual_nodes: int = 1,
        system_users: bool = False,
        launcher_python: str | None = None,
        log_limit: int = LOG_LIMIT,
        tick: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`nodes`: the machines to offer; default: the real GPUs here, else `virtual_gpus` over `virtual_nodes`.

        `pool` "": the policy document says which GPU is in which pool.
        """
        self._layout = Layout(Path(state_dir), shared=system_users)
        self._nodes = tuple(nodes) if nodes is not None else nodes_here(pool, virtual_gpus, virtual_nodes)
        self._account_of: Callable[[str], UnixAccount] = account_of if system_users else lambda owner: this_account()
        self._system_users = system_users
        self._python = launcher_python or sys.executable
        self._launcher = Path()
        self._log_limit = log_limit
        self._every = tick
        self._clock = clock
        self._wake: Callable[[], None] = lambda: None
        self._attempts: dict[Key, LocalAttempt] = {}
        self._note_progress: Callable[[str, int, object], None] = lambda workload, attempt, progress: None
        self._watched: dict[Key, Process] = {}
        self._silent: set[Key] = set()
        self._vanished = VanishedLaunchers()
        self._troubled: dict[Key, str] = {}
        """attempts that could not be looked at the last time, and why"""
        self._warned: dict[Key, str] = {}
        """those of which the log tells already"""
        self.quarantine = Quarantine()
        """that of the loop, once it runs"""
        self._changes = ObservationTracker()
        self._hand = ThreadPoolExecutor(1, thread_name_prefix="makeway-local")
        self._starters = ThreadPoolExecutor(4, thread_name_prefix="makeway-start")
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._opened = False
        self._closing = False
        """whether no launcher is started any more: an order that has none yet is for the next process"""

    @property
    def virtual(self) -> bool:
        """Whether the GPUs are virtual."""
        return any(node.virtual for node in self._nodes)

    def quarantine_in(self, quarantine: Quarantine) -> None:
        """Add what an observation fails with to this quarantine."""
        self.quarantine = quarantine

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever `observe` would answer something new."""
        self._wake = wake

    def on_progress(self, note: Callable[[str, int, object], None]) -> None:
        """Call `note` (thread-safe, cheap) with a job, its attempt and what its process wrote about its progress."""
        self._note_progress = note

    async def open(self) -> None:
        """Make the folders, adopt what runs, and start what was ordered but never started."""
        self._closing, self._opened = False, True
        await self._do(self._open)
        self._follow_up()
        self._ticking = asyncio.create_task(self._tick())

    async def open_for_reading(self) -> None:
        """Nothing has to be opened to know the nodes; the attempts are those of the service that runs."""

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop observing; with `stop_jobs` notice everything, wait for its grace (10 s at most), then kill."""
        if not self._opened:
            return
        self._closing = True
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        while self._tasks:
            await asyncio.wait(self._tasks)
        if stop_jobs:
            await self._stop_all()
        for key in list(self._watched):
            self._unwatch(key)
        await self._do(self._layout.closed)

    async def observe(self, since: int | None = None) -> Observation:
        """Return the nodes, and the attempts that are not forgotten."""
        await self._do(self._refresh)
        self._follow_up()
        self._tell_troubled()
        attempts = {key: attempt.status for key, attempt in self._attempts.items() if not attempt.forgotten}
        running = [attempt.header for attempt in self._attempts.values() if not attempt.ended]
        return self._changes.observation(holding(self._nodes, running), attempts, since)

    def _tell_troubled(self) -> None:
        """Quarantine the attempts that cannot be looked at, for pages and `/readyz`: each is tried at each look."""
        troubled = {key[0]: OSError(why) for key, why in self._troubled.items()}
        for workload in self.quarantine.names(OBSERVING, "workload") - troubled.keys():
            self.quarantine.passed(OBSERVING, "workload", workload)
        for workload, error in troubled.items():
            self.quarantine.add(OBSERVING, "workload", workload, error)

    async def start(self, order: StartOrder) -> None:
        """Start an attempt exactly once; BackendError when it never can."""
        await self._change(lambda: self._prepare(order))

    async def notice(self, workload: str, attempt: int, notice: Notice) -> None:
        """Order an attempt to save and end; it is killed at the deadline."""
        if (known := self._attempts.get((workload, attempt))) is not None:
            await self._change(lambda: known.notice(notice))

    async def kill(self, workload: str, attempt: int) -> None:
        """Stop an attempt now, with everything it started."""
        if (known := self._attempts.get((workload, attempt))) is not None:
            await self._change(lambda: known.kill())

    async def forget(self, workload: str, attempt: int) -> None:
        """Stop reporting an attempt; one that still runs is killed first."""
        if (known := self._attempts.get((workload, attempt))) is not None:
            known.forgotten = True
            await self._change(lambda: self._drop(known))

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return what was done to end what is left of a workload; None where nothing is."""
        unended = [attempt for attempt in self._attempts.values() if attempt.workload == workload and not attempt.ended]
        if not unended:
            return None
        pids = [f"process {attempt.process.pid}" for attempt in unended if attempt.process is not None]
        tries = max(attempt.end_tries for attempt in unended)
        return TerminationProgress(tuple(pids), tries, self._clock() + self._every)

    async def log(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int]:
        """Read an attempt's log; inside `log_gap` there is nothing to read."""
        return await self._read(workload, attempt, lambda files: files.log(offset, size))

    async def log_gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a very long log that were dropped (from, to); None when it is whole."""
        return await self._read(workload, attempt, lambda files: files.log_gap())

    async def result(self, workload: str, attempt: int) -> bytes | None:
        """Read what the job left as its result, or None."""
        return await self._read(workload, attempt, lambda files: files.read("result.pkl", 2**31))

    async def result_part(self, workload: str, attempt: int, offset: int, size: int) -> tuple[bytes, int] | None:
        """Return part of the result and the size of the whole."""
        return await self._read(workload, attempt, lambda files: files.part("result.pkl", offset, size))

    async def error(self, workload: str, attempt: int) -> bytes | None:
        """Read the JSON about the job's exception, or None."""
        return await self._read(workload, attempt, lambda files: files.read("error.json", 2**20))

    async def purge(self, workload: str, team: str = "") -> bool:
        """Remove everything kept for a workload; what still runs of it is killed first."""
        mine = [attempt for attempt in self._attempts.values() if attempt.workload == workload]
        for attempt in mine:
            await self.forget(attempt.workload, attempt.number)
        while any(key[0] == workload for key in self._attempts):
            await asyncio.sleep(0.02)
            await self.observe()
        await asyncio.to_thread(self._layout.purge, workload)
        return True

    def folder_bytes(self, workload: str) -> int | None:
        """Return the bytes on disk of a job's folder; None without one. Blocking."""
        return self._layout.folder_bytes(workload)

    async def output_bytes(self, workload: str, attempt: int) -> tuple[int, int]:
        """Return the bytes of an attempt's log, and of its result and exception."""
        return await self._read(workload, attempt, AttemptFiles.output_bytes)

    async def remove_output(self, workload: str, attempt: int) -> None:
        """Remove the log, the result and the exception of an attempt that has ended."""
        await self._read(workload, attempt, AttemptFiles.remove_output)

    def running_elsewhere(self, workloads: Collection[str]) -> list[AttemptElsewhere]:
        """Return which of these workloads run by the order of a service with another state directory. Blocking."""
        result: dict[str, AttemptElsewhere] = {}
        for pid, mark in marked().items():
            folder = Path(mark.job_dir)
            if folder.name in workloads and self._layout.is_of_another(folder, mark.attempt):
                result.setdefault(folder.name, AttemptElsewhere(folder.name, mark.job_dir, pid))
        return [result[workload] for workload in sorted(result)]

    # -- in the one thread that touches attempts ----------------------------------------------------------------

    def _open(self) -> None:
        self._layout.make()
        self._launcher = install_launcher(self._layout)
        if self._system_users:
            check_shared(self._layout, self._python)
        self._vanished.service_was_killed = self._layout.opened()
        for path in self._layout.orders():
            self._follow(path)
        self._hold_back()
        self._refresh()
        self._vanished.end_startup_scan()

    def _follow(self, path: Path) -> None:
        """Take up an attempt from its spooled order; a damaged one too, which may still run."""
        workload, _, number = path.name.rpartition("@")
        damaged = ""
        try:
            header = read_order(path)
            if header is None:
                return
        except UnreadableJson as error:
            damaged = str(error)
            header = {**ORDER_FIELDS, "workload": workload, "attempt": int(number), "uid": self._layout.owner(workload)}
        files = AttemptFiles(self._layout, workload, int(number), int(header["uid"]), -1)
        self._attempts.setdefault((workload, int(number)), LocalAttempt(header, files, damaged))

    def _hold_back(self) -> None:
        """Start no second launcher of an attempt that a process is there of: it may claim the attempt in a moment."""
        attempts = self._attempts.values()
        unclaimed = {attempt.mark: attempt for attempt in attempts if self._check(attempt, lambda a: not a.claimed)}
        for mark in carried({mark: attempt.files.uid for mark, attempt in unclaimed.items()}) if unclaimed else ():
            unclaimed[mark].held_until = time.monotonic() + CLAIM_SECONDS

    def _prepare(self, order: StartOrder) -> None:
        if (order.workload, order.attempt) in self._attempts:
            return
        path = self._layout.order(order.workload, order.attempt)
        if not path.exists():
            try:
                spool(self._layout, order, self._account_of(order.owner), self._nodes, self._log_limit)
            except OSError as error:
                message = f"The job could not be written to {self._layout.root}: {error}"
                raise (BackendUnavailable if error.errno in FULL else BackendError)(message) from error
        self._follow(path)

    def _refresh(self) -> bool:
        """Check every attempt; conclude those whose launcher is gone; return whether something is new.

        Each is checked by itself: one that cannot be understood ends, and holds up no other.
        """
        now, self._troubled = self._clock(), {}
        before = {key: attempt.status for key, attempt in self._attempts.items()}
        gone = [attempt for attempt in list(self._attempts.values()) if self._check(attempt, lambda a: a.refresh(now))]
        if gone:
            self._conclude(gone, now)
        for key, attempt in self._attempts.items():
            if (progress := attempt.new_progress()) is not None:
                self._note_progress(*key, progress)
        for attempt in list(self._attempts.values()):
            self._check(attempt, self._tidy)
        self._warned = {key: why for key, why in self._troubled.items() if key in self._attempts}
        return before != {key: attempt.status for key, attempt in self._attempts.items()}

    def _check(self, attempt: LocalAttempt, observe: Callable[[LocalAttempt], T]) -> T | None:
        """Check one attempt; None where that fails, which is its end unless the service itself is in trouble."""
        key = (attempt.workload, attempt.number)
        try:
            result = observe(attempt)
        except (OSError, MemoryError) as error:
            if self._warned.get(key) != str(error):
                log.warning("Attempt %s of %s is looked at again later: %s", key[1], key[0], error or "no memory")
            self._troubled[key] = self._warned[key] = str(error)
            return None
        except Exception as error:
            log.exception("Attempt %s of %s is ended: it cannot be looked at", key[1], key[0])
            self._troubled[key] = f"{type(error).__name__}: {error}"
            attempt.problem = attempt.problem or f"its files cannot be understood ({type(error).__name__})"
            return None
        return result

    def _conclude(self, gone: Sequence[LocalAttempt], now: float) -> None:
        """Kill what is left of attempts without a launcher, and write down how they ended."""
        remaining = self._swept(gone)
        over = [attempt for attempt in gone if attempt.mark not in remaining]
        for attempt in gone:
            attempt.end_tries += attempt.mark in remaining
        alone = [attempt for attempt in over if self._check(attempt, lambda a: a.vanished)]
        others = [other for other in self._attempts.values() if other not in gone]
        running = sum(other.process is not None and not other.ended for other in others)
        all_vanished = self._vanished.all_at_once({(a.workload, a.number) for a in alone}, running)
        for attempt in over:
            if attempt not in alone:
                self._check(attempt, lambda a: a.conclude(now))
            elif all_vanished is not None:
                self._check(attempt, lambda a: a.conclude(now, all_vanished=all_vanished))

    def _swept(self, gone: Sequence[LocalAttempt]) -> set[Mark]:
        """Kill what is left of attempts, and return the marks of those of which something still is, or may be."""
        try:
            return set(sweep({attempt.mark: attempt.files.uid for attempt in gone}))
        except Exception:
            log.exception("Processes are looked for attempt by attempt")
        done = {attempt.mark: self._check(attempt, lambda a: [sweep({a.mark: a.files.uid})]) for attempt in gone}
        return {mark for mark, swept in done.items() if swept is None or mark in swept[0]}

    def _tidy(self, attempt: LocalAttempt) -> None:
        """End what cannot be understood, trim the order of what runs, and drop what is forgotten."""
        if attempt.problem and not attempt.ended and attempt.mark not in sweep({attempt.mark: attempt.files.uid}):
            attempt.end(attempt.problem, self._clock())
        if attempt.held_until is not None and time.monotonic() > attempt.held_until:
            sweep({attempt.mark: attempt.files.uid})
            attempt.held_until = None
        if attempt.header.get("files") and attempt.status.started_at is not None:
            self._trim(attempt)
        if attempt.forgotten:
            self._drop(attempt)

    def _trim(self, attempt: LocalAttempt) -> None:
        """Keep the order of an attempt that has its files, without them."""
        attempt.header["files"] = []
        with suppress(OSError):
            write_order(self._layout.order(attempt.workload, attempt.number), attempt.header, ())

    def _drop(self, attempt: LocalAttempt) -> None:
        if not attempt.ended:
            attempt.kill()
            return
        remove_order(self._layout.order(attempt.workload, attempt.number))
        self._attempts.pop((attempt.workload, attempt.number), None)

    # -- in the event loop --------------------------------------------------------------------------------------

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._hand, work)

    async def _change(self, work: Callable[[], None]) -> None:
        """Do something to an attempt, and wake the loop if that shows."""

        def both() -> bool:
            before = set(self._attempts)
            work()
            return self._refresh() or before != set(self._attempts)

        changed = await self._do(both)
        self._follow_up()
        if changed:
            self._wake()

    async def _read(self, workload: str, attempt: int, read: Callable[[AttemptFiles], T]) -> T:
        def work() -> T:
            return read(AttemptFiles(self._layout, workload, attempt, self._layout.owner(workload), -1))

        return await asyncio.to_thread(work)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                if await self._do(self._refresh):
                    self._wake()
                self._follow_up()
            except Exception:  # the next look, or the cycle's own, shows it
                log.exception("The jobs of this machine could not be looked at; this is repeated")

    def _follow_up(self) -> None:
        """Start the launchers that are wanted, and watch exactly the processes that run."""
        for key, attempt in list(self._attempts.items()):
            if not self._closing and self._check(attempt, lambda a: a.wants_launcher):
                attempt.spawning = True
                task = asyncio.create_task(self._spawn(attempt))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            process = attempt.process
            if process is not None and process.fd is not None and key not in self._watched:
                asyncio.get_running_loop().add_reader(process.fd, self._gone, key)
                self._watched[key] = process
        for key in list(self._watched):
            if key not in self._attempts or self._attempts[key].ended:
                self._unwatch(key)

    def _gone(self, key: Key) -> None:
        """Stop watching a launcher that has ended, and wake the loop."""
        handle = self._watched[key].fd
        if handle is not None:
            asyncio.get_running_loop().remove_reader(handle)
            self._silent.add(key)
        self._wake()

    def _unwatch(self, key: Key) -> None:
        process = self._watched.pop(key)
        if key not in self._silent and process.fd is not None:
            asyncio.get_running_loop().remove_reader(process.fd)
        self._silent.discard(key)
        process.close()

    async def _spawn(self, attempt: LocalAttempt) -> None:
        loop = asyncio.get_running_loop()
        order = self._layout.order(attempt.workload, attempt.number)
        work = (attempt, order, self._launcher, self._python, self._account_of)
        try:
            why = await loop.run_in_executor(self._starters, spawn, *work)
        except Exception as error:  # of this job's start alone
            log.exception("The launcher of %s could not be started", attempt.workload)
            why = f"{type(error).__name__}: {error}"
        attempt.tries += 1
        attempt.spawning = False
        await self._do(lambda: self._check(attempt, lambda a: self._came_up(a, why)))
        await self._do(self._refresh)
        self._follow_up()
        self._wake()

    def _came_up(self, attempt: LocalAttempt, why: str | None) -> None:
        """End an attempt whose launcher did not come up, however often it was started."""
        if not attempt.claimed and attempt.tries >= MAX_TRIES:
            sweep({attempt.mark: attempt.files.uid})
            attempt.could_not_start(why or "its launcher did not come up", self._clock())

    async def _stop_all(self) -> None:
        now, began = self._clock(), time.monotonic()
        there = [attempt for attempt in self._attempts.values() if not attempt.ended]
        running = [attempt for attempt in there if self._check(attempt, lambda a: a.claimed)]
        max_wait = 0.0
        for attempt in running:
            grace = min(CLOSE_SECONDS, attempt.grace)
            max_wait = max(max_wait, grace + LAUNCHER_GRACE + 1.0)
            notice = Notice("Makeway is stopping", now, now + grace)
            await self.notice(attempt.workload, attempt.number, notice)
        while any(not attempt.ended for attempt in running) and time.monotonic() - began < max_wait:
            await asyncio.sleep(0.05)
            await self._do(self._refresh)
