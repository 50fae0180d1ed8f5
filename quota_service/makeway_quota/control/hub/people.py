"""Keep who the Hub's users are and which teams they are in, for requests and for planning.

Requests tell who they came from (`record_user`), and the leader asks the Hub for the owners of work every few seconds
(`refresh`). What is known is kept in the store: a restart while the Hub is away forgets no one, and then nothing is
concluded from the Hub's silence. Where a name no longer means the same person, the store files their work anew
(`store/people.py`) before the request is answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial

from makeway_api.durations import duration

from ...policy import Document, hub_name
from ...policy.members import SERVICE
from ...store.people import is_retired
from ...store.records import Person, Workload
from ...store.store import Store
from .client import HubApi, HubUnreachable, HubUser

log = logging.getLogger("makeway.people")

CHECK_SECONDS = 10.0
"""Seconds after which the Hub is asked again about an owner of work: a person who left a team starts nothing then."""

MAX_SINGLE_REQUESTS = 10
"""Owners that are asked for one by one; for more, the whole list is read."""

LIST_TIME_SHARE = 0.05
"""The part of the time that reading the whole list may take: one that took 3 s is followed by a minute without."""

MAX_CONFIRMED = 50
"""Missing users that are looked up one by one; where more are missing, the list is read twice."""


MAX_DOUBT_SECONDS = 86_400.0
"""Seconds for which nothing is concluded from a Hub that lacks most of its users: it may have lost its database."""


class People:
    """The users of the Hub as they were heard of last. Used by one event loop."""

    def __init__(
        self,
        store: Store,
        hub: HubApi | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._hub = hub
        self._clock = clock
        self._monotonic = monotonic
        self._known: dict[str, Person] = {}
        self._changed: set[str] = set()
        self._on_change: Callable[[], None] = lambda: None
        self._heard_at: dict[str, float] = {}
        self._not_before = 0.0
        self._lock = asyncio.Lock()
        self._lost: frozenset[str] = frozenset()
        """names of people whom the Hub does not have any more, while it lacks most of those who are known"""
        self._known_at_loss = 0
        self._lost_since = 0.0

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever what is known of a person's teams has changed."""
        self._on_change = changed

    def take_changed(self) -> set[str]:
        """Return the names of those who are known otherwise than at the last call."""
        changed, self._changed = self._changed, set()
        return changed

    async def load(self) -> None:
        """Read what was known before this process started."""
        self._use(await asyncio.to_thread(self._store.people.all))

    def person(self, name: str) -> Person | None:
        """Return what is known of a name, None where nothing is."""
        return self._known.get(name)

    @property
    def problem(self) -> str | None:
        """The sentence about a Hub that lacks most of its users; None while it does not."""
        if not self._lost:
            return None
        return (
            f"JupyterHub lacks {len(self._lost)} of the {self._known_at_loss} users that Makeway knows, so that it may "
            f"have lost its database. Their work goes on and keeps its owners' names for {duration(MAX_DOUBT_SECONDS)} "
            "at most. Restore the Hub's database. Without one, and where a user of that name is made anew, the work "
            "is filed as that of deleted people, and `makeway people give` hands it over."
        )

    def __contains__(self, name: object) -> bool:
        """Whether the Hub has a user of exactly this name, as far as is known."""
        person = self._known.get(name) if isinstance(name, str) else None
        return person is not None and person.present

    def teams_of(self, document: Document, name: str, groups: Iterable[str]) -> tuple[str, ...]:
        """Return the teams of a user: `BOSS` in a policy is not `boss` where the Hub has both."""
        return document.teams_of(name, groups, self)

    def hub_name_of(self, text: str) -> str:
        """Return a typed name as the Hub writes it; one that is known as it was typed is that one."""
        typed = text.strip()
        return typed if typed in self._known else hub_name(typed)

    async def find(self, text: str) -> str:
        """Return a typed name as `hub_name_of`, for what cannot be undone: the Hub is asked for one that is not known.

        HubUnreachable where it does not answer.
        """
        typed, written = text.strip(), self.hub_name_of(text)
        if typed == written or self._hub is None or "/" in typed:
            return written
        user = await self._hub.user(typed, fresh=True)
        return typed if user is not None and await self.record_user(user) == typed else written

    async def exists(self, name: str) -> bool:
        """Whether the Hub has this user; it is asked where nothing was heard of them, and HubUnreachable may come."""
        known = self._known.get(name)
        if known is not None or "/" in name or self._hub is None:
            return known.present if known is not None else "/" not in name
        user = await self._hub.user(name, fresh=True)
        return user is not None and await self.record_user(user) == name

    def is_gone(self, name: str) -> bool:
        """Whether the Hub has no such user, as far as is known."""
        person = self._known.get(name)
        return is_retired(name) or (person is not None and not person.present)

    def excludes(self, row: Workload, document: Document) -> bool:
        """Whether an owner is surely not in the team whose GPUs their work would use."""
        if row.team is None:
            return False
        if self.is_gone(row.owner):
            return True
        person = self._known.get(row.owner)
        if person is None:
            return row.owner.startswith(SERVICE) and row.team not in document.teams_of(row.owner, ())
        return row.team not in self.teams_of(document, row.owner, person.groups)

    async def record_user(self, user: HubUser) -> str | None:
        """Take what the Hub says of a user just now, and return their name; None if it has no such user any more.

        HubUnreachable where it must be asked more. Before this returns, nothing that belongs to another person is filed
        under that name.
        """
        self._heard_at[user.name] = self._monotonic()
        person = Person(user.name, user.identity, tuple(sorted(user.groups)))
        if self._known.get(user.name) == person:
            return user.name
        async with self._lock:
            await self.load()  # another replica may have heard of it first
            known = self._known.get(user.name)
            if known is not None and known.identity == person.identity:
                if known != person:
                    await self._write(self._store.people.keep, [person])
            elif self._hub is None or (known is None and not self._is_known_otherwise(person)):
                await self._meet({person.name: person}, ())
            else:
                await self._read_all({person.name})
        return self._name_of(person)

    async def refresh(self, owners: Iterable[str], entries: Iterable[str] = ()) -> None:
        """Learn from the Hub about those owners of work that were not heard of lately; its silence changes nothing.

        `entries` are users of the policy with capitals, as whom the Hub may have another user than the one with their
        small letters.
        """
        if self._hub is None or self._monotonic() < self._not_before:
            return
        since = self._monotonic() - CHECK_SECONDS
        due = {o for o in owners if "/" not in o and self._heard_at.get(o, since) <= since}
        others = {item for item in entries if "/" not in item and self._heard_at.get(item, since) <= since} - due
        if not due and not others:
            return
        few = len(due) + len(others) <= MAX_SINGLE_REQUESTS
        try:
            if not few or (due and not await self._refresh_each(self._hub, due)):
                async with self._lock:
                    await self._read_all(due)
            elif gone := await self._refresh_entries(self._hub, others):
                async with self._lock:
                    await self._read_all(gone)
            self._heard_at |= dict.fromkeys(others, self._monotonic())
        except HubUnreachable as error:
            self._not_before = self._monotonic() + CHECK_SECONDS
            log.warning("The Hub cannot tell who is in which team, so that nothing changes: %s", error)

    async def _refresh_each(self, hub: HubApi, names: Collection[str]) -> bool:
        """Hear of a few users; return False where one is missing, so that only the whole list tells more."""
        result = await asyncio.gather(*(hub.user(name, fresh=True) for name in sorted(names)))
        for user in result:
            if user is not None:
                await self.record_user(user)
        return None not in result

    async def _refresh_entries(self, hub: HubApi, entries: set[str]) -> set[str]:
        """Hear of the users of a policy whom the Hub has as they are written; return those whom it has no more."""
        result = await asyncio.gather(*(hub.user(name, fresh=True) for name in sorted(entries)))
        for user in result:
            if user is not None:
                await self.record_user(user)
        return {name for name in entries - {user.name for user in result if user is not None} if name in self}

    async def _read_all(self, wanted: Collection[str]) -> None:
        """Compare everyone with the Hub's list of users; `wanted` are names that work is filed under."""
        if self._hub is None:
            return
        hub, began = self._hub, self._monotonic()
        await self.load()
        listed = await self._list(hub)
        missing = {name for name, p in self._known.items() if p.present and name not in listed}
        missing |= {name for name in wanted if name not in listed}
        if len(missing) > MAX_CONFIRMED:
            listed |= await self._list(hub)
        else:
            again = await asyncio.gather(*(hub.user(name, fresh=True) for name in sorted(missing)))
            listed |= {user.name: _person(user) for user in again if user is not None}
        gone = missing - listed.keys()
        self._note_lost_users(listed)
        await self._meet(listed, gone - self._lost)
        await self._note_missing(hub, gone - self._known.keys())
        now = self._monotonic()
        self._heard_at = dict.fromkeys([*listed, *wanted], now)
        self._not_before = now + (now - began) / LIST_TIME_SHARE

    def _note_lost_users(self, listed: Mapping[str, Person]) -> None:
        """Note who is missing while the Hub lacks those who are known: more than half at once, and not for long.

        A user made anew under a known name is another person, whose work it must never read, so that is not doubted.
        """
        there = {person.identity for person in listed.values()}
        known = {name: p.identity for name, p in self._known.items() if p.present and p.identity}
        lost = {name for name, identity in known.items() if identity not in there}
        missing = frozenset(lost - listed.keys())
        begins = not self._lost and len(lost) > 1 and 2 * len(lost) > len(known)
        if begins:
            self._lost_since = self._monotonic()
            self._known_at_loss = len(known)
        else:
            lasted = self._monotonic() - self._lost_since >= MAX_DOUBT_SECONDS
            restored = any(known.get(name) in there for name in self._lost)
            missing = frozenset() if lasted or restored or not self._lost else missing
        if missing != self._lost:
            self._lost = missing
            if begins:
                log.error("%s", self.problem)

    async def _list(self, hub: HubApi) -> dict[str, Person]:
        return {user.name: _person(user) for user in await hub.all_users()}

    async def _note_missing(self, hub: HubApi, names: Collection[str]) -> None:
        """Note names without a user that work is filed under: services of the Hub, or users deleted long ago."""
        for name in sorted(names):
            if await hub.has_service(name):
                await self._write(self._store.people.give, name, SERVICE + name, "the service", self._clock())
            else:
                self._known[name] = Person(name, "", (), present=False)
                self._note({name})

    async def _meet(self, listed: Mapping[str, Person], gone: Collection[str]) -> None:
        moves = (await asyncio.to_thread(self._store.people.meet, listed, gone, self._clock())).moves
        await self.load()
        for old, new in moves.items():
            log.warning("The work of %s is that of %s from now on", old, new)

    async def _write(self, write: Callable[..., object], *given: object) -> None:
        await asyncio.to_thread(partial(write, *given))
        await self.load()

    def _is_known_otherwise(self, person: Person) -> bool:
        return bool(person.identity) and any(p.identity == person.identity for p in self._known.values())

    def _name_of(self, person: Person) -> str | None:
        known = self._known.get(person.name)
        if known is not None and known.identity == person.identity:
            return person.name
        return next((p.name for p in self._known.values() if p.identity == person.identity and p.present), None)

    def _use(self, people: Iterable[Person]) -> None:
        known = {person.name: person for person in people}
        known |= {n: p for n, p in self._known.items() if n not in known and not p.present and not p.identity}
        changed = {n for n in known.keys() | self._known.keys() if known.get(n) != self._known.get(n)}
        self._known = known
        self._note(changed)

    def _note(self, names: set[str]) -> None:
        if names:
            self._changed |= names
            self._on_change()


def _person(user: HubUser) -> Person:
    return Person(user.name, user.identity, tuple(sorted(user.groups)))


async def refresh_forever(
    people: People,
    owners: Callable[[], Awaitable[Collection[str]]],
    entries: Callable[[], Collection[str]],
    leads: Callable[[], bool],
) -> None:
    """Learn from the Hub about the owners of work and a policy's `entries` as long as this replica leads.

    Another replica reads what the leader has learned where its requests may depend on it.
    """
    read_at = -CHECK_SECONDS
    while True:
        if leads():
            await people.refresh(await owners(), entries())
        elif entries() and time.monotonic() - read_at >= CHECK_SECONDS:
            read_at = time.monotonic()
            await people.load()
        await asyncio.sleep(CHECK_SECONDS / 5)
