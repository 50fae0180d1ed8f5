"""The parts that the loop and the services share: made once, when the service is opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..backends.base import Backend
from ..settings import ServiceSettings
from ..store.store import Store
from .hub.leases import Leases
from .hub.servers import HubServers
from .machines.channel import MachineChannel
from .reads.cycle_gate import CycleGate
from .replicas.change_feed import ChangeFeed
from .replicas.leader import Leader
from .workers.channel import WorkerChannel
from .workers.progress_keeper import ProgressKeeper
from .world.world import World


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one service. `clock` returns Unix seconds; `feed` is None where there is one replica only.

    `machines` is None without the backend of that name.
    """

    settings: ServiceSettings
    store: Store
    backend: Backend
    world: World
    leases: Leases
    leader: Leader
    channel: WorkerChannel
    progress: ProgressKeeper
    servers: HubServers | None = None
    feed: ChangeFeed | None = None
    machines: MachineChannel | None = None
    clock: Callable[[], float] = time.time
    gate: CycleGate = field(default_factory=CycleGate)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "loop"))
    """threads of the cycle and of retention only, so that neither waits behind requests"""
