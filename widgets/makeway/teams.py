"""Who uses what: my teams' quotas, what I can have now, and what is being reclaimed, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

from makeway_api.errors import MakewayError
from makeway_api.models import Job, Offer, OfferTable, Session, State, TeamUsage, Usage

from . import bars
from .connection import client, explain
from .follow import why_leaving
from .looks import dressed
from .view import jobs_rows
from .words import clock, duration, gpus, listed, number, table

HEAD = ("TEAM", "RESERVED", "LIMIT", "USED", "MINE", "BORROWED", "LENT", "FREE", "WAITING")
VIRTUAL = "These GPUs are virtual: this machine has none, and work runs without one."


@dataclass(frozen=True)
class Gpus:
    """The answer to `%gpus`."""

    table: OfferTable

    def __repr__(self) -> str:
        teams = self.table.usage
        if not teams:
            return NO_TEAM
        text = table(HEAD, (row(t) for t in teams), right=frozenset(range(1, len(HEAD))))
        notes = [*borrowing(teams), now_line(self.table), *([VIRTUAL] if self.table.virtual else [])]
        return "\n".join([text, *notes])

    def _repr_html_(self) -> str:
        teams = self.table.usage
        if not teams:
            return dressed(f"<div>{escape(NO_TEAM)}</div>")
        notes = "".join(f"<div>{escape(line)}</div>" for line in borrowing(teams))
        now = f'<div class="mw-title">{escape(now_line(self.table))}</div>'
        return dressed(f"{badge(self.table.virtual)}{usage_table(teams)}{bars.legend()}{notes}{now}")


NO_TEAM = "You are in no team, so no GPUs are reserved for you; ask an administrator to add you to one."


@dataclass(frozen=True)
class Picture:
    """Everything the live widget shows, at one moment."""

    usage: Usage | None = None
    teams: tuple[str, ...] = ()
    me: str = ""
    mine: tuple[Job, ...] = ()
    waiting: tuple[Job, ...] = ()
    sessions: tuple[Session, ...] = ()
    trouble: str = ""
    live: bool = False
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


def gpus_now() -> Gpus:
    """Ask the service."""
    try:
        return Gpus(client().offers(kind="job"))
    except MakewayError as error:
        raise explain(error) from None


def row(team: TeamUsage) -> tuple[str, ...]:
    """One team as text."""
    limit = "none" if team.limit is None else number(team.limit)
    numbers = (team.used, team.mine, team.borrowed, team.lent, team.free, team.waiting)
    return (team.team, number(team.reserved), limit, *(number(n) for n in numbers))


def borrowing(teams: Iterable[TeamUsage]) -> list[str]:
    """Who borrows from whom, a sentence each."""
    lines = []
    for team in teams:
        name = team.title or team.team
        if team.borrowed_from:
            taken = listed(f"{gpus(x.gpus)} from {x.team}" for x in team.borrowed_from)
            lines.append(f"{name} borrows {taken}.")
        if team.lent_to:
            lent = listed(f"{gpus(x.gpus)} to {x.team}" for x in team.lent_to)
            lines.append(f"{name} lends {lent}; a job within its quota gets them back.")
    return lines


def now_line(offers: OfferTable) -> str:
    """One line: what a job of mine could have now."""
    teams = offers.teams or sorted({o.team for o in offers.offers if o.team})
    parts = [_for_team([o for o in offers.offers if o.team == team]) for team in teams]
    said = [f"{team}: {part}" if len(teams) > 1 else part for team, part in zip(teams, parts, strict=True) if part]
    return f"Now: {'; '.join(said)}." if said else "Now: no profile is open to you."


def _for_team(offers: Sequence[Offer]) -> str:
    by_code: dict[str, list[Offer]] = {}
    for offer in offers:
        by_code.setdefault(offer.code, []).append(offer)
    parts = []
    if ready := by_code.get("ready_now"):
        parts.append(f"{listed(o.profile for o in ready)} at once")
    for offer in by_code.get("ready_after_reclaim", []):
        within = f"within {duration(offer.seconds)}" if offer.seconds is not None else "after a reclaim"
        taken = sum(v.gpus for v in offer.victims)
        parts.append(f"{offer.profile} {within}" + (f" ({gpus(taken)} make way)" if taken else ""))
    if waits := by_code.get("waits"):
        parts.append(f"{listed(o.profile for o in waits)} would wait")
    if refused := by_code.get("refused"):
        parts.append(f"not {listed((o.profile for o in refused), 'or')}")
    return ", ".join(parts)


# -- HTML --------------------------------------------------------------------------------------------------------


def badge(virtual: bool) -> str:
    """Virtual GPUs are marked wherever they appear."""
    return f'<span class="mw-chip mw-virtual" title="{escape(VIRTUAL)}">virtual GPUs</span>' if virtual else ""


def usage_table(teams: Sequence[TeamUsage], total: float | None = None) -> str:
    """A bar for each team and its numbers."""
    size = total if total is not None else max((t.limit or t.used or t.reserved for t in teams), default=0)
    per_gpu = bars.scale(list(teams), size)
    heads = "".join(f'<th class="mw-r">{h.capitalize()}</th>' for h in HEAD[1:])
    body = "".join(_team_row(t, per_gpu, size) for t in teams)
    return f"<table><thead><tr><th>Team</th><th></th>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _team_row(team: TeamUsage, per_gpu: float, total: float) -> str:
    cells = "".join(f'<td class="mw-r">{text}</td>' for text in row(team)[1:])
    name = f"<b>{escape(team.title or team.team)}</b>"
    if team.title not in ("", team.team):
        name += f' <span class="mw-soft">{escape(team.team)}</span>'
    return f"<tr><td>{name}</td><td>{bars.bar(team, per_gpu, total)}</td>{cells}</tr>"


def banners(picture: Picture) -> str:
    """Both sides of a reclaim (row N14): who takes my GPUs and by when, and whose GPUs are on their way to me."""
    lines = []
    for job in picture.mine:
        name = job.name or job.id
        if job.state is State.CHECKPOINTING:
            lines.append(
                ("", f"Your job {name} makes way {why_leaving(job)}. It resumes by itself when there is room.")
            )
        elif job.state is State.PENDING and job.reason and job.reason.code == "reclaiming":
            lines.append(("mw-coming", f"GPUs are on their way to your job {name}: {job.reason.message}"))
    for session in picture.sessions:
        if session.notice and not session.state.ended:
            who = f" for {session.notice.by_team}" if session.notice.by_team else ""
            lines.append(
                (
                    "mw-away",
                    f"This notebook has to make way{who}: save your work before {clock(session.notice.deadline)}.",
                )
            )
    return "".join(f'<div class="mw-banner {kind}" role="status">{escape(text)}</div>' for kind, text in lines)


def live(picture: Picture, now: datetime) -> str:
    """The widget's whole content."""
    parts = [f'<div class="mw-banner mw-away">{escape(picture.trouble)}</div>' if picture.trouble else ""]
    if picture.usage is None:
        return dressed(parts[0] or '<div class="mw-soft">Asking the quota service …</div>')
    usage = picture.usage
    mine = [t for t in usage.teams if t.team in picture.teams]
    rest = [t for t in usage.teams if t.team not in picture.teams]
    how = "Live" if picture.live else "Asked every few seconds"
    cluster = f"{number(usage.used)} of {gpus(usage.total)} in use, {number(usage.free)} idle"
    parts += [
        banners(picture),
        f'<div><b>GPUs</b> <span class="mw-soft">{cluster}</span> {badge(usage.virtual)}</div>',
        usage_table([*mine, *rest], usage.total) if usage.teams else f"<div>{escape(NO_TEAM)}</div>",
        bars.legend() if usage.teams else "",
        "".join(f"<div>{escape(line)}</div>" for line in borrowing(mine)),
        _section("My jobs", picture.mine, now, "None is waiting or running.", owner=False),
        _section("Queue", picture.waiting, now, "Nobody waits.", owner=True),
        f'<div class="mw-soft">{how}, last change {clock(picture.at)}</div>',
    ]
    return dressed("".join(parts))


def _section(title: str, jobs: Sequence[Job], now: datetime, none: str, owner: bool) -> str:
    body = jobs_rows(jobs[:20], now, owner) if jobs else f'<div class="mw-soft">{none}</div>'
    more = f'<div class="mw-soft">… and {len(jobs) - 20} more</div>' if len(jobs) > 20 else ""
    return f'<div class="mw-title">{title}</div>{body}{more}'
