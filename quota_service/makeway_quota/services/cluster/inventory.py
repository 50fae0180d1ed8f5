"""Show what there is: pools with their nodes and devices, profiles and policies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from makeway_api.models import Device, Holder, Image, Kind, Node, Policy, Pool, Profile, QuotaLine, State

from ...control.reads.read_model import NodeKey, NodeUse, ReadModel, ReadModels
from ...engine.snapshot import Pool as EnginePool
from ...engine.snapshot import Profile as EngineProfile
from ...engine.snapshot import TeamQuota
from ...policy import Document
from ...values import ordinal
from ...wording.unassigned import unassigned_sentences
from ..caller import Caller
from ..context import Context
from ..views import gpu

T = TypeVar("T")

MAX_VIEWS = 100
"""Sets of teams for which the last answer is kept."""

Teams = frozenset[str] | None
"""Teams whose work has owners and names for a reader; None: all."""


class LatestAnswer(Generic[T]):
    """The answer from the latest version of the read model that was requested, however many requests wait for it.

    At most one is made at a time, and none is replaced by an older one. The versions of the read model themselves are
    not kept. An answer whose making failed is made again for the next request.
    """

    def __init__(self, models: ReadModels, make: Callable[[ReadModel], Awaitable[T]]) -> None:
        self._models = models
        self._make = make
        self._lock = asyncio.Lock()
        self._made: tuple[int, T] | None = None
        """The version and the answer"""

    async def get(self) -> T:
        """Return an answer that has everything that was committed and observed before the call."""
        wanted = (await self._models.current()).version
        if self._made is None or self._made[0] < wanted:
            async with self._lock:
                if self._made is None or self._made[0] < wanted:
                    model = await self._models.current()
                    self._made = model.version, await self._make(model)
        return self._made[1]


class NodeView:
    """A node as the API shows it, made once for each change of the node and each set of teams that a reader sees."""

    def __init__(self, use: NodeUse) -> None:
        self.use = use
        self._teams = frozenset(row.team or "" for row in use.holders)
        self._models: dict[Teams, Node] = {}
        self._json: dict[Teams, bytes] = {}

    def _visible(self, teams: Teams) -> Teams:
        return None if teams is None or self._teams <= teams else self._teams & teams

    def model(self, teams: Teams) -> Node:
        """Return the node."""
        visible = self._visible(teams)
        if visible not in self._models:
            self._models[visible] = node_model(self.use, visible)
        return self._models[visible]

    def json(self, teams: Teams) -> bytes:
        """Return the node as JSON."""
        visible = self._visible(teams)
        if visible not in self._json:
            self._json[visible] = self.model(teams).model_dump_json().encode()
        return self._json[visible]


class InventoryService:
    """Read-only answers about the cluster; the model of a node is kept until the node changes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._nodes: dict[NodeKey, NodeView] = {}
        self._shown: dict[Teams, LatestAnswer[list[Pool]]] = {}
        self._written: dict[Teams, LatestAnswer[bytes]] = {}

    async def pools(self, caller: Caller) -> Sequence[Pool]:
        """Return every pool with its nodes and devices, and which workloads hold them; do not change them.

        Of other teams' work only the team is told, not whose it is and what it is called.
        """
        context, teams = self._context, self._teams(caller)
        return await _answer(
            self._shown, teams, lambda: LatestAnswer(context.read_models, lambda m: context.call(self._pools, m, teams))
        )

    async def pools_json(self, caller: Caller) -> bytes:
        """Return `pools` as JSON, written once for each version of the read model, each node once for each change."""
        context, teams = self._context, self._teams(caller)
        return await _answer(
            self._written,
            teams,
            lambda: LatestAnswer(context.read_models, lambda m: context.call(self._json, m, teams)),
        )

    def unassigned(self, caller: Caller) -> list[str]:
        """Return a sentence for each resource of GPUs that no pool takes; nothing to others than administrators."""
        return unassigned_sentences(self._context.world.unassigned) if caller.admin else []

    def _teams(self, caller: Caller) -> Teams:
        teams = self._context.visible_teams(caller)
        return None if teams is None else frozenset(teams)

    def _json(self, model: ReadModel, teams: Teams) -> bytes:
        self._forget_nodes(model)
        result = []
        for pool in model.document.pools:
            head = self._pool(model, pool, teams, whole=False).model_dump_json(exclude={"nodes"}).encode()
            nodes = b",".join([self._node(use).json(teams) for use in model.nodes[pool.name]])
            result.append(b'%s,"nodes":[%s]}' % (head[:-1], nodes))
        return b"[%s]" % b",".join(result)

    def _pools(self, model: ReadModel, teams: Teams) -> list[Pool]:
        self._forget_nodes(model)
        return [self._pool(model, pool, teams) for pool in model.document.pools]

    def _pool(self, model: ReadModel, pool: EnginePool, teams: Teams, *, whole: bool = True) -> Pool:
        uses, facts = model.nodes[pool.name], model.document.pool_facts.get(pool.name)
        return Pool.model_construct(
            name=pool.name,
            title=facts.title if facts else "",
            kind=pool.kind,
            resource=pool.resource,
            strategy="spread" if pool.strategy == "spread" else "pack",  # what notebooks of 0.1.0 can read
            placement=pool.strategy,
            capacity=None if pool.capacity is None else gpu(pool.capacity),
            virtual=any(use.status.virtual for use in uses),
            total=float(sum(len(use.devices) for use in uses)),
            used=gpu(sum(use.used for use in uses)),
            free=gpu(sum(use.free for use in uses)),
            profiles=list(pool.profiles),
            nodes=[self._node(use).model(teams) for use in uses] if whole else [],
        )

    def _node(self, use: NodeUse) -> NodeView:
        key = (use.status.name, use.status.pool)
        known = self._nodes.get(key)
        if known is None or known.use is not use:
            known = self._nodes[key] = NodeView(use)
        return known

    def _forget_nodes(self, model: ReadModel) -> None:
        """Forget the nodes that are gone, once they are as many as those there are."""
        if len(self._nodes) > 2 * sum(map(len, model.nodes.values())):
            self._nodes = {
                (use.status.name, use.status.pool): self._node(use) for uses in model.nodes.values() for use in uses
            }

    async def profiles(self, caller: Caller) -> list[Profile]:
        """Return the profiles that the caller may use (administrators: all)."""
        document = self._context.document
        return [profile_model(document, p) for p in usable(document, self._context.visible_teams(caller), None)]

    async def policies(self, caller: Caller) -> list[Policy]:
        """Return the policies of the teams that the caller may see."""
        document, teams = self._context.document, self._context.visible_teams(caller)
        return [team_quota_model(document, p) for p in document.policies if teams is None or p.name in teams]


async def _answer(answers: dict[Teams, LatestAnswer[T]], teams: Teams, make: Callable[[], LatestAnswer[T]]) -> T:
    """Return the latest answer for readers who see these teams."""
    if teams not in answers:
        if len(answers) > MAX_VIEWS:
            answers.clear()
        answers[teams] = make()
    return await answers[teams].get()


def usable(document: Document, teams: Sequence[str] | None, kind: Kind | None) -> list[EngineProfile]:
    """Return the profiles with a queue in one of the teams (None: all), and for sessions those without GPUs."""
    return [
        p
        for p in document.profiles
        if teams is None
        or (kind != Kind.JOB and document.queue_open(None, p.name))
        or any(document.queue_open(team, p.name) for team in teams)
    ]


def node_model(use: NodeUse, teams: Teams = None) -> Node:
    """Return a node with its devices and their holders as the API shows it to readers who see these teams."""
    status = use.status
    held: dict[int, list[Holder]] = {}
    for row in use.holders:
        for place in row.placement:
            if place.node != status.name:
                continue
            for index, milli in zip(place.devices, place.milli, strict=False):
                seen_by = teams is None or (row.team or "") in teams
                holder = Holder.model_construct(
                    workload=row.id if seen_by else "",
                    kind=Kind(row.kind),
                    team=row.team or "",
                    owner=row.owner if seen_by else "",
                    name=row.name if seen_by else "",
                    gpus=gpu(milli),
                    over_quota=row.over_quota,
                    state=State(row.state),
                )
                held.setdefault(use.shown_as.get(index, index), []).append(holder)
    devices = [
        Device.model_construct(
            index=ordinal(index),
            free=gpu(use.free_on[index]),
            holders=held.get(index, []),
            outside=index in use.outside,
        )
        for index in use.devices
    ]
    return Node.model_construct(
        name=status.name,
        pool=status.pool,
        model=status.model,
        virtual=status.virtual,
        ready=status.ready,
        cordoned=status.cordoned,
        observed=status.observed,
        backend=status.backend,
        foreign=gpu(sum(status.foreign.values()) + status.foreign_gpus),
        devices=devices,
    )


def profile_model(document: Document, profile: EngineProfile) -> Profile:
    """Return a profile as the API shows it."""
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
        image=facts.default_image,
        images=[
            Image(
                name=image.name,
                title=image.title or image.name,
                description=image.description,
                image=image.image,
                default=image.image == facts.default_image,
            )
            for image in facts.images
        ],
    )


def team_quota_model(document: Document, policy: TeamQuota) -> Policy:
    """Return a policy as the API shows it."""
    facts = document.team_facts[policy.name]
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
