"""Write amounts as text: GPUs, memory, bytes, counts and lists, the same in pages, notebooks and commands."""

from __future__ import annotations

from collections.abc import Iterable


def number(value: float) -> str:
    """Return a number without needless zeros, to three decimals, with thousands apart: `2`, `0.125`, `7,912`."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def gpus(value: float, kind: str = "GPU") -> str:
    """Return an amount of GPUs with its unit: `0.5 GPU`, `1 GPU`, `2 GPUs`, `0 GPUs`; `kind` may be `virtual GPU`."""
    return f"{number(value)} {kind}{'' if 0 < value <= 1 else 's'}"


def count(n: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun in the right form: `1 job`, `2,000 jobs`."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def memory(mebibytes: float) -> str:
    """Return an amount of memory in its largest binary unit: `512 MiB`, `64 GiB`, `1.5 TiB`."""
    for unit in ("MiB", "GiB"):
        if mebibytes < 1024:
            return f"{mebibytes:.4g} {unit}"
        mebibytes /= 1024
    return f"{mebibytes:.4g} TiB"


def size(n: float) -> str:
    """Return the size of a file or a submission in decimal units: `12 bytes`, `3.4 kB`, `50 MB`."""
    if n < 1000:
        return f"{int(n)} bytes"
    n /= 1000
    for unit in ("kB", "MB"):
        if n < 999.5:
            return f"{n:.1f} {unit}" if n < 9.95 else f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:.1f} GB" if n < 9.95 else f"{n:.0f} GB"


def listed(names: Iterable[str], joint: str = "and", limit: int = 8) -> str:
    """Return names as a list in a sentence: `a, b and c`; a longer one than `limit` ends in `and 4 more`."""
    items = list(names)
    if len(items) > limit:
        items = [*items[: limit - 1], f"{len(items) - limit + 1} more"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {joint} {items[-1]}"
