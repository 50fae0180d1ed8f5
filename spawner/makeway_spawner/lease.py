"""Ask, wait, renew, give back: what both spawners do with a lease.

`LeaseMixin` comes first among a spawner's bases. The lease is asked for in `run_pre_spawn_hook` (outside
`start_timeout`), stored at once, renewed from here while the server lives, also after the Hub was restarted, and given
back in `run_post_stop_hook`, which JupyterHub runs after a stop, a crash and a cancelled start alike.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from jupyterhub.utils import maybe_future
from makeway_api.client import AsyncClient
from makeway_api.errors import MakewayError
from makeway_api.models import Session, SessionAsk
from traitlets import Float, List, Unicode, default
from traitlets.config import LoggingConfigurable

from .held import Held
from .options import Choice, check, read_form, read_options
from .picker import Picker
from .progress import Progress
from .quota import away, learn, needs_no_gpu, quota, without_gpus
from .refusal import Refused, refuse

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner as _Spawner
else:
    _Spawner = LoggingConfigurable

GONE = frozenset({404, 410})
"""The answers that mean: this lease is over, whatever the Hub thinks."""


class LeaseMixin(_Spawner):  # type: ignore[misc]
    """A spawner that starts nothing without a lease, and keeps none without a server."""

    makeway_api_url = Unicode(
        "http://127.0.0.1:8765/services/makeway",
        help="Where the Hub itself reaches the quota service (not through the proxy).",
    ).tag(config=True)
    makeway_url = Unicode(
        "", help="Where notebooks reach the quota service; empty means `makeway_api_url`. They see it as MAKEWAY_URL."
    ).tag(config=True)
    makeway_token = Unicode("", help="The Hub's own token at the quota service (scope custom:makeway:reserve).").tag(
        config=True
    )
    makeway_public_path = Unicode(
        "/services/makeway/", help="The quota service's path as browsers see it, for live numbers and links."
    ).tag(config=True)
    cpu_profiles = List(
        Unicode(),
        ["cpu"],
        help="Profiles without GPUs, offered even while the quota service does not answer.",
    ).tag(config=True)
    renew_seconds = Float(5.0, min=0.1, help="How often a lease is renewed; at most a third of its life.").tag(
        config=True
    )
    wait_seconds = Float(20.0, min=0.1, help="How long one question for news of a waiting lease stays open.").tag(
        config=True
    )
    patience_seconds = Float(
        120.0, min=0.0, help="How long a waiting start bears a quota service that does not answer."
    ).tag(config=True)

    _lease: Held | None = None
    _choice: Choice | None = None
    _over: str = ""
    """why the server must stop although nobody asked for it"""
    _renewing: asyncio.Task[None] | None = None
    _progress: Progress | None = None

    # -- the form ----------------------------------------------------------------------------------------------

    @property
    def quota(self) -> AsyncClient:
        """The quota service as this Hub's spawners talk to it."""
        return quota(self.makeway_api_url, self.makeway_token)

    @default("options_form")
    def _default_options_form(self) -> Any:
        return self.draw_picker

    @default("options_from_form")
    def _default_options_from_form(self) -> Any:
        return self.read_picker

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Any:
        return lambda spawner, options: None  # read and checked in run_pre_spawn_hook, where a refusal has words

    async def draw_picker(self, spawner: Any) -> str:
        """Draw the start page's form with what this person can have now."""
        link = getattr(getattr(self, "handler", None), "makeway_link", None) or {}
        picker = Picker(self.user.name, self._base_url(), self.makeway_public_path)
        remembered = self._remembered()
        try:
            table = await self.quota.offers(user=self.user.name, kind="session")
        except MakewayError as error:
            self.log.warning("The picker has no offers for %s: %s", self.user.name, error.message)
            return picker.without_service(error.message, without_gpus(self.cpu_profiles))
        learn(table)
        return picker.render(table, remembered, link)

    async def read_picker(self, form: dict[str, Any]) -> dict[str, Any]:
        """Read the form into what the Hub stores; Refused says what is wrong with it."""
        choice = read_form(form)
        try:
            table = await self.quota.offers(user=self.user.name, kind="session")
        except MakewayError as error:
            if away(error) and needs_no_gpu(choice.profile, self.cpu_profiles):
                return choice.options()
            raise refuse(error) from error
        learn(table)
        return check(choice, table).options()

    def _remembered(self) -> Choice | None:
        try:
            return read_options((self.orm_spawner and self.orm_spawner.user_options) or {})
        except Refused:
            return None

    def _base_url(self) -> str:
        return str(self.hub.base_url) if self.hub else "/hub/"

    # -- before the start --------------------------------------------------------------------------------------

    async def run_pre_spawn_hook(self) -> None:
        """Run the site's own hook, then wait for a lease; on the way out without one nothing stays behind."""
        await maybe_future(super().run_pre_spawn_hook())
        await self._give_back()
        self._over = ""
        self._progress = Progress()
        try:
            self._choice = read_options(self.user_options)
            self._remember_choice(self._choice)
            await self._take_lease(self._choice)
        except BaseException:
            await asyncio.shield(self._give_back())
            raise
        self._hold()

    async def _take_lease(self, choice: Choice) -> None:
        self.tell("admission", f"Asking for {choice.profile}" + (f" in {choice.team}" if choice.team else ""))
        try:
            session = await self._ask(choice)
        except MakewayError as error:
            if away(error) and needs_no_gpu(choice.profile, self.cpu_profiles):
                self.tell("admission", "The quota service does not answer; a notebook without GPUs starts anyway.")
                return
            raise refuse(error) from error
        self._keep(session)
        self._hold()
        session = await self._wait_for_grant(session)
        self._keep(session)
        self.tell("node", self._lease.granted() if self._lease else "")

    async def _ask(self, choice: Choice) -> Session:
        """Ask in a task of its own: a start cancelled in this instant must still learn which lease to give back."""
        ask = SessionAsk(
            user=self.user.name,
            server=self.name,
            profile=choice.profile,
            team=choice.team,
            preemptible=choice.preemptible,
        )
        asking = asyncio.ensure_future(self.quota.ask_session(ask))
        try:
            session: Session = await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait([asking], timeout=10)
            if asking.done() and not asking.cancelled() and asking.exception() is None:
                self._keep(asking.result())
            raise
        return session

    async def _wait_for_grant(self, session: Session) -> Session:
        """Follow the session until it has its GPUs; Refused when it ends or the service stays silent too long."""
        silent_since: float | None = None
        now = asyncio.get_running_loop().time
        while session.phase not in ("granted", "running"):
            if session.state.ended or session.phase == "over":
                raise self._ended_before_start(session)
            self._tell_about(session)
            try:
                session = await self.quota.session(session.id, wait=self.wait_seconds, version=session.version)
                silent_since = None
            except MakewayError as error:
                if not away(error):
                    raise refuse(error) from error
                silent_since = silent_since or now()
                if now() - silent_since > self.patience_seconds:
                    raise refuse(error) from error
                self.tell("admission", "The quota service does not answer; your place in the queue is kept.")
                await asyncio.sleep(min(1.0, self.renew_seconds))
        return session

    def _ended_before_start(self, session: Session) -> Refused:
        reason = session.reason
        message = reason.message if reason else f"The session for {session.profile} ended before it started."
        return Refused(message, code=reason.code if reason else "ended", status=409)

    def _tell_about(self, session: Session) -> None:
        phase = session.phase if session.phase in ("admission", "reclaim", "node") else "admission"
        reason = session.reason
        more = {"until": reason.not_before.isoformat()} if reason and reason.not_before else {}
        self.tell(phase, reason.message if reason else f"Waiting for {session.gpus:g} GPUs", **more)

    def tell(self, phase: str, message: str, **more: Any) -> None:
        """Show a sentence on the pending page."""
        if self._progress is not None:
            self._progress.tell(phase, message, **more)

    async def progress(self) -> Any:
        """Give our own events first, then the spawner's."""
        if self._progress is not None:
            async for event in self._progress.follow():
                yield event
        async for event in super().progress():
            yield event

    # -- the server lives --------------------------------------------------------------------------------------

    async def start(self) -> Any:
        """Start the server and tell the service that it is there."""
        self.tell("server", "Starting the notebook server")
        where = await super().start()
        self.tell("server", "Waiting for the notebook server to answer", progress=90)
        if self._lease is not None:
            self._lease.started = False
        self._store()
        self._rest()
        self._hold()  # at once: the service learns that the server is there
        return where

    def get_env(self) -> dict[str, str]:
        """Add what the lease gives: devices, team, profile, and where the service is."""
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
        """Poll the server; one whose lease is over is stopped here, so that its GPUs are really free."""
        status: int | None = await super().poll()
        if status is None and self._over:
            self.log.warning("Stopping %s: %s", self._log_name, self._over)
            await self.stop()
            status = await super().poll()
            return 1 if status is None else status
        if status is None and self._choice is not None:
            self._hold()
        return status

    async def run_post_stop_hook(self) -> None:
        """Give the lease back, whatever ended the server, then run the site's own hook."""
        await self._give_back()
        await maybe_future(super().run_post_stop_hook())

    # -- the lease ---------------------------------------------------------------------------------------------

    def _keep(self, session: Session) -> None:
        started = self._lease.started if self._lease and self._lease.id == session.id else None
        self._lease = Held.of(session, started)
        self._store()

    def _store(self) -> None:
        """Write the state now: the Hub itself would only do so once the server is up."""
        if self.orm_spawner is not None:
            self.orm_spawner.state = self.get_state()
            self.user.db.commit()

    def _remember_choice(self, choice: Choice) -> None:
        self.user_options = choice.options()
        if self.orm_spawner is not None:
            self.orm_spawner.user_options = self.user_options
            self.user.db.commit()

    def _hold(self) -> None:
        """See to it that somebody renews; called as often as one likes."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew_until_over())

    def _rest(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None and renewing is not asyncio.current_task():
            renewing.cancel()

    async def _renew_until_over(self) -> None:
        while not self._over:
            try:
                await self._renew()
            except MakewayError as error:
                if self._lease is not None and error.status in GONE:
                    self._over = f"its lease is over: {error.message}"
                elif self._lease is not None:
                    self.log.warning("The lease of %s was not renewed: %s", self._log_name, error.message)
            except Exception:
                self.log.exception("The lease of %s was not renewed", self._log_name)
            if not self._over:
                await asyncio.sleep(self.renew_seconds)
        if self._poll_callback is not None:
            asyncio.get_running_loop().create_task(self.poll_and_notify())

    async def _renew(self) -> None:
        """Renew once; a notebook that had to start without the service gets its lease here, later."""
        lease = self._lease
        if lease is None:
            if self._choice is not None and self.pending != "stop":
                self._keep(await self._ask(self._choice))
            return
        if lease.started is False:
            await self.quota.session_started(lease.id)
            lease.started = True
        session = await self.quota.renew(lease.id)
        if session.state.ended and self._lease is lease:
            reason = session.reason
            self._over = f"its session ended: {reason.message}" if reason else "its session ended"

    async def _give_back(self) -> None:
        """Stop renewing and release; where the service does not answer, the lease ends by itself."""
        self._rest()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self.quota.release(lease.id)
        except MakewayError as error:
            self.log.warning("Lease %s of %s was not given back: %s", lease.id, self._log_name, error.message)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the lease up again after the Hub was restarted."""
        super().load_state(state)
        self._lease = Held.load(state.get("makeway"))
        if self._lease is not None:
            self._choice = Choice(self._lease.profile, self._lease.team, self._lease.preemptible)

    def get_state(self) -> dict[str, Any]:
        """Add the lease to what the Hub stores; `clear_state` does not drop it, giving it back does."""
        state: dict[str, Any] = super().get_state()
        if self._lease is not None:
            state["makeway"] = self._lease.save()
        return state
