"""A training job as an object: ask it, wait for it, read its result; it lives on without your kernel."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, SupportsIndex, TypeVar, overload

from makeway_api import models
from makeway_api.errors import MakewayError
from makeway_api.models import Checkpoint, Decision, State

from . import view
from .connection import client, explain, me
from .follow import Teller, changes, leaving_alone, print_log, read_log
from .problems import JobError, Refused, StillRunning
from .words import count, did_you_mean, duration, listed, state_word

T = TypeVar("T")

FRESH = 1.0
"""Seconds for which a picture of a job may be shown without asking again."""
PATIENCE = 2.0
"""Seconds that showing a job may wait for the service; then the last known state is shown."""
CANCEL_TAKES = 3.0
CLONE_MAY_CHANGE = ("name", "team", "profile", "env", "priority", "time_limit", "workers", "max_failures")


def _ask(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return call(*args, **kwargs)
    except MakewayError as error:
        raise explain(error) from None


class Job:
    """One job; every question goes to the service, so it may be asked from any kernel at any time."""

    def __init__(self, data: models.Job) -> None:
        self.data: models.Job = data
        self._at = time.monotonic()

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The id, for `makeway.job(id)` after a restart."""
        return self.data.id

    @property
    def name(self) -> str:
        """The name it was submitted with."""
        return self.data.name

    @property
    def team(self) -> str:
        """The team whose quota it uses."""
        return self.data.team

    @property
    def profile(self) -> str:
        """The profile that fixes its GPUs."""
        return self.data.profile

    # -- how it is, now --------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Ask the service now."""
        return self._keep(_ask(client().job, self.id))

    @property
    def status(self) -> str:
        """pending, starting, running, checkpointing, succeeded, failed or cancelled."""
        return self.refresh().data.state.value

    @property
    def reason(self) -> str:
        """Why it is as it is, in one sentence."""
        data = self.refresh().data
        return (data.reason.message if data.reason else "") or data.message

    @property
    def attempt(self) -> int:
        """How many times it was started."""
        return self.refresh().data.attempt

    @property
    def preemptions(self) -> int:
        """How many times it made way."""
        return self.refresh().data.preemptions

    @property
    def done(self) -> bool:
        """True when it has ended."""
        return self.refresh().data.state.ended

    def events(self) -> list[Decision]:
        """Everything that was decided about it, oldest first."""
        return _ask(client().job_events, self.id)

    def checkpoints(self) -> list[Checkpoint]:
        """The newest checkpoint of each attempt, oldest first."""
        data = self.refresh().data
        kept = [a.checkpoint for a in data.attempts if a.checkpoint is not None]
        if data.checkpoint is not None and (not kept or kept[-1] != data.checkpoint):
            kept.append(data.checkpoint)
        return kept

    # -- how it ends -----------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, quiet: bool = False) -> Job:
        """Block until it has ended, telling each change; TimeoutError after `timeout` seconds.

        Interrupting it leaves the job running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        teller = Teller()
        with leaving_alone(self.id, "waiting"):
            for data in changes(self.id, deadline):
                self._keep(data)
                if not quiet:
                    teller.tell(data)
        if not self.data.state.ended:
            still = state_word(self.data.state, self.data.preemptions)
            raise StillRunning(f"Job {self.id} is still {still} after {duration(timeout or 0)}; it goes on.")
        return self

    def result(self, timeout: float | None = None, *, trust: bool = False) -> Any:
        """Wait for the end and return the cell's last value; raises JobError with its traceback where it failed.

        A result is a pickle, and reading one runs its author's code: for a colleague's job say `trust=True`.
        """
        if not self.refresh().data.state.ended:
            self.wait(timeout, quiet=True)
        if failure := self.exception():
            raise failure
        if not trust and self.data.owner != me().name:
            raise Refused(
                f"job {self.id} is {self.data.owner}'s: its result is a pickle, and reading it runs their code in your "
                "kernel. Call result(trust=True) if that is all right."
            )
        try:
            raw: bytes = client().result(self.id)
        except MakewayError as error:
            if error.status == 404:
                raise Refused(self._no_result()) from None
            raise explain(error) from None
        return self._unpickled(raw)

    def exception(self) -> JobError | None:
        """What ended it, or None while it has not ended, or ended well."""
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
            return JobError(self.id, "Failed", f"job {self.id}: {what}. `%logs {self.id}` tells more.")
        return JobError(self.id, error["type"], error["message"], error["traceback"])

    def logs(self, follow: bool = False, attempt: int | None = None, tail: int | None = None) -> str | None:
        """The log of the newest (or one) attempt as text; with `follow` print it as it grows, until the job ends."""
        if follow:
            print_log(self.id, attempt, tail)
            return None
        return read_log(self.id, attempt, tail)

    # -- what you may do with it -----------------------------------------------------------------------------

    def cancel(self) -> Job:
        """End it now; its GPUs are free at once. Returns when it has ended, after a few seconds at the latest."""
        self._keep(_ask(client().cancel, self.id))
        for data in changes(self.id, time.monotonic() + CANCEL_TAKES):
            self._keep(data)
        return self

    def resume(self) -> Job:
        """Put an ended job back into the queue; it goes on from its checkpoint."""
        return self._keep(_ask(client().resume, self.id))

    def clone(self, n: int = 1, **overrides: Any) -> Clones:
        """Prepare n copies, changed by name, team, profile, env, priority, time_limit, workers or max_failures."""
        if not 1 <= n <= 1000:
            raise Refused(f"clone(n={n}): n is from 1 to 1000.")
        for key in overrides:
            if key not in CLONE_MAY_CHANGE:
                hint = did_you_mean(key, CLONE_MAY_CHANGE)
                raise Refused(f"a clone cannot change {key!r}.{hint} It can change {listed(CLONE_MAY_CHANGE)}.")
        return Clones(self.id, n, overrides)

    def preempt_test(self) -> Job:
        """Rehearse: it gets the notice, saves, leaves, and is started again."""
        return self._keep(_ask(client().preempt_test, self.id))

    # -- how it looks ----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return view.job_text(self._shown())

    def _repr_html_(self) -> str:
        return view.job_card(self._shown(), datetime.now(UTC))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    # -- inside ----------------------------------------------------------------------------------------------

    def _keep(self, data: models.Job) -> Job:
        self.data, self._at = data, time.monotonic()
        return self

    def _shown(self) -> models.Job:
        """The newest state that can be had without waiting; showing a job never fails."""
        if time.monotonic() - self._at > FRESH and not self.data.state.ended:
            asking = threading.Thread(target=self._ask_quietly, daemon=True, name="makeway-job")
            asking.start()
            asking.join(PATIENCE)
        return self.data

    def _ask_quietly(self) -> None:
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
            return f"job {self.id} ended well, but {error['message']}; save it to a file inside the cell instead."
        return f"job {self.id} left no result; a cell's result is its last expression or the variable `result`."

    def _unpickled(self, raw: bytes) -> Any:
        try:
            return pickle.loads(raw)
        except Exception as error:
            raise Refused(
                f"the result of job {self.id} cannot be read in this kernel ({type(error).__name__}: {error}); "
                "import what it is made of, then ask again."
            ) from None


class Clones:
    """Copies of a job, not yet submitted."""

    def __init__(self, id: str, n: int, overrides: Mapping[str, Any]) -> None:
        self.id, self.n, self.overrides = id, n, dict(overrides)

    def submit(self) -> Jobs:
        """Submit them all."""
        return Jobs(Job(data) for data in _ask(client().clone, self.id, self.n, self.overrides))

    def __repr__(self) -> str:
        changed = f" with {listed(f'{k}={v!r}' for k, v in self.overrides.items())}" if self.overrides else ""
        return f"{count(self.n, 'clone')} of job {self.id}{changed}, not submitted; call .submit()."


class Jobs(list[Job]):
    """Some jobs, shown as a table."""

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

    def __repr__(self) -> str:
        if not self:
            return "No jobs. `%%train` at the top of a cell submits one."
        text = view.jobs_text([job.data for job in self], datetime.now(UTC), self.owner)
        return text + ("\n… and older ones: %jobs --limit N" if self.more else "")

    def _repr_html_(self) -> str:
        return view.jobs_table([job.data for job in self], datetime.now(UTC), self.more, self.owner)


def job(id: str) -> Job:
    """The job with this id (or this name, if one of mine has it), from any kernel."""
    wanted = str(id).strip()
    try:
        return Job(client().job(wanted))
    except MakewayError as error:
        if error.status not in (404, 422):  # 422: a name with spaces can be no id
            raise explain(error) from None
    mine = _ask(client().jobs, mine=True, limit=200).jobs
    named = [j for j in mine if j.name == wanted] or [j for j in mine if wanted and j.id.startswith(wanted)]
    if named:
        return Job(named[0])
    hint = did_you_mean(wanted, [j.id for j in mine] + [j.name for j in mine if j.name])
    raise Refused(
        f"there is no job {wanted!r} that you may see.{hint} `%jobs` lists yours.", code="not_found", status=404
    )


def jobs(*, all: bool = False, team: str | None = None, state: str | None = None, limit: int = 20) -> Jobs:
    """My newest jobs; with `all` those of my teams."""
    if state is not None and state not in set(State):
        raise Refused(
            f"there is no state {state!r}.{did_you_mean(state, set(State))} It is one of {listed(State, 'or')}."
        )
    page = _ask(client().jobs, team=team, state=state, mine=not (all or team), limit=limit)
    return Jobs((Job(data) for data in page.jobs), more=bool(page.next), owner=bool(all or team))
