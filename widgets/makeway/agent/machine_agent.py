"""Run a machine: join, run the init script, make what runs equal to the orders, report, and end when nothing needs it.

One thread reports, one waits for orders, one asks the provider, one counts the GPUs and removes folders, and this one
acts: none of them waits for another, so that a service, a driver or a disk that hangs delays no signal.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

from ..launcher.files import seconds_between
from ..launcher.pause import Pause
from ..launcher.service import RequestRejected, ServiceUnavailable
from .client import AgentClient, Joining, MachineEnded
from .facts import MachineFacts, address_towards, count_facts
from .init_script import InitScript
from .machine_folder import MachineFolder
from .options import AgentOptions
from .spot import SpotNotice
from .worker_order import MachineOrders, read_orders
from .workers import MachineWorkers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TICK_SECONDS = 0.5
REPORT_SECONDS = 10.0
REPORT_LIMITS = (0.2, 60.0)
"""Seconds between two reports, whatever the service asks for: it must not be flooded, and a machine not be forgotten"""
ORPHAN_LIMITS = (1.0, 30 * 86_400.0)
ORDERS_PAUSE = 3.0
COUNT_SECONDS = 300.0
"""Seconds between two counts of the GPUs: one may be lost"""
STOP_SECONDS = 20.0
"""Seconds for which launchers may end on a machine that the service stops"""
KILLED_SECONDS = 30.0
"""Seconds from the SIGKILL after which the machine ends without the end of what does not die"""
LAST_REPORT_SECONDS = 5.0
MAX_TOKEN = 65_536
TERMINATED = 143


class MachineAgent:
    """The agent of one machine."""

    def __init__(
        self,
        options: AgentOptions,
        folder: MachineFolder,
        *,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._folder = folder
        self._log = log
        self._clock = clock
        self._orphan_after = options.orphan_after
        self._report_seconds = REPORT_SECONDS
        self._client: AgentClient | None = None
        self._workers = MachineWorkers(folder, clock, log, options.container_user)
        self._init = InitScript(folder.file("init"), options.shell, options.init_seconds)
        self._spot = SpotNotice(options.spot)
        self._facts = MachineFacts(0, "", 0, 0, False)
        self._spot_deadline: float | None = None
        self._orders: MachineOrders | None = None
        self._end_reason = ""
        """Why the machine is not needed any more"""
        self._terminated = threading.Event()
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._report_due = threading.Event()
        self._report: dict[str, Any] = {}

    def run(self) -> int:
        """Be the agent until the machine is not needed any more (0), or a SIGTERM (143)."""
        for number_ in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number_, self._on_signal)
        try:
            self._facts = count_facts(self._options.gpus)
            if self._join():
                self._work()
        except MachineEnded as error:
            self._end_reason = str(error)
        return self._end()

    def _on_signal(self, *_: object) -> None:
        self._terminated.set()
        self._wake.set()

    # ── Joining ─────────────────────────────────────────────────────────────

    def _join(self) -> bool:
        """Join, unless this boot has joined; False on a SIGTERM, or if the service is not there for too long."""
        began, pause = self._clock(), Pause()
        while not self._folder.joined:
            wait = 0.0
            try:
                client = Joining(self._options.url, self._token())
                address = address_towards(self._options.url)
                own = {"machine": self._options.machine, "boot": self._folder.boot, "address": address}
                self._folder.keep(client.join({**own, **self._facts.as_report()}))
                break
            except MachineEnded:
                raise
            except (ServiceUnavailable, RequestRejected, OSError, ValueError) as error:
                self._log(f"has not joined: {error}")
                wait = getattr(error, "wait", 0.0)
            self._workers.sync(None)
            if self._clock() - began >= self._orphan_after and not self._workers.running:
                self._end_reason = "the machine could not join"
                return False
            if self._terminated.wait(pause.next(wait)):
                return False
        joined = self._folder.joined
        self._client = AgentClient(self._options.url, self._options.machine, joined["token"])
        self._orphan_after = seconds_between(joined.get("orphan_after"), *ORPHAN_LIMITS) or self._orphan_after
        self._report_seconds = _report_seconds(joined) or REPORT_SECONDS
        self._init.start(str(joined.get("init_script") or ""), joined.get("cpu_only") is True)
        self._log(f"is {self._options.machine}, with {self._facts.gpus} GPUs")
        return True

    def _token(self) -> str:
        """Return the token to join with; OSError with what is wrong with its file."""
        with open(self._options.token_file, encoding="ascii") as file:
            token = file.read(MAX_TOKEN).strip()
        if not token or not token.isprintable():
            raise ValueError(f"{self._options.token_file} has no token")
        return token

    # ── Working ─────────────────────────────────────────────────────────────

    def _work(self) -> None:
        """Act on orders and on what is seen, until the machine is over, an orphan, or stopping."""
        for work in (self._send_reports, self._follow_orders, self._watch_spot, self._tidy):
            threading.Thread(target=work, daemon=True).start()
        while not self._end_reason and not self._terminated.is_set():
            self._act()
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()

    def _act(self, *, start: bool = True) -> None:
        """Do once what is to be done."""
        orders = self._orders
        self._workers.sync(orders, start=start)
        self._folder.write_again()
        report = {
            "boot": self._folder.boot,
            **self._facts.as_report(),
            "init": self._init.result(),
            "spot_deadline": self._spot_deadline,
            "attempts": self._workers.as_report(),
        }
        if report != self._report:
            self._report = report
            self._report_due.set()
        if orders is not None and orders.stop:
            self._end_reason = self._end_reason or "the service has stopped it"
        elif self._orphaned():
            self._end_reason = f"the service was not reached for {self._orphan_after:g} s, and nothing runs"

    def _orphaned(self) -> bool:
        """Whether the service is away for too long: launchers whose jobs have ended would wait for it in vain."""
        silence = self._client.silence if self._client is not None else 0.0
        return silence >= self._orphan_after and not self._workers.working

    def _send_reports(self) -> None:
        """Report every few seconds, and at once when something has changed."""
        assert self._client is not None
        pause = Pause()
        while not self._ended.is_set():
            self._report_due.wait(self._report_seconds)
            self._report_due.clear()
            wait = 0.0
            try:
                if self._report:
                    self._send_report()
                pause = Pause()
                continue
            except MachineEnded as error:
                self._end_reason = self._end_reason or str(error)
                self._wake.set()
                return
            except RequestRejected as error:
                self._log(f"its report was refused: {error.strerror}")
            except OSError as error:
                wait = getattr(error, "wait", 0.0)
            self._ended.wait(pause.next(wait))
            self._report_due.set()

    def _send_report(self) -> None:
        """Send the newest report; keep a token that comes with its answer."""
        client = self._client
        assert client is not None
        answer = client.report(self._report)
        self._report_seconds = _report_seconds(answer) or self._report_seconds
        if client.token != self._folder.joined.get("token"):
            self._folder.keep({**self._folder.joined, "token": client.token})

    def _follow_orders(self) -> None:
        """Get orders again and again; the newest ones hold until there are others."""
        assert self._client is not None
        known, pause = "", Pause(ORDERS_PAUSE)
        while not self._ended.is_set():
            wait = 0.0
            try:
                orders = read_orders(self._client.asked(known))
                if not orders.complete or orders.unreadable:
                    self._log("cannot read all of its orders: what it cannot read it neither starts nor ends")
                if orders.drain and not (self._orders is not None and self._orders.drain):
                    self._log("drains: the service orders nothing new")
                self._orders, pause = orders, Pause(ORDERS_PAUSE)
                if orders.revision == known:
                    self._ended.wait(0.2)  # a service that holds no request
                known = orders.revision
                self._wake.set()
                continue
            except MachineEnded as error:
                self._end_reason = self._end_reason or str(error)
                self._wake.set()
                return
            except OSError as error:
                wait = getattr(error, "wait", 0.0)
                if self._client.expired:
                    self._report_due.set()
            self._ended.wait(pause.next(wait))

    def _watch_spot(self) -> None:
        """Read again and again when the provider takes the machine back."""
        while self._spot.watched and not self._ended.is_set():
            self._spot_deadline = self._spot.deadline()
            self._ended.wait(self._spot.pause)

    def _tidy(self) -> None:
        """Count the GPUs now and then, and once the init script has set up the driver; remove what was taken away."""
        counted_at, after_init = self._clock(), False
        while not self._ended.wait(1.0):
            ready = self._init.result() is not None
            if ready != after_init or self._clock() >= counted_at + COUNT_SECONDS:
                self._facts = count_facts(self._options.gpus)
                counted_at, after_init = self._clock(), ready
            self._folder.empty_trash()
            self._workers.remove_forgotten()

    # ── The end ─────────────────────────────────────────────────────────────

    def _end(self) -> int:
        """End every launcher, report that, and return the exit code."""
        self._log(f"ends: {self._end_reason}" if self._end_reason else "ends, as the machine is stopping")
        kill_at = self._clock() + STOP_SECONDS if self._end_reason else None
        while self._workers.running:
            self._workers.terminate()  # also those that a start has just made
            if kill_at is not None and self._clock() >= kill_at:
                self._workers.kill()
            self._act(start=False)
            if self._workers.stuck_for() >= KILLED_SECONDS:
                self._log("ends without them: what does not die holds up nothing else")
                break
            time.sleep(0.1)
        self._ended.set()
        if self._client is not None and not self._end_reason:
            last = threading.Thread(target=self._last_report, daemon=True)
            last.start()
            last.join(LAST_REPORT_SECONDS)
        return 0 if self._end_reason else TERMINATED

    def _last_report(self) -> None:
        with contextlib.suppress(OSError):
            self._act(start=False)
            self._send_report()


def _report_seconds(answer: dict[str, Any]) -> float | None:
    return seconds_between(answer.get("report_seconds"), *REPORT_LIMITS)
