"""What the loop and the desk work with: made once, when the service is opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .backends.base import Backend
from .config import ServiceConfig
from .hubapi import HubApi
from .leases import Leases
from .store.store import Store
from .watch import Watch


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one service. `clock` gives Unix seconds."""

    config: ServiceConfig
    store: Store
    backend: Backend
    watch: Watch
    leases: Leases
    hub: HubApi | None = None
    clock: Callable[[], float] = time.time
