"""The policy document as values: what the engine needs, and what only people and machines need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..engine.state import Kind, Policy, Pool, Profile, Settings


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What the service knows of a pool beyond the engine.

    `size` (milli-GPUs) is how many the administrator counts on. `local` says which GPUs of this machine belong to
    it ("all", or their indices; None: not a pool of this machine), `labels` which nodes of a cluster do.
    """

    title: str = ""
    size: int | None = None
    local: Literal["all"] | tuple[int, ...] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """What the service knows of a profile beyond the engine.

    `everyone`: the document names no policies, so every team has it, and with 0 GPUs people without a team too.
    """

    title: str
    description: str = ""
    kinds: tuple[Kind, ...] = ("session", "job")
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    signal: str = "SIGTERM"
    everyone: bool = False


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Who is in a team: groups of the Hub, and single users."""

    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """Pools, profiles, policies and settings in the engine's own types, and the rest by name.

    Every profile's `policies` are spelled out, and its `grace` is set.
    """

    settings: Settings = field(default_factory=Settings)
    sessions_per_user: int = 2
    pools: tuple[Pool, ...] = ()
    profiles: tuple[Profile, ...] = ()
    policies: tuple[Policy, ...] = ()
    pool_facts: Mapping[str, PoolFacts] = field(default_factory=dict)
    profile_facts: Mapping[str, ProfileFacts] = field(default_factory=dict)
    policy_facts: Mapping[str, PolicyFacts] = field(default_factory=dict)

    def pool(self, name: str) -> Pool | None:
        """Find a pool."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def profile(self, name: str) -> Profile | None:
        """Find a profile."""
        return next((profile for profile in self.profiles if profile.name == name), None)

    def policy(self, name: str) -> Policy | None:
        """Find a team's policy."""
        return next((policy for policy in self.policies if policy.name == name), None)

    def teams_of(self, user: str, groups: Iterable[str]) -> tuple[str, ...]:
        """Name the teams that a user is in, in the document's order."""
        mine = frozenset(groups)
        return tuple(
            name
            for name, facts in ((policy.name, self.policy_facts[policy.name]) for policy in self.policies)
            if user in facts.users or not mine.isdisjoint(facts.groups)
        )

    def profiles_for(self, team: str | None, kind: Kind) -> tuple[str, ...]:
        """Name the profiles that a team can use for sessions or jobs; None: people without a team."""
        return tuple(
            profile.name
            for profile in self.profiles
            if kind in self.profile_facts[profile.name].kinds and self.queue_open(team, profile.name)
        )

    def queue_open(self, team: str | None, profile: str) -> bool:
        """Say whether the queue `team/profile` takes work."""
        found = self.profile(profile)
        if found is None:
            return False
        if team is None:
            return found.gpus == 0 and self.profile_facts[profile].everyone
        return any(team in rank for rank in found.policies)

    def is_local(self, pool: str) -> bool:
        """Say whether a pool has (or waits for) GPUs of the machine that Makeway itself runs on.

        Where no pool says so, the only pool has them all; two of them would have to say which.
        """
        if any(facts.local is not None for facts in self.pool_facts.values()):
            return self.pool_facts[pool].local is not None
        return len(self.pools) == 1 and not self.pool_facts[pool].labels

    def pool_of_device(self, index: int) -> str | None:
        """Name the pool that a GPU of this machine belongs to: who names it comes before who takes all."""
        chosen = [(pool.name, self.pool_facts[pool.name].local) for pool in self.pools if self.is_local(pool.name)]
        named = [name for name, local in chosen if isinstance(local, tuple) and index in local]
        return next(iter([*named, *(name for name, local in chosen if not isinstance(local, tuple))]), None)
