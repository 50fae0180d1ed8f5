"""Jobs and agents of a random history, as the world has them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Job:
    """One job: its workers run for `seconds` on one machine each."""

    name: str
    pool: str
    workers: int
    seconds: float
    placed: tuple[str, ...] = ()
    attempt: int = 0
    started: dict[str, float] = field(default_factory=dict)
    done: bool = False
    notice_at: float | None = None


@dataclass
class Agent:
    """What runs on one instance: its boot, and the attempts that its processes belong to."""

    instance: str
    machine: str
    joins_at: float
    init_fails: bool = False
    gpus: int | None = None
    cut_until: float = 0.0
    attempts: set[tuple[str, int]] = field(default_factory=set)
    joined: bool = False
