"""What there is, who uses it, and what you can have now: pools, profiles, policies, usage and offers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from makeway_api.models import (
    Device,
    Holder,
    Kind,
    Lending,
    Node,
    Offer,
    OfferTable,
    Policy,
    Pool,
    Profile,
    QuotaLine,
    Reason,
    State,
    TeamUsage,
    Usage,
    Victim,
)

from .. import metrics
from ..backends.base import NodeSeen
from ..control.names import names_of
from ..control.reconcile import HOLDS
from ..engine.plan import Offer as EngineOffer
from ..engine.plan import TeamUsage as EngineUsage
from ..engine.plan import Victim as EngineVictim
from ..engine.rules.usage import usage_by_team
from ..engine.rules.what_if import WhatIf
from ..engine.state import Policy as EnginePolicy
from ..engine.state import Profile as EngineProfile
from ..engine.state import Snapshot
from ..policy import Document
from ..store.records import Workload
from ..wording import sentence
from .caller import Caller
from .core import Core, at
from .listing import Listing, ListQuery, list_workloads
from .views import gpu

OFFER_CODES = {"wait": "waits"}


class Inventory(Core):
    """Read-only answers about the cluster."""

    async def pools(self, caller: Caller) -> list[Pool]:
        """Every pool with its nodes and devices, and who holds them."""
        rows = await self.world.rows()
        holders = _holders(rows)
        answer = []
        for pool in self.document.pools:
            nodes = [_node_model(n, holders) for n in self.world.seen.nodes if n.pool == pool.name]
            total = sum(len(n.devices) for n in nodes)
            used = sum(h.gpus for n in nodes for d in n.devices for h in d.holders)
            answer.append(
                Pool(
                    name=pool.name,
                    kind=pool.kind,
                    resource=pool.resource,
                    strategy=pool.strategy,
                    capacity=None if pool.capacity is None else gpu(pool.capacity),
                    virtual=any(n.virtual for n in nodes),
                    total=total,
                    used=used,
                    free=sum(d.free for n in nodes if n.ready for d in n.devices),
                    profiles=list(pool.profiles),
                    nodes=nodes,
                )
            )
        return answer

    async def profiles(self, caller: Caller) -> list[Profile]:
        """The profiles that the caller may use (administrators: all)."""
        return [self._profile(p) for p in self._usable(self.visible_teams(caller), None)]

    async def policies(self, caller: Caller) -> list[Policy]:
        """The policies of the teams that the caller may look at."""
        teams = self.visible_teams(caller)
        return [policy_model(self.document, p) for p in self.document.policies if teams is None or p.name in teams]

    async def usage(self, caller: Caller) -> Usage:
        """Who uses what now."""
        rows = await self.world.rows()
        snapshot = self.world.snapshot(rows, self.clock())
        teams = await asyncio.to_thread(self._team_usage, snapshot, rows, self.visible_teams(caller), caller.name)
        devices = [d for pool in await self.pools(caller) for node in pool.nodes for d in node.devices]
        free = sum(d.free for d in devices)
        return Usage(
            at=at(snapshot.now),
            teams=teams,
            total=len(devices),
            used=sum(h.gpus for d in devices for h in d.holders),
            free=free,
            virtual=self.world.virtual,
        )

    async def names(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the names of live workloads by id; others are left out."""
        rows = await self.world.rows()
        return {id: rows[id].name for id in ids if id in rows and rows[id].name}

    async def listing(self, caller: Caller, query: ListQuery) -> Listing:
        """Return one page of what waits or runs, as far as the caller may see it."""
        rows = await self.world.rows()
        return list_workloads(rows.values(), self.visible_teams(caller), caller.name, query)

    async def metrics(self) -> bytes:
        """Everything that Prometheus may scrape, as of now."""
        rows = await self.world.rows()
        usage = await self.usage(Caller("", admin=True))
        metrics.show(usage, [(row.kind, row.state) for row in rows.values()])
        return metrics.render()

    async def offers(self, caller: Caller, user: str, groups: Sequence[str], kind: str) -> OfferTable:
        """What `user` can have now, from whom, and why not, for every profile and team (N03)."""
        teams = self.document.teams_of(user, groups)
        profiles = [p for p in self._usable(teams, Kind(kind)) if kind in self.document.profile_facts[p.name].kinds]
        rows = await self.world.rows()
        snapshot = self.world.snapshot(rows, self.clock())
        return await asyncio.to_thread(self._offer_table, snapshot, rows, user, teams, profiles, Kind(kind))

    def _offer_table(
        self,
        snapshot: Snapshot,
        rows: Mapping[str, Workload],
        user: str,
        teams: Sequence[str],
        profiles: Sequence[EngineProfile],
        kind: Kind,
    ) -> OfferTable:
        offers: list[Offer] = []
        what_if = WhatIf(snapshot)
        for profile in profiles:
            if self.document.queue_open(None, profile.name) and kind == Kind.SESSION:
                message = "Ready now: it needs no GPU."
                offers.append(
                    Offer(profile=profile.name, team=None, kind=kind, code="ready_now", message=message, seconds=0)
                )
                continue
            for team in teams:
                if self.document.queue_open(team, profile.name):
                    found = what_if.offer(team, profile.name, kind.value, user)
                    offers.append(self._offer(found, rows, kind))
        return OfferTable(
            user=user,
            teams=list(teams),
            profiles=[self._profile(p) for p in profiles],
            offers=offers,
            usage=self._team_usage(snapshot, rows, teams, user),
            virtual=self.world.virtual,
            at=at(snapshot.now),
        )

    def _offer(self, found: EngineOffer, rows: Mapping[str, Workload], kind: Kind) -> Offer:
        message = sentence(found.facts, names_of(self.document.policies, rows))
        return Offer(
            profile=found.profile,
            team=found.policy,
            kind=kind,
            code=OFFER_CODES.get(found.code, found.code),
            message=message,
            seconds=None if found.code in ("wait", "refused") else round(found.seconds),
            victims=[_victim(v, rows) for v in (*found.victims, *found.moved)],
            reason=Reason(code=found.reason, message=message, numbers=dict(found.numbers)),
        )

    def _team_usage(
        self, snapshot: Snapshot, rows: Mapping[str, Workload], teams: Sequence[str] | None, user: str
    ) -> list[TeamUsage]:
        counted = {u.policy: u for u in usage_by_team(snapshot)}
        lent_to: dict[str, list[Lending]] = {}
        for usage in counted.values():
            for lender, milli in usage.borrowed_from:
                lent_to.setdefault(lender, []).append(Lending(team=usage.policy, gpus=gpu(milli)))
        shown = [p for p in self.document.policies if teams is None or p.name in teams]
        return [
            _usage_model(p, counted[p.name], rows, user, lent_to.get(p.name, [])) for p in shown if p.name in counted
        ]

    def _profile(self, profile: EngineProfile) -> Profile:
        return profile_model(self.document, profile)

    def _usable(self, teams: Sequence[str] | None, kind: Kind | None) -> list[EngineProfile]:
        """Profiles with a queue in one of the teams (None: all), and those without GPUs."""
        return [
            p
            for p in self.document.profiles
            if teams is None
            or (kind != Kind.JOB and self.document.queue_open(None, p.name))
            or any(self.document.queue_open(team, p.name) for team in teams)
        ]


def _usage_model(
    policy: EnginePolicy, counted: EngineUsage, rows: Mapping[str, Workload], user: str, lent_to: list[Lending]
) -> TeamUsage:
    own = [row for row in rows.values() if row.team == policy.name]
    return TeamUsage(
        team=policy.name,
        title=policy.label,
        reserved=gpu(counted.reserved),
        limit=None if counted.limit is None else gpu(counted.limit),
        used=gpu(counted.guaranteed + counted.in_quota + counted.borrowed),
        guaranteed=gpu(counted.guaranteed),
        in_quota=gpu(counted.in_quota),
        borrowed=gpu(counted.borrowed),
        lent=gpu(counted.lent),
        free=gpu(max(0, counted.reserved - counted.guaranteed - counted.in_quota - counted.lent)),
        mine=gpu(sum(row.size for row in own if row.owner == user and row.state in HOLDS)),
        waiting=sum(row.state == "pending" for row in own),
        running=sum(row.state in HOLDS for row in own),
        borrowed_from=[Lending(team=team, gpus=gpu(milli)) for team, milli in counted.borrowed_from],
        lent_to=lent_to,
    )


def _victim(victim: EngineVictim, rows: Mapping[str, Workload]) -> Victim:
    row = rows.get(victim.id)
    return Victim(
        id=victim.id,
        name=row.name if row else victim.id,
        team=victim.policy,
        owner=victim.owner,
        gpus=gpu(victim.gpus),
    )


def _holders(rows: Mapping[str, Workload]) -> dict[tuple[str, int], list[Holder]]:
    found: dict[tuple[str, int], list[Holder]] = {}
    for row in rows.values():
        if row.state not in HOLDS:
            continue
        for place in row.placement:
            for index, milli in zip(place.devices, place.milli, strict=False):
                holder = Holder(
                    workload=row.id,
                    kind=Kind(row.kind),
                    team=row.team or "",
                    owner=row.owner,
                    name=row.name,
                    gpus=gpu(milli),
                    over_quota=row.over_quota,
                    state=State(row.state),
                )
                found.setdefault((place.node, index), []).append(holder)
    return found


def _node_model(seen: NodeSeen, holders: Mapping[tuple[str, int], list[Holder]]) -> Node:
    devices = []
    for index in seen.devices:
        held = holders.get((seen.name, index), [])
        taken = sum(h.gpus for h in held) + gpu(seen.foreign.get(index, 0))
        devices.append(Device(index=index, free=max(0.0, round(1 - taken, 3)), holders=held))
    return Node(
        name=seen.name,
        pool=seen.pool,
        model=seen.model,
        virtual=seen.virtual,
        ready=seen.ready,
        foreign=gpu(sum(seen.foreign.values())),
        devices=devices,
    )


def profile_model(document: Document, profile: EngineProfile) -> Profile:
    """Put a profile on the wire."""
    facts = document.profile_facts[profile.name]
    return Profile(
        name=profile.name,
        title=facts.title,
        description=facts.description,
        gpus=gpu(profile.gpus),
        workers=profile.workers,
        min_workers=profile.min_workers or profile.workers,
        cpu=profile.cpu / 1000,
        memory=profile.memory,
        pools=list(profile.pools),
        policies=[list(rank) for rank in profile.policies],
        kinds=[Kind(k) for k in facts.kinds],
        grace=round(profile.grace or document.settings.grace),
        time_limit=None if profile.time_limit is None else round(profile.time_limit),
        image=facts.image,
    )


def policy_model(document: Document, policy: EnginePolicy) -> Policy:
    """Put a policy on the wire."""
    facts = document.policy_facts[policy.name]
    return Policy(
        name=policy.name,
        title=policy.label,
        groups=list(facts.groups),
        users=list(facts.users),
        weight=policy.weight,
        priority=policy.priority,
        parent=policy.parent,
        quotas=[
            QuotaLine(
                pools=list(line.pools),
                reserved=gpu(line.reserved),
                limit=None if line.limit is None else gpu(line.limit),
                lend=None if line.lend is None else gpu(line.lend),
            )
            for line in policy.quotas
        ],
    )
