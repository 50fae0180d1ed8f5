"""Handle a training job as an object: state, waiting, result, log; the job runs on without this kernel."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from makeway_api import models
from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import Checkpoint, Decision, JobProgress, State
from makeway_api.quantities import count, listed

from . import payload, view
from .blocks import bundle
from .connection import client, explain, me
from .follow import Reporter, changes, leaving_alone, print_log, read_log
from .problems import JobError, Refused, StillRunning
from .words import did_you_mean, state_word, typed

if TYPE_CHECKING:
    from .feed import Feed

T = TypeVar("T")

FRESH = 1.0
"""Seconds for which the last known state of a job is shown without a request."""
TIMEOUT = 2.0
"""Seconds that showing a job may wait for the service; then the last known state is shown."""
CANCEL_TAKES = 3.0
"""Seconds that cancelling waits for the end of the job."""
CLONE_MAY_CHANGE = ("name", "team", "profile", "image", "env", "priority", "time_limit", "workers", "max_failures")


def _call(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return call(*args, **kwargs)
    except MakewayError as error:
        raise explain(error) from None


def _feed() -> Feed | None:
    """Return the feed of the live outputs, where one was shown: commands need none of it."""
    module = sys.modules.get(f"{__package__}.feed")
    return None if module is None else module.FEED


class Job:
    """One job; its state is read from the service, so any kernel may use it at any time."""

    def __init__(self, data: models.Job) -> None:
        self.data: models.Job = data
        self._at = time.monotonic()
        self._known_at = datetime.now(UTC)

    # -- identity ----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its id, for `makeway.job(id)` after a restart."""
        return self.data.id

    @property
    def name(self) -> str:
        """Its name."""
        return self.data.name

    @property
    def team(self) -> str:
        """The team whose quota it uses."""
        return self.data.team

    @property
    def profile(self) -> str:
        """The profile that fixes its GPUs."""
        return self.data.profile

    # -- state -------------------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Read the state from the service."""
        return self._keep(_call(client().job, self.id))

    @property
    def status(self) -> str:
        """Its state: pending, starting, running, checkpointing, succeeded, failed or cancelled."""
        return self.refresh().data.state.value

    @property
    def reason(self) -> str:
        """The reason of its state, in one sentence."""
        data = self.refresh().data
        return (data.reason.message if data.reason else "") or data.message

    @property
    def attempt(self) -> int:
        """The number of its newest attempt; 0 before the first."""
        return self.refresh().data.attempt

    @property
    def preemptions(self) -> int:
        """The number of its preemptions."""
        return self.refresh().data.preemptions

    @property
    def progress(self) -> JobProgress | None:
        """The progress that its code reported (`checkpoint.loop`, `checkpoint.report`); None before its first step."""
        return self.refresh().data.progress

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.refresh().data.state.ended

    def events(self) -> list[Decision]:
        """Return the decisions about it, oldest first."""
        return _call(client().job_events, self.id)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the newest checkpoint of each attempt, oldest first."""
        data = self.refresh().data
        kept = [a.checkpoint for a in data.attempts if a.checkpoint is not None]
        if data.checkpoint is not None and (not kept or kept[-1] != data.checkpoint):
            kept.append(data.checkpoint)
        return kept

    # -- result ------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, quiet: bool = False) -> Job:
        """Wait until it has ended and print each change; raise TimeoutError after `timeout` seconds.

        An interrupt leaves the job running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        reporter = Reporter()
        with leaving_alone(self.id, "waiting"):
            for data in changes(self.id, deadline):
                self._keep(data)
                if not quiet:
                    reporter.report(data)
        if not self.data.state.ended:
            still = state_word(self.data.state, self.data.preemptions)
            raise StillRunning(f"Job {self.id} is still {still} after {duration(timeout or 0)}; it continues.")
        return self

    def result(self, timeout: float | None = None, *, trust: bool = False) -> Any:
        """Wait for the end and return the cell's last value; raise JobError with its traceback if it failed.

        A result is a pickle, and reading one runs its author's code: for a colleague's job pass `trust=True`.
        """
        if not self.refresh().data.state.ended:
            self.wait(timeout, quiet=True)
        if failure := self.exception():
            raise failure
        if not trust and self.data.owner != me().name:
            raise Refused(
                f"job {self.id} belongs to {self.data.owner}: its result is a pickle, and reading it runs their "
                "code in your kernel. Call result(trust=True) if you trust it."
            )
        try:
            raw: bytes = client().result(self.id)
        except MakewayError as error:
            if error.status == 404:
                raise Refused(self._no_result()) from None
            raise explain(error) from None
        return payload.result_of(raw)

    def exception(self) -> JobError | None:
        """Return the exception that ended it; None while it runs, and if it succeeded."""
        data = self.refresh().data
        if data.state is State.CANCELLED:
            why = data.reason.message if data.reason else data.message
            return JobError(self.id, "Cancelled", f"job {self.id} has no result. {why}".strip())
        if data.state is not State.FAILED:
            return None
        error = self._error()
        if error is None:
            code = f" with exit code {data.exit_code}" if data.exit_code is not None else ""
            what = data.message or f"it ended{code}"
            return JobError(self.id, "Failed", typed(f"job {self.id}: {what}. `%logs {self.id}` shows more."))
        return JobError(self.id, error["type"], error["message"], error["traceback"])

    def logs(
        self, follow: bool = False, attempt: int | None = None, tail: int | None = None, *, all: bool = False
    ) -> str | None:
        """Return the log of the newest (or one) attempt, or its last `tail` lines.

        With `follow` print it as it grows, until the job ends: from its newest part on, with `all` from its beginning.
        """
        if follow:
            print_log(self.id, attempt, tail, all)
            return None
        return read_log(self.id, attempt, tail)

    # -- actions -----------------------------------------------------------------------------------------------

    def cancel(self) -> Job:
        """Cancel it; its GPUs are free at once. Return when it has ended, after CANCEL_TAKES seconds at the latest."""
        self._keep(_call(client().cancel, self.id))
        for data in changes(self.id, time.monotonic() + CANCEL_TAKES):
            self._keep(data)
        return self

    def resume(self) -> Job:
        """Requeue an ended job; it continues from its checkpoint."""
        return self._keep(_call(client().resume, self.id))

    def move(self, *, team: str | None = None, profile: str | None = None) -> Job:
        """Move it to the queue of another team, another profile, or both, while it is pending."""
        return self._keep(_call(client().move, self.id, team, profile))

    def clone(self, n: int = 1, **overrides: Any) -> Clones:
        """Return n copies to submit, changed by `overrides` (CLONE_MAY_CHANGE)."""
        if not 1 <= n <= 1000:
            raise Refused(f"clone(n={n}): n must be from 1 to 1000.")
        for key in overrides:
            if key not in CLONE_MAY_CHANGE:
                hint = did_you_mean(key, CLONE_MAY_CHANGE)
                raise Refused(f"a clone cannot change {key!r}.{hint} It can change {listed(CLONE_MAY_CHANGE)}.")
        return Clones(self.id, n, overrides)

    def preempt_test(self) -> Job:
        """Test its preemption: it gets the notice, saves, makes way, and is requeued."""
        return self._keep(_call(client().preempt_test, self.id))

    # -- display -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return what this kernel knows of it; the service is not asked."""
        self._newest()
        return view.job_text(self.data, self._known_at)

    def _repr_html_(self) -> str:
        self._newest()
        return str(view.job_card(self.data, self._known_at))

    def _ipython_display_(self) -> None:
        """Show its card, which stays up to date until the job ends."""
        from .live import CELLS

        shown = self._shown()
        if not CELLS.in_kernel:
            raise NotImplementedError  # a terminal shows its text
        from .cards import Card

        Card(shown, self._known_at)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        shown = self._shown()
        return bundle([block for part in view.job_parts(shown, self._known_at) for block in part], repr(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    # -- internal ----------------------------------------------------------------------------------------------

    def _keep(self, data: models.Job) -> Job:
        self.data, self._at, self._known_at = data, time.monotonic(), datetime.now(UTC)
        if (feed := _feed()) is not None:
            feed.learn(data)
        return self

    def _newest(self) -> None:
        """Take what the live cards of this kernel know, where that is newer."""
        if (feed := _feed()) is not None and (news := feed.news(self.id)) and news.known_at > self._known_at:
            self.data, self._known_at = news.job, news.known_at

    def _shown(self) -> models.Job:
        """Return the newest state that is available within TIMEOUT; never raises."""
        self._newest()
        age = (datetime.now(UTC) - self._known_at).total_seconds()
        if age > FRESH and not self.data.state.ended:
            fetching = threading.Thread(target=self._fetch_quietly, daemon=True, name="makeway-job")
            fetching.start()
            fetching.join(TIMEOUT)
        return self.data

    def _fetch_quietly(self) -> None:
        with suppress(MakewayError):
            self._keep(client().job(self.id))

    def _error(self) -> dict[str, str] | None:
        try:
            error = client().error(self.id)
        except MakewayError as problem:
            if problem.status == 404:
                return None
            raise explain(problem) from None
        return {key: str(error.get(key) or "") for key in ("type", "message", "traceback")}

    def _no_result(self) -> str:
        error = self._error()
        if error and error["type"] == "ResultNotKept":
            return f"job {self.id} succeeded, but {error['message']}; save it to a file inside the cell instead."
        return f"job {self.id} left no result; a cell's result is its last expression or the variable `result`."


class Clones:
    """Copies of a job, not yet submitted."""

    def __init__(self, id: str, n: int, overrides: Mapping[str, Any]) -> None:
        self.id, self.n, self.overrides = id, n, dict(overrides)

    def submit(self) -> Jobs:
        """Submit the copies."""
        return Jobs(Job(data) for data in _call(client().clone, self.id, self.n, self.overrides))

    def __repr__(self) -> str:
        changed = f" with {listed(f'{k}={v!r}' for k, v in self.overrides.items())}" if self.overrides else ""
        return f"{count(self.n, 'clone')} of job {self.id}{changed}, not submitted; call .submit()."


class Jobs(list[Job]):
    """A list of jobs that is shown as a table; slices, sums and copies are, too."""

    def __init__(self, jobs: Iterable[Job] = (), *, more: bool = False, owner: bool = False) -> None:
        super().__init__(jobs)
        self.more = more
        self.owner = owner

    @overload
    def __getitem__(self, key: SupportsIndex) -> Job: ...
    @overload
    def __getitem__(self, key: slice) -> Jobs: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Job | Jobs:
        return Jobs(super().__getitem__(key), owner=self.owner) if isinstance(key, slice) else super().__getitem__(key)

    def __add__(self, other: list[Any]) -> Jobs:  # type: ignore[override]
        if not isinstance(other, list):
            return NotImplemented
        return Jobs([*self, *other], more=self.more, owner=self.owner or getattr(other, "owner", False))

    def __radd__(self, other: list[Any]) -> Jobs:
        return Jobs([*other, *self], more=self.more, owner=self.owner) if isinstance(other, list) else NotImplemented

    def __mul__(self, n: SupportsIndex) -> Jobs:
        return Jobs(super().__mul__(n), more=self.more, owner=self.owner)

    __rmul__ = __mul__

    def copy(self) -> Jobs:
        """Return the same jobs in a list of their own."""
        return Jobs(self, more=self.more, owner=self.owner)

    __copy__ = copy

    def __repr__(self) -> str:
        if not self:
            return typed(view.NO_JOBS)
        known = [job.data for job in self]
        text = view.jobs_text(known, self._known_at(), self.owner)
        return text + (typed(f"\n{view.OLDER}") if self.more else "")

    def _ipython_display_(self) -> None:
        """Show the table, which stays up to date while one of its jobs has not ended."""
        from .live import CELLS

        known_at = self._known_at()
        if not CELLS.in_kernel or all(job.data.state.ended for job in self):
            raise NotImplementedError  # a terminal shows its text, and what has ended changes no more
        from .cards import JobTable

        JobTable([job.data for job in self], known_at, self.more, self.owner)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return bundle(view.jobs_blocks([job.data for job in self], self._known_at(), self.more, self.owner), repr(self))

    def _repr_html_(self) -> str:
        return str(view.jobs_table([job.data for job in self], self._known_at(), self.more, self.owner))

    def _known_at(self) -> datetime:
        """Return when the oldest of these states was read; the service is not asked."""
        for job in self:
            job._newest()
        return min((job._known_at for job in self), default=datetime.now(UTC))


def job(id: str) -> Job:
    """Return the job with this id, or my job with this name or id prefix; raise Refused if there is none."""
    wanted = str(id).strip()
    try:
        return Job(client().job(wanted))
    except MakewayError as error:
        if error.status not in (404, 422):  # 422: a name with spaces is no id
            raise explain(error) from None
    mine = _call(client().jobs, mine=True, limit=200).jobs
    named = [j for j in mine if j.name == wanted] or [j for j in mine if wanted and j.id.startswith(wanted)]
    if named:
        return Job(named[0])
    hint = did_you_mean(wanted, [j.id for j in mine] + [j.name for j in mine if j.name])
    raise Refused(
        typed(f"there is no job {wanted!r} that you may see.{hint} `%jobs` lists yours."), code="not_found", status=404
    )


def jobs(*, all: bool = False, team: str | None = None, state: str | None = None, limit: int = 20) -> Jobs:
    """Return my newest jobs; with `all` those of my teams."""
    if state is not None and state not in set(State):
        raise Refused(f"unknown state {state!r}.{did_you_mean(state, set(State))} Valid states: {listed(State)}.")
    page = _call(client().jobs, team=team, state=state, mine=not (all or team), limit=limit)
    return Jobs((Job(data) for data in page.jobs), more=bool(page.next), owner=bool(all or team))
