"""Time from click to lease when a GPU is free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from threading import Thread

from makeway_api.models import SessionRequest

from .measure import Measured
from .portal import Portal, timed

SPAWNS = 5
ASKS = 40


def measure() -> Iterator[Measured]:
    """Measure leases requested by the spawner's client, then spawns through the Hub as a user starts them."""
    with Portal(gpus=10) as portal:
        answers = [1000 * timed(portal.spawner().me) for _ in range(ASKS)]
        asks = [1000 * ask_and_release(portal) for _ in range(ASKS)]
        yield Measured(
            "the spawner's request to its lease",
            "ms",
            asks,
            "a request that decides nothing",
            median(answers),
            note="The decision is in the database before it is answered.",
        )
        yield Measured(
            "click to lease, a GPU is free",
            "ms",
            [1000 * click(portal) for _ in range(SPAWNS)],
            "the spawner's request to its lease",
            median(asks),
            note="From the request to the Hub to devices in hand; after it comes the notebook server's own start.",
        )


def ask_and_release(portal: Portal) -> float:
    """Lease one GPU, as the spawner, and give it back; the seconds until it was granted."""
    spawner = portal.spawner()
    begin = time.perf_counter()
    session = spawner.request_session(SessionRequest(user="ana", server="bench", profile="gpu1", team="rnd"))
    while not session.placement:
        session = spawner.session(session.id, wait=10, version=session.version)
    seconds = time.perf_counter() - begin
    spawner.release(session.id)
    return seconds


def click(portal: Portal) -> float:
    """Start a server through the Hub, as the spawn page does; the seconds until its lease is granted."""
    ana = portal.user("ana")
    before = {session.id for session in ana.sessions()}
    begin = time.perf_counter()
    # The Hub answers the click after a second at the latest; the lease is there before.
    clicking = Thread(target=portal.start_server, args=("ana", {"profile": "gpu1", "team": "rnd"}))
    clicking.start()
    while not [one for one in ana.sessions() if one.id not in before and one.placement]:
        if time.perf_counter() - begin > 60:
            raise RuntimeError("No lease within a minute of the click.")
        time.sleep(0.002)
    seconds = time.perf_counter() - begin
    clicking.join()
    portal.stop_server("ana")
    return seconds
