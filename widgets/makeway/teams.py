"""Show teams' usage as text and as HTML: quotas, present offers, and both sides of a reclaim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from makeway_api.bars import Bar, bar, scale
from makeway_api.durations import duration
from makeway_api.errors import MakewayError
from makeway_api.models import Job, Offer, OfferTable, Session, State, TeamUsage, Usage
from makeway_api.quantities import gpus, listed, number
from markupsafe import Markup

from . import bars
from .connection import client, explain
from .follow import preempted_for
from .looks import styled
from .view import jobs_rows
from .words import clock, table

HEAD = ("TEAM", "RESERVED", "LIMIT", "USED", "MINE", "BORROWED", "LENT", "FREE", "WAITING")
VIRTUAL = "These GPUs are virtual: this machine has none, and jobs run without one."
NO_TEAM = "You are in no team, so no GPUs are reserved for you; ask an administrator to add you to one."
_MOST_JOBS = 20
_LINE = Markup("<div>{}</div>")


@dataclass(frozen=True)
class Gpus:
    """The answer of `%gpus`."""

    table: OfferTable

    def __repr__(self) -> str:
        teams = self.table.usage
        if not teams:
            return NO_TEAM
        text = table(HEAD, (row(team) for team in teams), right=frozenset(range(1, len(HEAD))))
        notes = [*borrowing(teams), now_line(self.table), *([VIRTUAL] if self.table.virtual else [])]
        return "\n".join([*([self.table.problem] if self.table.problem else []), text, *notes])

    def _repr_html_(self) -> str:
        teams = self.table.usage
        if not teams:
            return str(styled(_LINE.format(NO_TEAM)))
        notes = [_LINE.format(line) for line in borrowing(teams)]
        now = Markup('<div class="mw-title">{}</div>').format(now_line(self.table))
        badge, problem = virtual_badge(self.table.virtual), _problem(self.table.problem)
        return str(styled(problem, badge, usage_table(teams), bars.legend(), *notes, now))


@dataclass(frozen=True)
class Picture:
    """Everything that the live widget shows, at one moment."""

    usage: Usage | None = None
    teams: tuple[str, ...] = ()
    me: str = ""
    mine: tuple[Job, ...] = ()
    waiting: tuple[Job, ...] = ()
    sessions: tuple[Session, ...] = ()
    problem: str = ""
    live: bool = False
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """when it last changed"""


def gpus_now() -> Gpus:
    """Return my teams' usage and what I can have now."""
    try:
        return Gpus(client().offers(kind="job"))
    except MakewayError as error:
        raise explain(error) from None


def row(team: TeamUsage) -> tuple[str, ...]:
    """Return one team as text, in the order of HEAD."""
    limit = "none" if team.limit is None else number(team.limit)
    numbers = (team.used, team.mine, team.borrowed, team.lent, team.free, team.waiting)
    return (team.team, number(team.reserved), limit, *(number(n) for n in numbers))


def borrowing(teams: Iterable[TeamUsage]) -> list[str]:
    """Return a sentence for each team that borrows, and for each that lends."""
    lines, known = [], list(teams)
    titles = {team.team: team.title or team.team for team in known}
    for team in known:
        name = titles[team.team]
        if team.borrowed_from:
            borrowed = listed(f"{gpus(x.gpus)} from {titles.get(x.team, x.team)}" for x in team.borrowed_from)
            lines.append(f"{name} borrows {borrowed}.")
        if team.lent_to:
            lent = listed(f"{gpus(x.gpus)} to {titles.get(x.team, x.team)}" for x in team.lent_to)
            lines.append(f"{name} lends {lent}; {name}'s jobs within its reservation get them back.")
    return lines


def now_line(offers: OfferTable) -> str:
    """Return one line with what a job of mine could have now, by team."""
    teams = offers.teams or sorted({o.team for o in offers.offers if o.team})
    titles = {team.team: team.title for team in offers.usage if team.title}
    parts = [(titles.get(team, team), _for_team([o for o in offers.offers if o.team == team])) for team in teams]
    shown = [f"{title}: {part}" if len(teams) > 1 else part for title, part in parts if part]
    return f"Now: {'; '.join(shown)}." if shown else "Now: no profile is open to you."


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
        parts.append(f"{offer.profile} {within}" + (f" (jobs on {gpus(taken)} make way)" if taken else ""))
    if waits := by_code.get("waits"):
        parts.append(f"{listed(o.profile for o in waits)} would wait")
    if refused := by_code.get("refused"):
        parts.append(f"{listed(o.profile for o in refused)} {'is' if len(refused) == 1 else 'are'} refused")
    return ", ".join(parts)


# -- HTML --------------------------------------------------------------------------------------------------------


def virtual_badge(virtual: bool) -> Markup:
    """Return the badge that marks virtual GPUs wherever they appear."""
    text = Markup('<span class="mw-chip mw-virtual" title="{}">virtual GPUs</span>')
    return text.format(VIRTUAL) if virtual else Markup("")


def usage_table(teams: Sequence[TeamUsage], total: float | None = None) -> Markup:
    """Return a table with a bar and the numbers of each team, all bars on one scale."""
    size = total if total is not None else max((t.limit or t.used or t.reserved for t in teams), default=0)
    drawn = [bar(team, size) for team in teams]
    per_gpu = scale(drawn, bars.WIDTH)
    heads = Markup("").join(Markup('<th class="mw-r">{}</th>').format(head.capitalize()) for head in HEAD[1:])
    body = Markup("").join(_team_row(each, per_gpu) for each in drawn)
    return Markup("<table><thead><tr><th>Team</th><th></th>{}</tr></thead><tbody>{}</tbody></table>").format(
        heads, body
    )


def _team_row(drawn: Bar, per_gpu: float) -> Markup:
    team = drawn.team
    cells = Markup("").join(Markup('<td class="mw-r">{}</td>').format(text) for text in row(team)[1:])
    name = Markup("<b>{}</b>").format(team.title or team.team)
    if team.title not in ("", team.team):
        name += Markup(' <span class="mw-soft">{}</span>').format(team.team)
    return Markup("<tr><td>{}</td><td>{}</td>{}</tr>").format(name, bars.draw(drawn, per_gpu), cells)


def banners(picture: Picture) -> Markup:
    """Return both sides of a reclaim (row N14): which team takes my GPUs and by when, and which GPUs come to me."""
    lines = []
    for job in picture.mine:
        name = job.name or job.id
        if job.state is State.CHECKPOINTING:
            lines.append(
                ("", f"Your job {name} makes way {preempted_for(job)}. It resumes by itself when GPUs are free.")
            )
        elif job.state is State.PENDING and job.reason and job.reason.code == "reclaiming":
            lines.append(("mw-coming", f"GPUs are on their way to your job {name}: {job.reason.message}"))
    for session in picture.sessions:
        if session.notice and not session.state.ended:
            team = f" for {session.notice.by_team}" if session.notice.by_team else ""
            until = clock(session.notice.deadline)
            lines.append(("mw-away", f"This notebook has to make way{team}: save your work before {until}."))
    banner = Markup('<div class="mw-banner {}" role="status">{}</div>')
    return Markup("").join(banner.format(kind, text) for kind, text in lines)


def live(picture: Picture) -> Markup:
    """Return the live widget's whole content: it depends on the picture alone, and is the same until that changes."""
    usage = picture.usage
    problem = _problem(picture.problem or (usage.problem if usage else None))
    if usage is None:
        return styled(problem or Markup('<div class="mw-soft">Connecting to the quota service …</div>'))
    mine = [t for t in usage.teams if t.team in picture.teams]
    rest = [t for t in usage.teams if t.team not in picture.teams]
    cluster = f"{number(usage.used)} of {gpus(usage.total)} in use, {number(usage.free)} idle"
    mode = "Live" if picture.live else "Updated every few seconds"
    return styled(
        problem,
        banners(picture),
        Markup('<div><b>GPUs</b> <span class="mw-soft">{}</span> {}</div>').format(
            cluster, virtual_badge(usage.virtual)
        ),
        usage_table([*mine, *rest], usage.total) if usage.teams else _LINE.format(NO_TEAM),
        bars.legend() if usage.teams else Markup(""),
        *(_LINE.format(line) for line in borrowing(mine)),
        _section("My jobs", picture.mine, "No job is waiting or running.", owner=False),
        _section("Queue", picture.waiting, "No job is waiting.", owner=True),
        Markup('<div class="mw-soft">{}, last change {}</div>').format(mode, clock(picture.at)),
    )


def _problem(sentence: str | None) -> Markup:
    return Markup('<div class="mw-banner mw-away">{}</div>').format(sentence) if sentence else Markup("")


def _section(title: str, jobs: Sequence[Job], none: str, owner: bool) -> Markup:
    soft = Markup('<div class="mw-soft">{}</div>')
    body = jobs_rows(jobs[:_MOST_JOBS], None, owner) if jobs else soft.format(none)
    hidden = len(jobs) - _MOST_JOBS
    more = soft.format(f"… and {hidden} more") if hidden > 0 else Markup("")
    return Markup('<div class="mw-title">{}</div>').format(title) + body + more
