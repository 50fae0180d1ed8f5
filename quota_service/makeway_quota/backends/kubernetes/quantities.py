"""Read the quantities of Kubernetes: CPU as milli-cores, memory as MiB, devices as whole numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]i?|Ki)?)")
SUFFIXES: Mapping[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}
MIB = 2**20


@lru_cache(maxsize=4096)
def number(text: str) -> Fraction:
    """Return the exact number that a quantity means; ValueError for what is none."""
    found = QUANTITY.fullmatch(text.strip())
    if found is None or (found[3] or "") not in SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity of Kubernetes")
    return Fraction(found[1]) * (Fraction(10) ** int(found[2][1:]) if found[2] else SUFFIXES[found[3] or ""])


@lru_cache(maxsize=4096)
def amount(resource: str, text: str, *, up: bool = True) -> int:
    """Return a quantity in the service's unit for the resource: rounded up for requests, down for what nodes offer."""
    exact = number(text)
    if resource == "cpu":
        exact *= 1000
    elif resource == "memory":
        exact /= MIB
    return -(-exact.numerator // exact.denominator) if up else exact.numerator // exact.denominator


def requests(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """Return the requests of a resource list, without zeros."""
    found = {resource: amount(resource, str(text)) for resource, text in (quantities or {}).items()}
    return {resource: value for resource, value in found.items() if value}


def resources(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """Return the allocatable resources of a node, zeros included: one that offers 0 GPUs now may offer some later."""
    return {resource: amount(resource, str(text), up=False) for resource, text in (quantities or {}).items()}
