"""Write amounts of money as text: prices, spend beside a budget, the cost of a GPU-hour; in pages and commands."""

from __future__ import annotations

from collections.abc import Iterable

from ..quantities import gpus
from .deployments import MachinePrice

FINE_BELOW = 0.1
"""Amounts below it are written with four decimals: a share of a GPU may cost less than a hundredth"""


def amount(value: float) -> str:
    """Return an amount without its currency: `3.10`, `0.0125`, `1,200.00`."""
    return f"{value:,.4f}" if 0 < value < FINE_BELOW else f"{value:,.2f}"


def spent(value: float, limit: float | None, currency: str) -> str:
    """Return what is spent, beside its budget where there is one: `3.10 of 6.50 EUR`."""
    return f"{value:,.2f} {currency}" if limit is None else f"{value:,.2f} of {limit:,.2f} {currency}"


def gpu_hours(prices: Iterable[MachinePrice], currency: str) -> str:
    """Return what a GPU-hour costs on the machines of a deployment: `0.50 to 1.55 EUR`; "" where none has GPUs."""
    with_gpus = [one for one in prices if one.gpus]
    known = sorted(one.gpu_price for one in with_gpus if one.gpu_price is not None)
    if not known:
        return "not known" if with_gpus else ""
    first, last = amount(known[0]), amount(known[-1])
    result = f"{first if first == last else f'{first} to {last}'} {currency}"
    return result if len(known) == len(with_gpus) else f"{result}, others not known"


def costs(one: MachinePrice, currency: str) -> str:
    """Return what a machine costs, and a GPU of it: `3.10 EUR an hour, 1.55 EUR a GPU-hour`."""
    if one.price is None:
        return "price not known"
    most = "at most " if one.market == "spot" else ""
    of_gpus = "no GPUs" if one.gpu_price is None else f"{amount(one.gpu_price)} {currency} a GPU-hour"
    return f"{most}{amount(one.price)} {currency} an hour, {of_gpus}"


def kind(one: MachinePrice) -> str:
    """Return a machine type as it is told apart from the others: `gpu-2, spot, 2 GPUs`."""
    return ", ".join([one.type, one.market.replace("_", " "), *([gpus(one.gpus)] if one.gpus else [])])
