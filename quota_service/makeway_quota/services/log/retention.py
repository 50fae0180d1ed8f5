"""Show administrators what is kept, for how long, and what the last pass removed."""

from __future__ import annotations

from typing import Any

from makeway_api.models import Kept, RetentionReport

from ..context import Context
from ..times import when


async def retention_report(context: Context) -> RetentionReport:
    """Return the settings with the figures of the last pass; before the first pass without figures."""
    settings = context.settings
    last = await context.call(context.store.pruning.last)
    report: dict[str, Any] = last.report if last else {}
    holdings: dict[str, Any] = report.get("holdings", {})
    days = {
        "workloads": settings.keep_workloads_days,
        "decisions": settings.keep_decisions_days,
        "events": settings.keep_events_days,
    }
    kept = [
        Kept(
            kind=kind,
            days=kept_days or None,
            most=settings.keep_events if kind == "events" else None,
            count=holdings.get(kind, {}).get("count", 0),
            oldest=when(holdings.get(kind, {}).get("oldest")),
        )
        for kind, kept_days in days.items()
    ]
    return RetentionReport(
        at=when(last.at if last else None),
        kept=kept,
        removed=report.get("removed", {}),
        folders_failed=report.get("folders_failed", 0),
        database_bytes=report.get("bytes", 0),
        free_bytes=report.get("free_bytes", 0),
        artifacts=report.get("artifacts", 0),
        artifact_bytes=report.get("artifact_bytes", 0),
    )
