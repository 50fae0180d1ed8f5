"""Hold a policy document: the engine's values, and what only the service and its pages need."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..engine.snapshot import Kind, Pool, Profile, Settings, TeamQuota
from .members import hub_name

MAX_WORKERS_WITHOUT_GPUS = 100
"""Workers that a job may ask for where its profile has no GPUs and names no number of its own."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What the service knows of a pool beyond the engine.

    `size` (milli-GPUs) is the size that the administrator expects. `local` has the GPUs of this machine that belong
    to it ("all", or their indices; None: not a pool of this machine), `labels` those of its nodes on a cluster.
    """

    title: str = ""
    size: int | None = None
    local: Literal["all"] | tuple[int, ...] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Image:
    """A container image that a profile offers; `image` is its reference, such as `registry.example/lab:3`."""

    name: str
    image: str
    title: str = ""
    description: str = ""
    default: bool = False

    def __str__(self) -> str:
        """Return the image for the list of changes: its name and reference."""
        return f"{self.name} ({self.image}{', default' if self.default else ''})"


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """What the service knows of a profile beyond the engine.

    `everyone`: the document names no policies, so the profile is for every team and, with 0 GPUs, for users without
    a team. `image` is the only image of a profile that offers no choice of `images`.
    """

    title: str
    description: str = ""
    kinds: tuple[Kind, ...] = ("session", "job")
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    signal: str = "SIGTERM"
    everyone: bool = False
    pod: Mapping[str, Any] = field(default_factory=dict)
    """what the pods of its jobs have on a cluster besides what Makeway gives them: part of a Pod of Kubernetes"""
    images: tuple[Image, ...] = ()
    max_workers: int | None = None
    """the most workers that a job may ask for; see `workers_limit`"""
    disk: int = 0
    """MiB that a worker requests of its node's disk on a cluster, and the most that it may use; 0: the site's"""

    @property
    def default_image(self) -> str | None:
        """The reference of the image without a choice: the one marked as default, else the first; None: the site's."""
        chosen = next((image for image in self.images if image.default), self.images[0] if self.images else None)
        return chosen.image if chosen else self.image


def workers_limit(profile: Profile, facts: ProfileFacts) -> int | None:
    """Return the most workers that a job of a profile may ask for; None: as many as its quota takes.

    Without GPUs no quota bounds them, and each is a process or a pod.
    """
    if facts.max_workers is not None:
        return facts.max_workers
    return None if profile.gpus else max(profile.workers, MAX_WORKERS_WITHOUT_GPUS)


@dataclass(frozen=True, slots=True)
class Volume:
    """A claim of the jobs' namespace, or a folder of it, that the pods of a team's jobs have at a path."""

    name: str
    claim: str
    path: str
    sub_path: str = ""
    read_only: bool = False

    def __str__(self) -> str:
        """Return the volume for the list of changes: its name, where it is from and where it is mounted."""
        source = f"{self.claim}/{self.sub_path}" if self.sub_path else self.claim
        return f"{self.name} ({source} at {self.path}{', read-only' if self.read_only else ''})"


@dataclass(frozen=True, slots=True)
class TeamFacts:
    """The members of a team, groups of the Hub and single users, and the volumes of its jobs on a cluster."""

    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    work: Literal["private", "team"] | None = None
    """who reads code, environment, logs and results of its jobs; None: as the settings say"""


class _Index(NamedTuple):
    """The pools, profiles and policies of a document by name; users and groups with the positions of their teams."""

    pools: Mapping[str, Pool]
    profiles: Mapping[str, Profile]
    policies: Mapping[str, TeamQuota]
    of_user: Mapping[str, Sequence[int]]
    written: Mapping[str, Sequence[tuple[str, int]]]
    """small letters to the entries with capitals that mean them, with the positions of their teams"""
    of_group: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, document: Document) -> _Index:
        of_user: dict[str, list[int]] = {}
        written: dict[str, list[tuple[str, int]]] = {}
        of_group: dict[str, list[int]] = {}
        for at, policy in enumerate(document.policies):
            facts = document.team_facts.get(policy.name, TeamFacts())
            for user in dict.fromkeys(facts.users):
                of_user.setdefault(user, []).append(at)
                if (small := hub_name(user)) != user:
                    written.setdefault(small, []).append((user, at))
            for group in facts.groups:
                of_group.setdefault(group, []).append(at)
        pools = {pool.name: pool for pool in reversed(document.pools)}
        profiles = {profile.name: profile for profile in reversed(document.profiles)}
        policies = {policy.name: policy for policy in reversed(document.policies)}
        return cls(pools, profiles, policies, of_user, written, of_group)


@dataclass(frozen=True, slots=True)
class Document:
    """Pools, profiles, policies and settings in the engine's types, and the facts of each by name.

    In every profile `pools`, `policies` and `grace` are set: the defaults of a document are filled in.
    """

    settings: Settings = field(default_factory=Settings)
    sessions_per_user: int = 2
    pools: tuple[Pool, ...] = ()
    profiles: tuple[Profile, ...] = ()
    policies: tuple[TeamQuota, ...] = ()
    pool_facts: Mapping[str, PoolFacts] = field(default_factory=dict)
    profile_facts: Mapping[str, ProfileFacts] = field(default_factory=dict)
    team_facts: Mapping[str, TeamFacts] = field(default_factory=dict)
    work: Literal["private", "team"] = "private"
    """who reads code, environment, logs and results of jobs: their owners and the leads, or the whole team"""
    _index: _Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", _Index.of(self))

    def pool(self, name: str) -> Pool | None:
        """Return a pool, None if there is none of that name."""
        return self._index.pools.get(name)

    def profile(self, name: str) -> Profile | None:
        """Return a profile, None if there is none of that name."""
        return self._index.profiles.get(name)

    @property
    def teams(self) -> frozenset[str]:
        """The names of all teams."""
        return frozenset(policy.name for policy in self.policies)

    def policy(self, name: str) -> TeamQuota | None:
        """Return the policy of a team, None if there is none of that name."""
        return self._index.policies.get(name)

    def teams_of(self, user: str, groups: Iterable[str], others: Container[str] = ()) -> tuple[str, ...]:
        """Return the teams of a user, in the document's order.

        An entry means the user whose name is written like it. One with capitals also means the user with its small
        letters, as JupyterHub writes names, unless it is the name of one of the `others` that the Hub has.
        """
        index = self._index
        result = set(index.of_user.get(user, ()))
        result.update(at for entry, at in index.written.get(user, ()) if entry not in others)
        for group in groups:
            result.update(index.of_group.get(group, ()))
        return tuple(self.policies[at].name for at in sorted(result))

    @property
    def users_with_capitals(self) -> tuple[str, ...]:
        """The users of all teams that JupyterHub would write in another way, as they are written."""
        return tuple(dict.fromkeys(entry for entries in self._index.written.values() for entry, _ in entries))

    def shares_work(self, team: str) -> bool:
        """Whether the members of a team read what the jobs of all of them run and write."""
        facts = self.team_facts.get(team)
        return (facts.work if facts is not None and facts.work else self.work) == "team"

    def profiles_for(self, team: str | None, kind: Kind) -> tuple[str, ...]:
        """Return the profiles that a team (None: a user without a team) can use for sessions or jobs."""
        return tuple(
            profile.name
            for profile in self.profiles
            if kind in self.profile_facts[profile.name].kinds and self.queue_open(team, profile.name)
        )

    def queue_open(self, team: str | None, profile: str) -> bool:
        """Whether the queue `team/profile` accepts workloads."""
        result = self.profile(profile)
        if result is None:
            return False
        if team is None:
            return result.gpus == 0 and self.profile_facts[profile].everyone
        return any(team in rank for rank in result.policies)

    def is_local(self, pool: str) -> bool:
        """Whether a pool has (or expects) GPUs of the machine that Makeway runs on.

        Without any `local`, a document's only pool has all of them, unless it has labels.
        """
        if any(facts.local is not None for facts in self.pool_facts.values()):
            return self.pool_facts[pool].local is not None
        return len(self.pools) == 1 and not self.pool_facts[pool].labels

    def pool_of_device(self, index: int) -> str | None:
        """Return the pool of a GPU of this machine: the pool that names its index, else the one with all."""
        chosen = [(pool.name, self.pool_facts[pool.name].local) for pool in self.pools if self.is_local(pool.name)]
        named = [name for name, local in chosen if isinstance(local, tuple) and index in local]
        return next(iter([*named, *(name for name, local in chosen if not isinstance(local, tuple))]), None)
