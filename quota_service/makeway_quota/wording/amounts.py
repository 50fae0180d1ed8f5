"""Amounts in the service's own units as text: milli-GPUs, seconds, lists of names."""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.durations import duration
from makeway_api.quantities import count, listed
from makeway_api.quantities import gpus as devices
from makeway_api.quantities import number as plain

__all__ = ["count", "duration", "gpus", "gpus_are", "names", "number"]


def number(milli: float) -> str:
    """Return milli-GPUs as a number of devices: `3`, `0.5`."""
    return plain(milli / 1000)


def gpus(milli: float) -> str:
    """Return milli-GPUs with their unit: `0.5 GPU`, `1 GPU`, `3 GPUs`."""
    return devices(milli / 1000)


def gpus_are(milli: int) -> str:
    """Return an amount of GPUs with its verb: `0.5 GPU is`, `1 GPU is`, `2 GPUs are`."""
    return f"{gpus(milli)} {'is' if 0 < milli <= 1000 else 'are'}"


def names(all_names: Sequence[str], limit: int = 5) -> str:
    """Return names as a list: `a, b and c`, with the number of those beyond `limit`."""
    return listed(all_names, limit=limit + 1) if len(all_names) > limit else listed(all_names)
