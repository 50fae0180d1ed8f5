"""What is kept over the days, drawn as SVG, and in how many days it is full, in sentences."""

from __future__ import annotations

from datetime import UTC, datetime

from makeway_api.models import StorageGrowth
from makeway_api.quantities import count, number, size
from markupsafe import Markup

WIDTH, HEIGHT = 720, 140
"""Units of the drawing, which is as wide as its card"""
SOON_DAYS = 14
"""Days below which a forecast is a warning"""


def growth_chart(growth: StorageGrowth) -> Markup | None:
    """Return what all kept each day as a line, with the quota where it is near; None before the second day."""
    known = [(at, kept_bytes) for at, kept_bytes in enumerate(growth.days) if kept_bytes is not None]
    if len(known) < 2:
        return None
    maximum = max(kept_bytes for _, kept_bytes in known)
    near = growth.limit is not None and maximum * 2 >= growth.limit
    top = max(maximum, growth.limit if near and growth.limit else 0, 1) * 1.05
    last = len(growth.days) - 1

    def x(at: int) -> str:
        return number(WIDTH * at / last)

    def y(kept_bytes: float) -> str:
        return number(HEIGHT - HEIGHT * kept_bytes / top)

    line = " ".join(f"{x(at)},{y(kept_bytes)}" for at, kept_bytes in known)
    drawn = Markup('<polygon class="mw-grown" points="{} {} {}"></polygon>').format(
        f"{x(known[0][0])},{HEIGHT}", line, f"{x(last)},{HEIGHT}"
    )
    drawn += Markup('<polyline class="mw-growth-line" points="{}"></polyline>').format(line)
    if near:
        drawn += Markup('<line class="mw-growth-end" x1="0" x2="{}" y1="{}" y2="{}"></line>').format(
            WIDTH, y(growth.limit or 0), y(growth.limit or 0)
        )
    return Markup(
        '<svg class="mw-growth" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(WIDTH, HEIGHT, in_words(growth), drawn)


def in_words(growth: StorageGrowth) -> str:
    """Return the drawing in one sentence."""
    first, last = (growth.days or [0])[0], (growth.days or [0])[-1]
    since = day(growth.first_day)
    return f"All people together kept {size(first or 0)} on {since} and keep {size(last or 0)} now."


def forecasts(growth: StorageGrowth) -> list[tuple[bool, str]]:
    """Return sentences about what becomes full, each with whether that is soon."""
    result = []
    for days, subject, consequence in (
        (growth.quota_full_in_days, "The quota of all", "submissions of everybody are refused"),
        (growth.disk_full_in_days, "The disk", "submissions and results are refused"),
    ):
        if days == 0:
            result.append((True, f"{subject} is full: {consequence}. Delete what is not needed, or give it more."))
        elif days is not None:
            after = f"after that {consequence}"
            result.append(
                (days <= SOON_DAYS, f"{subject} is full in about {count(days, 'day')} at the present rate; {after}.")
            )
    if not result and sum(kept_bytes is not None for kept_bytes in growth.days) >= 3:
        result.append((False, "Nothing becomes full at the present rate."))
    return result


def day(number: int) -> str:
    """Return a day that is counted from 1970 as people write it."""
    return f"{datetime.fromtimestamp(number * 86_400, UTC):%d %b %Y}"


def grown(bytes: int | None) -> str:
    """Return by how much something grew: `+3.4 MB`, `−120 kB`, `0`, `–` where that is not known."""
    if bytes is None:
        return "–"
    return "0" if bytes == 0 else f"{'+' if bytes > 0 else '−'}{size(abs(bytes))}"
