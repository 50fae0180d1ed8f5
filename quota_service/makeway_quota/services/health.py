"""Check the parts that a replica needs, and which of them it cannot answer requests without."""

from __future__ import annotations

from ..control.world.world import World
from .context import Context

WORKING = {"database": "writes", "files": "available", "loop": "decides", "backend": "observed"}
"""What is said of each part while it works."""


def checks(context: Context, named: bool = False) -> dict[str, str]:
    """Return the state of each part as of its last use: nothing is waited for.

    Everyone may read it: errors, which may name people, jobs and addresses, are not in it. `named`: for who reaches
    the port of the service itself, with the ids of what is quarantined, since when, and the class of the error.
    """
    world, store = context.world, context.store
    age = world.age()
    late = age is not None and age >= 10 * context.settings.tick_seconds
    quarantined = world.quarantine.size
    without = f"decides, with {quarantined} quarantined" if quarantined else ""
    if quarantined and named:
        without = f"{without}: {world.quarantine.details(whole=False)}"
    loop = "failed" if world.failure else "late" if late else without
    fails = {
        "database": "cannot be written" if store.failure() else "",
        "files": "unavailable" if store.contents.failure() else "",
        "loop": loop if world.cycled else "no cycle yet",
        "backend": _unobserved(world),
    }
    warning = {"people": "the Hub lacks most of its users"} if world.people.problem else {}
    return {part: fails[part] or working for part, working in WORKING.items()} | warning


def _unobserved(world: World) -> str:
    """Return which backends cannot be observed: all, or the names of some of several; "" where all are."""
    some = ", ".join(world.observed.backends.unobserved())
    return "cannot be observed" if world.problem else f"cannot be observed: {some}" if some else ""


def serves(result: dict[str, str]) -> bool:
    """Whether a replica with these checks may get requests: another may do better without its database only.

    Where files, the loop or the cluster fail, they fail for every replica: people then read what is wrong, and workers
    report, rather than all replicas being taken out of service. A new replica whose loop never went through a cycle is
    another matter: the old ones stay in service beside it.
    """
    return result["database"] == WORKING["database"] and result["loop"] != "no cycle yet"
