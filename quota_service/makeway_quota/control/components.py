"""What the loop and the services work with: made once, when the service is opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..backends.base import Backend
from ..config import ServiceConfig
from ..store.store import Store
from .hub_client import HubApi
from .leases import Leases
from .world import World


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one service. `clock` gives Unix seconds."""

    config: ServiceConfig
    store: Store
    backend: Backend
    world: World
    leases: Leases
    hub: HubApi | None = None
    clock: Callable[[], float] = time.time
