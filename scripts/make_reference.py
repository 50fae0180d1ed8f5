"""Writes reference pages from the code itself: settings, metrics, the HTTP API, commands and magics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- Made by `make docs` from {source}. -->\n"


def pages() -> dict[str, str]:
    """Make every page of docs/reference/ that comes from code: its name → its text."""
    return {"service-settings.md": settings_page(), "metrics.md": metrics_page()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay rows out as a Markdown table; what would end a cell is escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [
        f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """List every setting of the service with its environment variable, default and help."""
    from makeway_quota.config import QuotaService

    rows = []
    for name, trait in sorted(QuotaService.class_traits(config=True).items()):
        if variable := trait.metadata.get("env"):
            text = trait.help.replace(f" ({variable}=1)", "").replace(f" ({variable})", "")
            rows.append((f"`{variable}`", f"`c.QuotaService.{name}`", f"`{trait.default_value!r}`", text))
    return "\n".join(
        [
            NOTE.format(source="`makeway_quota.config`"),
            "# Settings of the service\n",
            "Each can be given in the environment or in a traitlets file (`makeway-quota serve --config FILE`); "
            "the environment wins.\n",
            table(["environment", "in a file", "default", "meaning"], rows),
        ]
    )


def metrics_page() -> str:
    """List every metric with its labels."""
    from makeway_quota import metrics

    rows = []
    for collector in metrics.REGISTRY._collector_to_names:
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
            rows.append((f"`{name}`", family.type, labels or "–", family.documentation))
    return "\n".join(
        [
            NOTE.format(source="`makeway_quota.metrics`"),
            "# Metrics\n",
            "The service answers Prometheus at `/services/makeway/metrics`, without a login, with counts only: "
            "team names appear, user names do not.\n",
            table(["metric", "kind", "labels", "meaning"], sorted(rows)),
        ]
    )
