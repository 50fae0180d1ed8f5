"""Read one pool, one policy, one profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..engine.phrases import gpus
from ..engine.state import GPU, Kind, Policy, Pool, Profile, QuotaLine, Settings, Weight
from .document import PolicyFacts, PoolFacts, ProfileFacts
from .fields import Fields
from .issues import quote

AUTOSCALED = ("max_nodes", "node_gpus", "node_cpu", "node_memory")
POOL = (
    "name",
    "title",
    "kind",
    "resource",
    "size",
    "capacity",
    "strategy",
    "profiles",
    "consolidation",
    "nodes",
    *AUTOSCALED,
)
POLICY = ("name", "title", "groups", "users", "weight", "priority", "parent", "quotas")
QUOTA = ("pools", "reserved", "limit", "lend")
PROFILE = (
    "name",
    "title",
    "description",
    "gpus",
    "workers",
    "min_workers",
    "cpu",
    "memory",
    "pools",
    "policies",
    "kinds",
    "image",
    "env",
    "grace",
    "signal",
    "time_limit",
    "min_runtime",
    "reclaim_after",
)
KINDS: tuple[Kind, ...] = get_args(Kind)
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = re.compile(r"MAKEWAY_.*|JUPYTERHUB_.*|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES")


@dataclass(slots=True)
class Context:
    """What the parts of a document must know of each other; `places` remembers where each thing stands."""

    settings: Settings
    pools: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    places: dict[tuple[str, str], Fields] = field(default_factory=dict)


def read_pool(fields: Fields, context: Context) -> tuple[Pool, PoolFacts]:
    """Read one pool."""
    kinds: tuple[Literal["static", "autoscaled"], ...] = ("static", "autoscaled")
    kind = fields.choice("kind", kinds, "static")
    if kind == "static":
        for key in AUTOSCALED:
            if fields.has(key):
                fields.wrong(key, f"only a pool of kind autoscaled has {key}; set kind: autoscaled or take it out")
    pool = Pool(
        name=fields.slug("name"),
        resource=fields.text("resource", "nvidia.com/gpu"),
        capacity=fields.gpus("capacity"),
        kind=kind,
        strategy=fields.choice("strategy", ("pack", "spread"), "pack"),
        profiles=fields.names("profiles"),
        consolidation=fields.flag("consolidation", True),
        max_nodes=fields.whole("max_nodes", 0, 0, 100_000, "nodes"),
        node_gpus=fields.whole("node_gpus", 0, 0, 1024, "GPUs"),
        node_cpu=fields.cores("node_cpu"),
        node_memory=fields.memory("node_memory"),
    )
    nodes = Fields(fields.node("nodes"), fields.at("nodes"), fields.findings, ("local", "labels"))
    facts = PoolFacts(fields.text("title"), fields.gpus("size"), local_gpus(nodes), nodes.texts("labels"))
    return pool, facts


def local_gpus(nodes: Fields) -> Literal["all"] | tuple[int, ...] | None:
    """Read which GPUs of this machine a pool has."""
    if not nodes.has("local"):
        return None
    local = Fields(nodes.node("local"), nodes.at("local"), nodes.findings, ("gpus",))
    node = local.node("gpus")
    if node is None or node.raw == "all":
        return "all"
    found: set[int] = set()
    for item, where in local.items("gpus"):
        if isinstance(item.value, int) and not isinstance(item.value, bool) and 0 <= item.value < 1024:
            found.add(item.value)
        else:
            local.findings.say(item.line, where, f"this is {item.kind}, expected the number of a GPU, from 0")
    return tuple(sorted(found))


def read_policy(fields: Fields, context: Context) -> tuple[Policy, PolicyFacts]:
    """Read one team's policy."""
    quotas = []
    for node, where in fields.items("quotas"):
        line = Fields(node, where, fields.findings, QUOTA)
        if not line.broken:
            context.places["lines", where] = line
            quotas.append(read_quota(line, context))
    weights: tuple[Weight, ...] = get_args(Weight)
    policy = Policy(
        name=fields.slug("name"),
        title=fields.text("title"),
        quotas=tuple(quotas),
        weight=fields.choice("weight", weights, "Medium"),
        priority=fields.whole("priority", 0, -1000, 1000, "(0 is normal)"),
        parent=fields.slug("parent") if fields.has("parent") else None,
    )
    return policy, PolicyFacts(fields.names("groups", slugs=False), fields.names("users", slugs=False))


def read_quota(fields: Fields, context: Context) -> QuotaLine:
    """Read one line of a quota; `reserved ≤ limit` and `lend ≤ reserved`."""
    line = QuotaLine(
        pools=named_pools(fields, context),
        reserved=fields.gpus("reserved") or 0,
        limit=fields.gpus("limit"),
        lend=fields.gpus("lend"),
    )
    if line.limit is not None and line.reserved > line.limit:
        fields.wrong(
            "reserved",
            f"{gpus(line.reserved)} are reserved, but the limit is {gpus(line.limit)}; raise the limit or reserve less",
        )
    if line.lend is not None and line.lend > line.reserved:
        fields.wrong(
            "lend", f"{gpus(line.lend)} cannot be lent of a reservation of {gpus(line.reserved)}; lend at most that"
        )
    return line


def named_pools(fields: Fields, context: Context) -> tuple[str, ...]:
    """Read a list of pools; an empty one would be read as all, so it is not taken."""
    pools = fields.names("pools")
    node = fields.node("pools")
    if node is not None and node.value == []:
        fields.wrong("pools", "no pool is named; name one, or take the key out to mean all")
    return pools


def read_profile(fields: Fields, context: Context) -> tuple[Profile, ProfileFacts]:
    """Read one profile; who names no policies means all teams, who names no pools means all pools."""
    name = fields.slug("name")
    milli = fields.gpus("gpus")
    if not fields.has("gpus"):
        fields.wrong("gpus", "the number of GPUs is missing; give 0 for a profile without")
    elif milli is not None and milli > GPU and milli % GPU:
        fields.wrong("gpus", "a worker takes part of one GPU (less than 1) or whole ones; round it")
    workers = fields.whole("workers", 1, 1, 100_000, "workers")
    least = fields.whole("min_workers", workers, 1, 100_000, "workers") if fields.has("min_workers") else None
    if least is not None and least > workers:
        fields.wrong("min_workers", f"{least} is more than the {workers} workers; give at most that")
    everyone = not fields.has("policies")
    grace = fields.seconds("grace", 86_400)
    pools = named_pools(fields, context)
    profile = Profile(
        name=name,
        gpus=milli or 0,
        workers=workers,
        min_workers=least,
        cpu=fields.cores("cpu"),
        memory=fields.memory("memory"),
        pools=pools or (context.pools if milli else ()),
        policies=((context.policies,) if context.policies else ()) if everyone else fields.ranks("policies"),
        min_runtime=fields.seconds("min_runtime") or 0.0,
        reclaim_after=fields.seconds("reclaim_after") or 0.0,
        grace=context.settings.grace if grace is None else grace,
        time_limit=fields.seconds("time_limit"),
    )
    return profile, read_profile_facts(fields, name, everyone)


def read_profile_facts(fields: Fields, name: str, everyone: bool) -> ProfileFacts:
    """Read what people and machines want to know of a profile."""
    env = fields.texts("env")
    for variable in env:
        if not VARIABLE.fullmatch(variable):
            fields.wrong("env", f"{quote(variable)} is no name of a variable: letters, digits and _, no digit first")
        elif OURS.fullmatch(variable):
            fields.wrong("env", f"{variable} is set by Makeway itself; take it out")
    return ProfileFacts(
        title=fields.text("title") or name,
        description=fields.text("description", longest=2000),
        kinds=read_kinds(fields),
        image=fields.text("image", longest=1000) or None,
        env=env,
        signal=fields.choice("signal", SIGNALS, "SIGTERM"),
        everyone=everyone,
    )


def read_kinds(fields: Fields) -> tuple[Kind, ...]:
    """Read what a profile is for: sessions, jobs or both."""
    if not fields.has("kinds"):
        return KINDS
    named: Sequence[str] = fields.names("kinds", slugs=False)
    for kind in named:
        if kind not in KINDS:
            fields.wrong("kinds", f"{quote(kind)} is no kind of work, expected session, job or both")
    if not named:
        fields.wrong("kinds", "the profile is for nothing; name session, job or both")
    return tuple(kind for kind in KINDS if kind in named)
