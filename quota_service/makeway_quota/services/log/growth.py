"""Show how what is kept grows: by all, by team and by person, and in how many days it is full at this rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import linear_regression

from makeway_api.models import StorageGrowth, StorageTrend

from ...store.storage.growth import ALL, FREE, PERSON, TEAM
from ..context import Context

TREND_DAYS = 14
"""Days whose trend counts"""
MIN_DAYS = 3
"""Days without which there is no trend"""
MAX_DAYS = 1000
"""Days beyond which nothing is said to become full"""
MAX_TRENDS = 20
"""Teams, and people, that are named: those that grew the most in a week"""

Days = Mapping[int, int]
"""Bytes by day"""


class GrowthService:
    """Shows administrators what grows."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def growth(self) -> StorageGrowth:
        """Return what was kept each day, what grows, and in how many days it is full."""
        return await self._context.call(self._growth)

    def _growth(self) -> StorageGrowth:
        context, settings = self._context, self._context.settings
        result: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for entry in context.store.growth.days(context.clock()):
            result[entry.scope, entry.name][entry.day] = entry.bytes
        totals = result.get((ALL, ""), {})
        if not totals:
            return StorageGrowth()
        first, last = min(totals), max(totals)
        limits = {TEAM: settings.max_kept_team_bytes, PERSON: settings.max_kept_person_bytes}

        def trend(scope: str, name: str, days: Days) -> StorageTrend:
            known = {day: days.get(day, 0) for day in totals}  # a day without it: it kept nothing, or little
            now = known[last]
            return StorageTrend(
                name=name,
                title=context.title(name) if scope == TEAM else name,
                bytes=now,
                day=_since(known, last - 1),
                week=_since(known, last - 7),
                month=_since(known, last - 30),
                full_in_days=full_in(known, limits[scope] - now) if limits.get(scope) else None,
            )

        trends = {
            scope: sorted(
                (trend(scope, name, days) for (of, name), days in result.items() if of == scope),
                key=lambda item: (-(item.week if item.week is not None else item.day or 0), -item.bytes, item.name),
            )[:MAX_TRENDS]
            for scope in (TEAM, PERSON)
        }
        free_by_day = result.get((FREE, ""), {})
        remaining = {day: -free for day, free in free_by_day.items()}
        maximum = settings.max_kept_bytes
        return StorageGrowth(
            first_day=first,
            days=[totals.get(day) for day in range(first, last + 1)],
            all=trend(ALL, "", totals),
            limit=maximum or None,
            quota_full_in_days=full_in(totals, maximum - totals[last]) if maximum else None,
            disk_full_in_days=full_in(remaining, free_by_day[max(free_by_day)]) if free_by_day else None,
            teams=trends[TEAM],
            people=trends[PERSON],
        )


def full_in(days: Days, free_bytes: int) -> int | None:
    """Return the days until `free_bytes` more are used, by the trend of the last days; None if it does not look so.

    0: it is full. The trend is that of a straight line through the days of TREND_DAYS.
    """
    if free_bytes <= 0:
        return 0
    last = max(days)
    counted = sorted(day for day in days if day > last - TREND_DAYS)
    if len(counted) < MIN_DAYS:
        return None
    slope = linear_regression(counted, [days[day] for day in counted]).slope
    if slope <= 0 or free_bytes / slope > MAX_DAYS:
        return None
    return math.ceil(free_bytes / slope)


def _since(days: Days, day: int) -> int | None:
    """Return by how much something grew since the end of a day, or of the last one before that is known; else None."""
    before = max((known for known in days if known <= day), default=None)
    return None if before is None else days[max(days)] - days[before]
