"""Read the quantities of Kubernetes: CPU as milli-cores, memory as MiB, devices as whole numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]+)|([numkMGTPE]i?|Ki)?)")
MAX_CHARACTERS = 100
"""Characters of a quantity at most; Kubernetes writes fewer than 30"""
MAX_EXPONENT = 40
"""Exponents are cut to this, so that 1e999999999 makes no huge number: beyond, all are above LARGEST or next to 0"""
LARGEST = 2**63 - 1
"""The largest quantity of Kubernetes"""
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
def parse_quantity(text: str) -> Fraction:
    """Return the exact number that a quantity means; ValueError if it is not a quantity."""
    match = QUANTITY.fullmatch(text.strip()) if len(text) <= MAX_CHARACTERS else None
    if match is None or (match[3] or "") not in SUFFIXES:
        raise ValueError(f"{text[:MAX_CHARACTERS]!r} is not a quantity of Kubernetes")
    if not match[2]:
        return Fraction(match[1]) * SUFFIXES[match[3] or ""]
    exponent = max(-MAX_EXPONENT, min(MAX_EXPONENT, int(match[2][1:])))
    return Fraction(match[1]) * Fraction(10) ** exponent


@lru_cache(maxsize=4096)
def in_service_units(resource: str, text: str, *, round_up: bool = True) -> int:
    """Return a quantity in the service's unit for the resource: rounded up for requests, down for what nodes offer.

    The result is neither negative nor above LARGEST. `round_up`: whether to round up.
    """
    exact = parse_quantity(text)
    if resource == "cpu":
        exact *= 1000
    elif resource == "memory":
        exact /= MIB
    whole = -(-exact.numerator // exact.denominator) if round_up else exact.numerator // exact.denominator
    return max(0, min(LARGEST, whole))


def resource_requests(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """Return the requests of a resource list, without zeros."""
    requests = {resource: in_service_units(resource, str(text)) for resource, text in (quantities or {}).items()}
    return {resource: value for resource, value in requests.items() if value}


def allocatable(quantities: Mapping[str, object] | None) -> dict[str, int]:
    """Return the allocatable resources of a node, zeros included: one that offers 0 GPUs now may offer some later."""
    return {
        resource: in_service_units(resource, str(text), round_up=False) for resource, text in (quantities or {}).items()
    }
