"""Compute what a request would get, without slowing the loop: cached, shared, and within a budget of processor time.

One what-if engine serves all teams; it is shown only what changed, and an answer stands for `LASTS` seconds, or until
something changes that the engine can see. Planning in Python stops the loop for as long as it lasts, so all what-ifs
together get a small part of a processor (`SHARE`), and no more than `BURST` seconds at once. Beyond that, callers get
the last answer, with its time: up to `OLDEST` seconds old, and older only while more is asked than the budget allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from makeway_api.errors import MakewayError
from makeway_api.models import Offer as ApiOffer

from ...control.reads.read_model import ReadModel
from ...control.world.engine_view import MAX_UNREAD, EngineChanges
from ...engine.plan import Offer
from ...engine.snapshot import Kind, Snapshot
from ...engine.what_if import WhatIf
from ...policy import Document
from ..context import Context
from ..machine_what_if import Known, MachineWhatIf
from ..refusals import busy

SHARE = 0.15
"""The part of a processor that what-ifs may take"""
BURST = 1.0
"""Seconds of processor time that may be used at once"""
LASTS = 5.0
"""Seconds after which an answer is computed again though nothing changed: it may speak of times"""
CHEAP = 0.02
"""Seconds: an answer that took less is not given again once something changed, while the budget lasts"""
CROWDED = 16
"""With more questions under way than this, young answers are given again however little they took"""
OLDEST = 2.0
"""Seconds that an answer may be older than the last change while there is budget"""
MAX_WAITING = 512
"""Questions that wait for the engine; beyond, a question without any earlier answer is refused"""
MAX_WAIT = 10.0
"""Seconds that a question without an earlier answer waits for the first one"""
RENEW_AFTER = 3600.0
"""Seconds after which the engine is built anew"""
MAX_KEPT = 20_000
"""Answers in memory"""


class Question(NamedTuple):
    """One request that could be made."""

    team: str
    profile: str
    kind: Kind
    owner: str
    """empty where owners are all treated alike"""


@dataclass(slots=True)
class ShownOffer:
    """An offer as the API shows it, with the document that it was written from; empty until it is shown first."""

    last: tuple[Document, ApiOffer] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An offer of the engine, for one state of the what-if engine, with the seconds that it took.

    `at` is on the monotonic clock, `as_of` in Unix seconds.
    """

    offer: Offer
    state: int
    at: float
    as_of: float
    took: float
    shown: ShownOffer = field(default_factory=ShownOffer)
    """the same for all who get this answer, and kept as long as it is"""


class Budget:
    """Processor time that grows with the clock, up to `burst` seconds."""

    def __init__(self, share: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._burst, self._clock = share, burst, clock
        self._remaining, self._at = burst, clock()

    def wait(self) -> float:
        """Return the seconds until something may be computed again."""
        now = self._clock()
        self._remaining = min(self._burst, self._remaining + max(0.0, now - self._at) * self._share)
        self._at = now
        return max(0.0, -self._remaining / self._share)

    def spend(self, seconds: float) -> None:
        """Count what was used."""
        self._remaining -= seconds


class OfferEngine:
    """Answers questions one after the other; equal questions of several callers are answered once."""

    def __init__(
        self,
        context: Context,
        clock: Callable[[], float] = time.monotonic,
        machines: MachineWhatIf | None = None,
    ) -> None:
        self._context = context
        self._machines = machines or MachineWhatIf(context)
        self._clock = clock
        self._budget = Budget(SHARE, BURST, clock)
        self._known: dict[Question, Answer] = {}
        self._under_way: dict[Question, asyncio.Task[Answer]] = {}
        self._lock = asyncio.Lock()
        self._what_if: WhatIf | None = None
        self._built_at: float | None = None
        """None while it has to be built anew."""
        self._version = 0
        """The version of the read model up to which changes were read."""
        self._state = 0
        """How many times something changed that the engine can see."""
        self._rest: Snapshot | None = None
        """What was shown last besides workloads and nodes."""
        self._deployments: Known = {}
        """The deployments with their machines as they were read last."""
        self._unread: list[EngineChanges] = []
        """Changes that the engine was not shown yet, oldest first."""
        self._unread_size = 0
        """The number of these `EngineChanges` plus the rows and nodes in them; a complete snapshot counts 0."""

    async def answer(self, team: str, profile: str, kind: Kind, owner: str) -> Answer:
        """Return what a request would get now; a slow answer may be some seconds old."""
        model = await self._context.read_models.current()
        return await self._answer(question_of(model, team, profile, kind, owner), model)

    async def answers(self, places: Sequence[tuple[str, str]], kind: Kind, owner: str) -> list[Answer]:
        """Return `answer` for every team and profile; only those that have to be waited for take tasks of their own."""
        model = await self._context.read_models.current()
        await self._read_changes(model)
        questions = [question_of(model, team, profile, kind, owner) for team, profile in places]
        result = [self._lasting(question, model) for question in questions]
        asked = [question for question, answer in zip(questions, result, strict=True) if answer is None]
        computed = iter(await asyncio.gather(*(self._answer(question, model) for question in asked)))
        return [next(computed) if answer is None else answer for answer in result]

    def _lasting(self, question: Question, model: ReadModel) -> Answer | None:
        """Return the last answer where nothing changed since that the engine can see, else None."""
        known = self._known.get(question)
        if known is None or known.state != self._state or self._clock() - known.at >= LASTS:
            return None
        return known if known.as_of == model.at else replace(known, as_of=model.at)

    async def _answer(self, question: Question, model: ReadModel) -> Answer:
        known = self._known.get(question)
        await self._read_changes(model)
        if (lasting := self._lasting(question, model)) is not None:
            return lasting
        task = self._under_way.get(question)
        if task is None and len(self._under_way) >= MAX_WAITING:
            if known is not None:
                return known
            raise _busy()
        if task is None:
            task = self._under_way[question] = asyncio.create_task(self._compute(question))
            task.add_done_callback(lambda done: self._done(question, done))
        if known is not None and self._will_do(known):
            return known
        try:
            return await asyncio.wait_for(asyncio.shield(task), MAX_WAIT)
        except TimeoutError:
            raise _busy() from None

    def _will_do(self, known: Answer) -> bool:
        """Whether an old answer will do: the budget is used up, or it is young and a new one takes time."""
        slow = known.took > CHEAP or len(self._under_way) > CROWDED
        return self._budget.wait() > 0 or (slow and self._clock() - known.at < OLDEST)

    def _done(self, question: Question, task: asyncio.Task[Answer]) -> None:
        del self._under_way[question]
        if not task.cancelled():
            task.exception()  # it is raised where the answer is awaited, if it still is

    async def _compute(self, question: Question) -> Answer:
        async with self._lock:
            if (wait := self._budget.wait()) > 0:
                await asyncio.sleep(wait)
            model = await self._context.read_models.current()
            await self._read_changes(model)
            while self._due():  # so many changes came that the engine is built anew
                await self._read_changes(model)
            changes, self._unread, self._unread_size = self._unread, [], 0
            state, now = self._state, self._context.clock()
            try:
                offer, took = await self._context.run_what_if(self._ask, changes, question, now)
                if offer.demand:
                    offer, more = await self._machines.with_machines(offer, now)
                    took += more
            except BaseException:
                self._built_at = None  # the engine may be half changed
                raise
            self._budget.spend(took)
            answer = Answer(offer, state, self._clock(), model.at, took)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[question] = answer
            return answer

    async def _read_changes(self, model: ReadModel) -> None:
        """Read what the engine has to be shown of a newer model, and count whether there is anything."""
        deployments = await self._machines.read()
        if deployments is not self._deployments:
            self._deployments = deployments
            self._state += 1
        if self._version >= model.version and not self._due():
            return
        rows = await self._context.world.rows()
        changes = self._context.world.changes(rows, self._context.clock(), self._due(), "offers")
        self._version = max(self._version, model.version)
        rest = replace(changes.snapshot, now=0.0, nodes=(), workloads=())
        if changes.whole:
            self._built_at, self._unread, self._unread_size = self._clock(), [], 0
        elif rest == self._rest and not (changes.changed or changes.gone or changes.nodes or changes.gone_nodes):
            return
        self._state += 1
        self._rest = rest
        self._unread.append(changes)
        if not changes.whole:
            parts = changes.changed, changes.gone, changes.nodes, changes.gone_nodes
            self._unread_size += 1 + sum(map(len, parts))
            if self._unread_size > MAX_UNREAD:  # the engine is built anew before the next question
                self._built_at, self._unread, self._unread_size = None, [], 0

    def _due(self) -> bool:
        return self._built_at is None or self._clock() - self._built_at > RENEW_AFTER

    def _ask(self, unread: Sequence[EngineChanges], question: Question, now: float) -> tuple[Offer, float]:
        """Show the engine the changes and ask it; return how long that took. Runs in the what-if thread."""
        began = time.thread_time()
        for changes in unread:
            if changes.whole:
                self._what_if = WhatIf(changes.snapshot, self._context.gate.wait_in_thread)
            elif self._what_if is not None:
                self._what_if.change(changes.snapshot, changes.changed, changes.gone, changes.nodes, changes.gone_nodes)
        assert self._what_if is not None, "the first changes are complete"
        self._what_if.change(replace(self._what_if.snapshot, now=now))
        offer = self._what_if.offer(question.team, question.profile, question.kind, question.owner)
        return offer, time.thread_time() - began


def question_of(model: ReadModel, team: str, profile: str, kind: Kind, owner: str) -> Question:
    """Return the question of a user.

    The owner matters for jobs, which wait in line with others, and while another session of the team is pending.
    """
    alike = kind == "session" and not any(
        row.team == team and row.state == "pending" for row in model.sessions.values()
    )
    return Question(team, profile, kind, "" if alike else owner)


def _busy() -> MakewayError:
    return busy("Too many offers are being computed: try again in a moment.", "offers_busy", 503, 2)
