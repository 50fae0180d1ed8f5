"""The report as one page with pictures that needs nothing else: no script, no font, no request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from makeway_api.tables import Column, Row

from ..engine.snapshot import GPU
from .meter import HOUR
from .replay import Outcome
from .report import COLUMNS, MACHINE_COLUMNS, TEAM_COLUMNS, machines_sentence, percentile

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 200, 60, 24
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}svg text{fill:currentColor;font-size:11px}
.axis{stroke:currentColor;stroke-opacity:.3}
"""


def page(title: str, outcomes: Sequence[Outcome], numbers: Sequence[dict[str, Any]]) -> str:
    """Return the whole page as HTML."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        _comparison(numbers),
        _unserved_guarantees(numbers),
        *(_section(outcome, one) for outcome, one in zip(outcomes, numbers, strict=True)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _comparison(numbers: Sequence[dict[str, Any]]) -> str:
    return _table(COLUMNS, numbers)


def _table(columns: Sequence[Column[Row, object]], rows: Sequence[Row]) -> str:
    cells = "".join(f"<th>{escape(column.name)}</th>" for column in columns)
    shown = ([_number(column.cell(row)) for column in columns] for row in rows)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in shown)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _unserved_guarantees(numbers: Sequence[dict[str, Any]]) -> str:
    bars = [(one["name"], one["unserved_guarantee_gpu_h"]) for one in numbers]
    return "<h2>Guarantees that were not served, GPU-hours</h2>" + _bar_chart(bars)


def _bar_chart(bars: Sequence[tuple[str, float]]) -> str:
    maximum = max((value for _, value in bars), default=0) or 1
    lines = []
    for at, (name, value) in enumerate(bars):
        y, width = 6 + 24 * at, (WIDTH - 320) * value / maximum
        lines.append(
            f'<text x="0" y="{y + 13}">{escape(name)}</text>'
            f'<rect x="220" y="{y}" width="{width:.1f}" height="16" fill="{COLOURS[at % len(COLOURS)]}"/>'
            f'<text x="{226 + width:.1f}" y="{y + 13}">{_number(float(value))}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {24 * len(bars) + 10}" role="img">{"".join(lines)}</svg>'


def _section(outcome: Outcome, numbers: dict[str, Any]) -> str:
    """Return the HTML of one simulation: usage over time, delays by team, evictions, borrowing between teams."""
    loans = [
        (f"{row['borrower']} from {row['lender'] or 'unreserved GPUs'}", row["gpu_h"])
        for row in numbers["borrowed_gpu_h"]
    ]
    loans = sorted(loans, key=lambda bar: (-bar[1], bar[0]))[:20]
    evictions = [(f"{row['team']} for {row['for']}", float(row["times"])) for row in numbers["made_way"]]
    evictions = sorted(evictions, key=lambda bar: (-bar[1], bar[0]))[:20]
    parts = [
        f"<h2>{escape(numbers['name'])}</h2>",
        "<h3>GPUs in use (filled), of them borrowed (dark), and waiting (line)</h3>",
        _usage_chart(outcome),
        "<h3>Delay by team: half, 95 % and 99 % of the jobs, hours</h3>",
        _delay_chart(outcome),
        _table(TEAM_COLUMNS, numbers["teams"]),
    ]
    if numbers["machines"]:
        table = _table(MACHINE_COLUMNS, numbers["machines"])
        parts += ["<h3>Machines</h3>", table, f"<p>{escape(machines_sentence(numbers))}</p>"]
    if evictions:
        parts += ["<h3>Who made way for whom, times</h3>", _bar_chart(evictions)]
    if loans:
        parts += ["<h3>Who borrowed from whom, GPU-hours</h3>", _bar_chart(loans)]
    return "".join(parts)


def _usage_chart(outcome: Outcome) -> str:
    moments = outcome.meter.moments
    if not moments:
        return "<p>Nothing ran for an hour.</p>"
    step = max(1, len(moments) // 800)
    sampled = moments[::step]
    top = max(outcome.gpus, 1)
    x_step, axis_y = (WIDTH - LEFT) / max(1, len(sampled) - 1), HEIGHT - BOTTOM

    def line(values: Sequence[int]) -> str:
        return " ".join(
            f"{LEFT + at * x_step:.1f},{axis_y - axis_y * min(value, top) / top:.1f}" for at, value in enumerate(values)
        )

    def area(values: Sequence[int], colour: str) -> str:
        ends = f"{LEFT + (len(sampled) - 1) * x_step:.1f},{axis_y} {LEFT},{axis_y}"
        return f'<polygon points="{line(values)} {ends}" fill="{colour}"/>'

    days = (sampled[-1].at - sampled[0].at) / 86_400
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{area([m.used for m in sampled], "#56b4e9")}'
        f"{area([m.borrowed for m in sampled], '#0072b2')}"
        f'<polyline points="{line([m.waiting for m in sampled])}" fill="none" stroke="#d55e00"/>'
        f'<line class="axis" x1="{LEFT}" y1="{axis_y}" x2="{WIDTH}" y2="{axis_y}"/>'
        f'<text x="0" y="12">{top // GPU} GPUs</text><text x="0" y="{axis_y}">0</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">0</text>'
        f'<text x="{WIDTH - 60}" y="{HEIGHT - 6}">{days:.0f} days</text></svg>'
    )


def _delay_chart(outcome: Outcome) -> str:
    by_team: dict[str, list[float]] = {name: [] for name in outcome.meter.teams}
    for job in outcome.meter.finished:
        by_team[job.team].append(job.delay / HOUR)
    percentiles = {
        name: [percentile(d, fraction) for fraction in (0.5, 0.95, 0.99)] for name, d in by_team.items() if d
    }
    maximum = max((values[-1] for values in percentiles.values()), default=0) or 1
    lines = []
    for at, (name, values) in enumerate(sorted(percentiles.items())):
        y = 8 + 20 * at
        lines.append(f'<text x="0" y="{y + 11}">{escape(name)}</text>')
        for value, opacity in reversed(list(zip(values, (1.0, 0.6, 0.3), strict=True))):
            width = (WIDTH - 320) * value / maximum
            lines.append(
                f'<rect x="220" y="{y}" width="{width:.1f}" height="13" fill="#009e73" fill-opacity="{opacity}"/>'
            )
        label = " / ".join(f"{value:.2f}" for value in values)
        lines.append(f'<text x="{226 + (WIDTH - 320) * values[-1] / maximum:.1f}" y="{y + 11}">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {20 * len(percentiles) + 14}" role="img">{"".join(lines)}</svg>'
