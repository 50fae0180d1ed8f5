"""Hold a lease for every server: request, wait, renew and release, for both spawners.

`LeaseMixin` comes first among a spawner's bases. The lease is requested in `run_pre_spawn_hook` (outside
`start_timeout`), stored at once, renewed from here while the server runs, also after a restart of the Hub, and
released in `run_post_stop_hook`, which JupyterHub runs after a stop, a crash and a cancelled start alike.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from jupyterhub.utils import maybe_future
from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import Session, SessionRequest
from makeway_api.quantities import gpus
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential
from traitlets import Float

from . import listening
from .form import SpawnForm
from .lease import Lease
from .options import FRACTIONAL, Choice, fractional, is_unspecified, read_options, without_choice
from .progress import Progress
from .refusal import Refused, refusal_of
from .service import LAST_OFFERS, is_unavailable

GONE = frozenset({404, 410})
"""The statuses of a lease that has ended."""


_CHECK_AGAIN = 0.5
"""Seconds between two looks whether a server that does not answer has ended"""
WAITS_TO_EVICT = frozenset({"protected", "patience"})
"""The reasons whose `not_before` is when others make way, not when the session starts"""
EARLIEST = {True: "nothing makes way for it in the next", False: "not in the next"}
"""What the pending page shows in front of the seconds until `not_before`"""


class LeaseMixin(SpawnForm):
    """A spawner that starts no server without a lease and keeps no lease without a server."""

    first_step = ("server", "Starting the notebook server")
    """Phase and message with which the start of a server begins, once the lease is granted."""

    renew_seconds = Float(
        5.0, min=0.1, help="Seconds between renewals of a lease; at most a third of its duration."
    ).tag(config=True)
    wait_seconds = Float(20.0, min=0.1, help="Seconds of one long poll for a pending lease.").tag(config=True)
    patience_seconds = Float(
        120.0, min=0.0, help="Seconds after which a pending start gives up on a quota service that does not answer."
    ).tag(config=True)

    _lease: Lease | None = None
    _choice: Choice | None = None
    _ended: str = ""
    """Why the server must stop, once its lease has ended."""
    _renewing: asyncio.Task[None] | None = None
    _progress: Progress | None = None
    _end_sentence = ""
    """How the last server ended, for its user; empty while one runs, and where its user stopped it."""
    _checked = False
    """Whether a Hub that was restarted has looked whether the server is still there."""
    _interrupted = False
    """Whether the Hub was restarted while the server was starting, and the server was not seen since."""
    _made_way_for = ""
    """For whom the session had to make way."""

    @property
    def makeway_end(self) -> str:
        """Return how the last server ended, for the Hub's pages; empty where its user stopped it."""
        return self._end_sentence

    @property
    def makeway_persistent_paths(self) -> list[str] | None:
        """Return the folders whose files outlive the server, for the Hub's pages; None: all files do."""
        return None

    def _titles(self, choice: Choice) -> tuple[str, str]:
        profile, team = super()._titles(choice)
        lease = self._lease
        if lease is not None and (lease.profile, lease.team) == (choice.profile, choice.team):
            return lease.profile_title or profile, lease.team_title or team
        return profile, team

    # -- before the start --------------------------------------------------------------------------------------

    async def run_pre_spawn_hook(self) -> None:
        """Run the site's own hook, then wait for a lease; a start that fails here leaves no lease behind."""
        await maybe_future(super().run_pre_spawn_hook())
        self._ended = self._end_sentence = self._made_way_for = ""
        self._interrupted = False
        await self._release()
        self._progress = Progress()
        try:
            self._choice = await self._read_choice()
            self._store_choice(self._choice)
            await self._obtain_lease(self._choice)
        except BaseException:
            await asyncio.shield(self._release())
            raise
        self._start_renewing()

    async def _read_choice(self) -> Choice:
        """Return what the start asks for; where it says nothing, a notebook without GPUs if there is one."""
        if not is_unspecified(self.user_options):
            return read_options(self.user_options)
        try:
            return without_choice(await self._offers())
        except MakewayError as error:
            if not is_unavailable(error):
                raise refusal_of(error) from error
            return Choice(LAST_OFFERS.without_gpus(self.cpu_profiles)[0])

    async def _obtain_lease(self, choice: Choice) -> None:
        profile, team = self._titles(choice)
        self.report("admission", f"Requesting {profile}" + (f" for {team}" if team else ""))
        try:
            await self._check_whole_gpus(choice)
            session = await self._request(choice)
        except MakewayError as error:
            if is_unavailable(error) and LAST_OFFERS.needs_no_gpu(choice.profile, self.cpu_profiles):
                self.report("admission", "The quota service does not answer; a notebook without GPUs starts anyway.")
                return
            raise refusal_of(error) from error
        self._keep(session)
        if self.whole_gpus_only and (message := fractional(session.profile_title or profile, session.gpus)):
            raise Refused(message, code=FRACTIONAL)
        self._start_renewing()
        session = await self._wait_for_grant(session)
        self._keep(session)
        self.report("node", self._lease.sentence() if self._lease else "")

    async def _check_whole_gpus(self, choice: Choice) -> None:
        """Raise Refused for a fraction before the request: a request may already preempt a job."""
        if not self.whole_gpus_only:
            return
        known = LAST_OFFERS.profile(choice.profile)
        if known is None or fractional(known.title, known.gpus):  # the policy may have changed since
            await self._offers()
            known = LAST_OFFERS.profile(choice.profile)
        if known is not None and (message := fractional(known.title, known.gpus)):
            raise Refused(message, code=FRACTIONAL)

    async def _request(self, choice: Choice) -> Session:
        """Request a lease, in a task of its own: a start cancelled meanwhile must learn which lease to release."""
        body = SessionRequest(
            user=self.user.name,
            server=self.name,
            profile=choice.profile,
            team=choice.team,
            preemptible=choice.preemptible,
            image=choice.image or None,
        )
        request = asyncio.ensure_future(self.quota_client.request_session(body))
        try:
            session: Session = await asyncio.shield(request)
        except asyncio.CancelledError:
            await asyncio.wait([request], timeout=10)
            if request.done() and not request.cancelled() and request.exception() is None:
                self._keep(request.result())
            raise
        return session

    async def _wait_for_grant(self, session: Session) -> Session:
        """Return the session once it has its GPUs; raise Refused when it ends or the service stays unavailable."""
        while session.phase not in ("granted", "running"):
            if session.state.ended or session.phase == "over":
                raise self._ended_before_start(session)
            self._report_waiting(session)
            try:
                session = await self._next_version(session)
            except MakewayError as error:
                raise refusal_of(error) from error
        return session

    async def _next_version(self, session: Session) -> Session:
        """Return the session after its next change or one long poll, whatever the service's restarts in between."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, MakewayError) and is_unavailable(error)),
            wait=wait_random_exponential(multiplier=0.1, max=min(1.0, self.renew_seconds)),
            stop=stop_after_delay(self.wait_seconds + self.patience_seconds),
            before_sleep=lambda _: self.report(
                "admission", "The quota service does not answer; your place in the queue is kept."
            ),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                session = await self.quota_client.session(session.id, wait=self.wait_seconds, version=session.version)
        return session

    def _ended_before_start(self, session: Session) -> Refused:
        title = session.profile_title or session.profile
        reason = session.reason
        message = reason.message if reason else f"The session for {title} ended before it started."
        return Refused(message, code=reason.code if reason else "ended", status=409)

    def _report_waiting(self, session: Session) -> None:
        phase = session.phase if session.phase in ("admission", "reclaim", "node") else "admission"
        reason = session.reason
        message = reason.message if reason else f"Waiting for {gpus(session.gpus)}"
        within = _seconds_to(reason.ready_by) if reason else None
        earliest = _seconds_to(reason.not_before) if reason else None
        words = {} if reason is None or earliest is None else {"wait": EARLIEST[reason.code in WAITS_TO_EVICT]}
        self.report(phase, message, within=within, earliest=earliest, **words)

    def report(self, phase: str, message: str, **more: Any) -> None:
        """Show a message on the pending page."""
        if self._progress is not None:
            self._progress.add(phase, message, **more)

    async def progress(self) -> Any:
        """Yield what was reported; the events of the spawners below say less."""
        if self._progress is not None:
            async for event in self._progress.follow():
                yield event

    # -- while the server runs ---------------------------------------------------------------------------------

    async def start(self) -> Any:
        """Start the server and notify the service of it."""
        self.report(*self.first_step)
        where = await self.start_server()
        self.report("server", "Waiting for the notebook server to answer", progress=90)
        if self._lease is not None:
            self._lease.started = False
        self._store()
        self._stop_renewing()
        self._start_renewing()  # at once: the first renewal notifies the service
        return where

    async def start_server(self) -> Any:
        """Start the server as the spawner below does, and return its address."""
        return await super().start()

    def get_env(self) -> dict[str, str]:
        """Return the server's variables with those of the lease: devices, team, profile, address of the service."""
        env: dict[str, str] = super().get_env()
        env["MAKEWAY_URL"] = self.makeway_url or self.makeway_api_url
        env["CUDA_VISIBLE_DEVICES"] = ""
        if self._choice is not None:
            env["MAKEWAY_PROFILE"] = self._choice.profile
            env["MAKEWAY_TEAM"] = self._choice.team or ""
        if self._lease is not None:
            env.update(self._lease.env())
        return env

    async def poll(self) -> int | None:
        """Return the server's exit status, None while it runs; stop it first if its lease has ended."""
        status: int | None = await super().poll()
        if status is None and self._ended:
            self.log.warning("Stopping %s: %s", self._log_name, self._ended)
            self._end_sentence = f"Makeway stopped it: {self._ended.rstrip('.')}."
            await self.stop()
            status = await super().poll()
            return 1 if status is None else status
        if status is None and self._choice is not None:
            self._interrupted = False
            self._start_renewing()
        if status is None and self.pending == "check" and not self._checked:
            self._checked = True
            status = await self._answers_or_ends()
        if status is not None and self._choice is not None and self.pending not in ("spawn", "stop"):
            self._end_sentence = self._end_sentence or self._how_it_ended(status)
        return status

    async def _answers_or_ends(self) -> int | None:
        """Return None once the server answers, its exit status once it has ended, 1 where it does neither in time.

        A Hub that starts would wait for the whole `http_timeout` for each server that it had, whatever becomes of it
        meanwhile: where a node was drained, the pods of both were evicted together, and the server's is terminating.
        """
        own: Any = self
        if own.server is None:
            return None
        loop = asyncio.get_running_loop()

        def ask() -> tuple[str, asyncio.Task[None], float]:
            url = str(own.server.url)
            return url, loop.create_task(listening.answer(url, f"{own.server.base_url}api")), loop.time()

        url, answer, since = ask()
        try:
            while loop.time() < since + own.http_timeout:
                await asyncio.wait([answer], timeout=_CHECK_AGAIN)
                answered = answer.done()
                status: int | None = await super().poll()
                if status is not None:
                    return status
                if own.server is not None and str(own.server.url) != url:  # a pod gets its address when it starts
                    answer.cancel()
                    url, answer, since = ask()
                elif answered:
                    return None
                if self._ended:
                    return await self.poll()
        finally:
            answer.cancel()
        self._end_sentence = f"It did not answer for {duration(own.http_timeout)} after the Hub was restarted."
        return 1

    def _how_it_ended(self, status: int) -> str:
        if self._interrupted:
            return "The Hub was restarted while it was starting."
        return self.how_server_ended(status)

    def how_server_ended(self, status: int) -> str:
        """Return how a server ended that was not stopped, in a sentence for its user."""
        return f"Its server ended by itself, with exit code {status}."

    async def run_post_stop_hook(self) -> None:
        """Release the lease, whatever ended the server, then run the site's own hook."""
        if self._made_way_for and not self._end_sentence:
            self._end_sentence = f"It was preemptible, and made way for {self._made_way_for}."
        await self._release()
        await maybe_future(super().run_post_stop_hook())

    # -- the lease ---------------------------------------------------------------------------------------------

    def _keep(self, session: Session) -> None:
        started = self._lease.started if self._lease and self._lease.id == session.id else None
        self._lease = Lease.of(session, started)
        self._store()

    def _store(self) -> None:
        """Write the state now: the Hub itself writes it only once the server is up."""
        if self.orm_spawner is not None:
            self.orm_spawner.state = self.get_state()
            self.user.db.commit()

    def _store_choice(self, choice: Choice) -> None:
        self.user_options = choice.options()
        if self.orm_spawner is not None:
            self.orm_spawner.user_options = self.user_options
            self.user.db.commit()

    def _start_renewing(self) -> None:
        """Start the renewal task unless it runs already."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew_until_ended())

    def _stop_renewing(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None and renewing is not asyncio.current_task():
            renewing.cancel()

    async def _renew_until_ended(self) -> None:
        while not self._ended:
            try:
                await self._renew()
            except MakewayError as error:
                if self._lease is not None and error.status in GONE:
                    self._ended = f"its lease has ended: {error.message}"
                elif self._lease is not None:
                    self.log.warning("The lease of %s was not renewed: %s", self._log_name, error.message)
            except Exception:
                self.log.exception("The lease of %s was not renewed", self._log_name)
            if not self._ended:
                await asyncio.sleep(self.renew_seconds)
        if self._poll_callback is not None:
            asyncio.get_running_loop().create_task(self.poll_and_notify())

    async def _renew(self) -> None:
        """Renew once; a server that was started while the service was unavailable gets its lease here."""
        lease = self._lease
        if lease is None:
            if self._choice is not None and self.pending != "stop":
                self._keep(await self._request(self._choice))
            return
        if lease.started is False:
            await self.quota_client.session_started(lease.id)
            lease.started = True
        session = await self.quota_client.renew(lease.id)
        if notice := session.notice:
            self._made_way_for = notice.by_owner or notice.by_team or "others"
        if session.state.ended and self._lease is lease:
            reason = session.reason
            self._ended = f"its session ended: {reason.message}" if reason else "its session ended"

    async def _release(self) -> None:
        """Stop renewing and release the lease; an unavailable service ends it by itself for lack of renewals."""
        self._stop_renewing()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self.quota_client.release(lease.id, self._end_sentence)
        except MakewayError as error:
            self.log.warning("Lease %s of %s was not released: %s", lease.id, self._log_name, error.message)

    def load_state(self, state: dict[str, Any]) -> None:
        """Read the lease back after a restart of the Hub."""
        super().load_state(state)
        self._lease = Lease.load(state.get("makeway"))
        self._end_sentence = str(state.get("makeway_end") or "")
        if self._lease is not None:
            self._choice = Choice(self._lease.profile, self._lease.team, self._lease.preemptible, self._lease.image)
            if self._lease.started is None:  # a Hub that was killed during the start: what runs now is adopted
                self._lease.started, self._interrupted = False, True

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores, with the lease; `clear_state` keeps it, `_release` drops it."""
        state: dict[str, Any] = super().get_state()
        if self._lease is not None:
            state["makeway"] = self._lease.save()
        if self._end_sentence:
            state["makeway_end"] = self._end_sentence
        return state


def _seconds_to(moment: datetime | None) -> float | None:
    """Return the seconds until a moment, negative where it is past; None without one."""
    return None if moment is None else (moment - datetime.now(UTC)).total_seconds()
