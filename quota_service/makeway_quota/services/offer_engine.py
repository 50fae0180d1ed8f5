"""Compute what a request would get, without slowing the loop: cached, shared, and within a budget of processor time.

Planning in Python stops the loop for as long as it lasts, so all what-ifs together get a small part of a processor
(`SHARE`), and no more than `BURST` seconds at once. Beyond that, callers get the last answer, with its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from makeway_api.errors import MakewayError

from ..control.read_model import ReadModel
from ..engine.plan import Offer
from ..engine.rules.what_if import WhatIf
from ..engine.state import Kind, Snapshot
from .context import Context
from .refusals import busy

SHARE = 0.15
"""The part of a processor that what-ifs may take"""
BURST = 1.0
"""Seconds of processor time that may be used at once"""
LASTS = 5.0
"""Seconds after which an answer is computed again though nothing changed: it may speak of times"""
CHEAP = 0.02
"""Seconds: an answer that took less is never given again once something changed"""
OLDEST = 2.0
"""Seconds that an answer may be older than the last change while there is budget"""
MOST_WAITING = 512
"""Questions that wait for the engine; beyond, a question without any earlier answer is refused"""
LONGEST = 10.0
"""Seconds that a question without an earlier answer waits for the first one"""
RENEW_AFTER = 3600.0
"""Seconds after which the engine is built anew"""
MOST_KEPT = 20_000
"""Answers in memory"""


class Question(NamedTuple):
    """One request that could be made."""

    team: str
    profile: str
    kind: Kind
    owner: str
    """empty where owners are all treated alike"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An offer of the engine, for one version of the read model, with the seconds that it took.

    `at` is on the monotonic clock, `as_of` in Unix seconds.
    """

    offer: Offer
    version: int
    at: float
    as_of: float
    took: float


class Budget:
    """Processor time that grows with the clock, up to `burst` seconds."""

    def __init__(self, share: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._burst, self._clock = share, burst, clock
        self._left, self._at = burst, clock()

    def wait(self) -> float:
        """Return the seconds until something may be computed again."""
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._share)
        self._at = now
        return max(0.0, -self._left / self._share)

    def spend(self, seconds: float) -> None:
        """Count what was used."""
        self._left -= seconds


class OfferEngine:
    """Answers questions one after the other; the same question asked by many is answered once."""

    def __init__(self, context: Context, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._clock = clock
        self._budget = Budget(SHARE, BURST, clock)
        self._known: dict[Question, Answer] = {}
        self._under_way: dict[Question, asyncio.Task[Answer]] = {}
        self._one = asyncio.Lock()
        self._what_if: WhatIf | None = None
        self._version = 0
        self._shown_at = self._built_at = clock()

    async def answer(self, team: str, profile: str, kind: Kind, owner: str) -> Answer:
        """Return what a request would get now; a slow answer may be some seconds old."""
        model = await self._context.models.current()
        return await self._answer(question_of(model, team, profile, kind, owner), model)

    async def _answer(self, question: Question, model: ReadModel) -> Answer:
        known = self._known.get(question)
        if known is not None and known.version == model.version and self._clock() - known.at < LASTS:
            return known
        task = self._under_way.get(question)
        if task is None and len(self._under_way) >= MOST_WAITING:
            if known is not None:
                return known
            raise _busy()
        if task is None:
            task = self._under_way[question] = asyncio.create_task(self._compute(question))
            task.add_done_callback(lambda done: self._done(question, done))
        if known is not None and known.took > CHEAP and self._may_wait(known):
            return known
        try:
            return await asyncio.wait_for(asyncio.shield(task), LONGEST)
        except TimeoutError:
            raise _busy() from None

    def _may_wait(self, known: Answer) -> bool:
        """Whether an old answer will do: it is young, or the budget is used up."""
        return self._clock() - known.at < OLDEST or self._budget.wait() > 0

    def _done(self, question: Question, task: asyncio.Task[Answer]) -> None:
        del self._under_way[question]
        if not task.cancelled():
            task.exception()  # it is raised where the answer is awaited, if it still is

    async def _compute(self, question: Question) -> Answer:
        async with self._one:
            if (wait := self._budget.wait()) > 0:
                await asyncio.sleep(wait)
            model = await self._context.models.current()
            snapshot = await self._snapshot(model)
            offer, took = await self._context.think(self._ask, snapshot, question)
            self._budget.spend(took)
            answer = Answer(offer, model.version, self._clock(), model.at, took)
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[question] = answer
            return answer

    async def _snapshot(self, model: ReadModel) -> Snapshot | None:
        """Return the world as it is now, or None while the engine has seen it."""
        now = self._clock()
        if self._what_if is not None and self._version == model.version and now - self._shown_at < LASTS:
            return None
        self._version, self._shown_at = model.version, now
        world = self._context.world
        return world.snapshot(await world.rows(), self._context.clock())

    def _ask(self, snapshot: Snapshot | None, question: Question) -> tuple[Offer, float]:
        """Bring the engine up to the snapshot and ask it; return how long that took. Runs in the what-if thread."""
        began = time.thread_time()
        try:
            if snapshot is not None:
                self._renew(snapshot)
            assert self._what_if is not None
            offer = self._what_if.offer(question.team, question.profile, question.kind, question.owner)
        except BaseException:
            self._what_if = None  # it may be half changed
            raise
        return offer, time.thread_time() - began

    def _renew(self, snapshot: Snapshot) -> None:
        now = self._clock()
        if self._what_if is None or now - self._built_at > RENEW_AFTER:
            self._what_if, self._built_at = WhatIf(snapshot), now
        else:
            self._what_if.renew(snapshot)


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
