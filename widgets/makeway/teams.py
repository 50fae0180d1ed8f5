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
from makeway_api.tables import Column
from markupsafe import Markup

from . import bars
from .blocks import Banner, Block, Bold, Cell, Chip, Drawing, Inline, Soft, Table, bundle, html, line, tabulate, text_of
from .connection import client, explain
from .follow import preempted_for
from .view import jobs_block
from .words import clock, full_clock

VIRTUAL = "These GPUs are virtual: this machine has none, and jobs run without one."
NO_TEAM = "You are in no team, so no GPUs are reserved for you; ask an administrator to add you to one."
MACHINE_REASONS = frozenset({"waiting_for_node", "no_machine"})
"""Codes of the reasons of offers that say what machines would do"""
_MAX_JOBS = 20


@dataclass(frozen=True)
class Gpus:
    """The answer of `%gpus`."""

    table: OfferTable

    def __repr__(self) -> str:
        teams = self.table.usage
        if not teams:
            return NO_TEAM
        text = text_of([usage_table(teams)])
        now = [now_line(self.table), *machine_lines(self.table)]
        notes = [*borrowing(teams), *now, *([VIRTUAL] if self.table.virtual else [])]
        return "\n".join([*([self.table.problem] if self.table.problem else []), text, *notes])

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return bundle(gpus_blocks(self.table), repr(self))

    def _repr_html_(self) -> str:
        return str(html(gpus_blocks(self.table)))


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
    at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)
    """when it last changed"""
    known_at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)
    """when the service said so last"""

    def title(self, team: str | None) -> str:
        """Return the title of a team, or its id where it is not known."""
        titles = {known.team: known.title for known in self.usage.teams} if self.usage else {}
        return titles.get(team or "") or team or ""


def gpus_now() -> Gpus:
    """Return my teams' usage and what I can have now."""
    try:
        return Gpus(client().offers(kind="job"))
    except MakewayError as error:
        raise explain(error) from None


def borrowing(teams: Iterable[TeamUsage]) -> list[str]:
    """Return a sentence for each team that borrows, and for each that lends."""
    lines, known = [], list(teams)
    titles = {team.team: team.title or team.team for team in known}
    for team in known:
        name = titles[team.team]
        if team.borrowed_from:
            borrowed = listed(
                f"{gpus(x.gpus)} from {x.title or titles.get(x.team, x.team)}" for x in team.borrowed_from
            )
            lines.append(f"{name} borrows {borrowed}.")
        if team.lent_to:
            lent = listed(f"{gpus(x.gpus)} to {x.title or titles.get(x.team, x.team)}" for x in team.lent_to)
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
    for offer in by_code.get("ready_after_launch", []):
        at = f"in about {duration(offer.seconds)}" if offer.seconds is not None else "once a machine is ready"
        parts.append(f"{offer.profile} {at}" + (" (on a machine)" if offer.seconds is not None else ""))
    if waits := by_code.get("waits"):
        parts.append(f"{listed(o.profile for o in waits)} would wait")
    if refused := by_code.get("refused"):
        parts.append(f"{listed(o.profile for o in refused)} {'is' if len(refused) == 1 else 'are'} refused")
    return ", ".join(parts)


def machine_lines(offers: OfferTable) -> list[str]:
    """Return what is told of machines of pools that grow: a line for each team and message, with its profiles."""
    told: dict[tuple[str, str], list[str]] = {}
    for offer in offers.offers:
        if offer.reason is not None and offer.reason.code in MACHINE_REASONS:
            told.setdefault((offer.team_title or offer.team or "", offer.message), []).append(offer.profile)
    several = len({team for team, _ in told}) > 1
    return [f"{listed(names)}{f' for {team}' if several else ''}: {text}" for (team, text), names in told.items()]


# -- outputs -------------------------------------------------------------------------------------------------------


def virtual_badge(virtual: bool) -> list[Inline]:
    """Return the badge that marks virtual GPUs wherever they appear."""
    return [Chip("virtual GPUs", dashed=True)] if virtual else []


def columns(per_gpu: float) -> list[Column[Bar, Cell]]:
    """Return the columns of a table of teams; bars of `per_gpu` for each GPU are drawn where it is not only text."""
    return [
        Column("Team", lambda bar: _name(bar.team)),
        Column("Bar", lambda bar: Drawing(bars.draw(bar, per_gpu))),
        Column("Reserved", lambda bar: number(bar.team.reserved), right=True),
        Column("Limit", lambda bar: "none" if bar.team.limit is None else number(bar.team.limit), right=True),
        Column("Used", lambda bar: number(bar.team.used), right=True),
        Column("Mine", lambda bar: number(bar.team.mine), right=True),
        Column("Borrowed", lambda bar: number(bar.team.borrowed), right=True),
        Column("Lent", lambda bar: number(bar.team.lent), right=True),
        Column("Free", lambda bar: number(bar.team.free), right=True),
        Column("Waiting", lambda bar: number(bar.team.waiting), right=True),
    ]


def usage_table(teams: Sequence[TeamUsage], total: float | None = None) -> Table:
    """Return a table with a bar and the numbers of each team, all bars on one scale."""
    size = total if total is not None else max((t.limit or t.used or t.reserved for t in teams), default=0)
    drawn = [bar(team, size) for team in teams]
    return tabulate(columns(scale(drawn, bars.WIDTH)), drawn)


def _name(team: TeamUsage) -> Cell:
    """Return the title of a team, and the id that `--team` takes."""
    title = team.title or team.team
    return Bold(title) if title == team.team else (Bold(title), Soft(f"({team.team})"))


def gpus_blocks(offers: OfferTable) -> list[Block]:
    """Return my teams' usage and what I can have now, as one output."""
    if not offers.usage:
        return [line(NO_TEAM)]
    problem: list[Block] = [Banner(offers.problem, "bad", status=False)] if offers.problem else []
    badge = virtual_badge(offers.virtual)
    return [
        *problem,
        *([line(*badge)] if badge else []),
        usage_table(offers.usage),
        Drawing(bars.legend()),
        *(line(text) for text in borrowing(offers.usage)),
        line(Bold(now_line(offers)), space=6),
        *(line(text) for text in machine_lines(offers)),
        line(Soft(f"State of {full_clock(offers.at)}.")),
    ]


def banner_blocks(picture: Picture) -> list[Block]:
    """Return both sides of a reclaim (row N14): which team takes my GPUs and by when, and which GPUs come to me."""
    result: list[Block] = []
    for job in picture.mine:
        name = job.name or job.id
        if job.state is State.CHECKPOINTING:
            text = f"Your job {name} makes way {preempted_for(job)}. It resumes by itself when GPUs are free."
            result.append(Banner(text))
        elif job.state is State.PENDING and job.reason and job.reason.code == "reclaiming":
            result.append(Banner(f"GPUs are on their way to your job {name}: {job.reason.message}", "good"))
    for session in picture.sessions:
        if session.notice and not session.state.ended:
            by = picture.title(session.notice.by_team)
            team = f" for {by}" if by else ""
            until = clock(session.notice.deadline)
            result.append(Banner(f"This notebook has to make way{team}: save your work before {until}.", "bad"))
    return result


def banners(picture: Picture) -> Markup:
    """Return the banners in HTML; empty without any."""
    blocks = banner_blocks(picture)
    return html(blocks) if blocks else Markup("")


def live_parts(picture: Picture, paused: str = "") -> list[list[Block]]:
    """Return the parts of the live output; each is the same until what it says changes.

    `paused` is the sentence that says why nothing newer is shown.
    """
    usage = picture.usage
    problem = picture.problem or (usage.problem if usage else None) or ""
    if picture.problem and usage is not None:
        problem = f"{picture.problem} State of {full_clock(picture.known_at)}."
    told: list[Block] = [Banner(problem, "bad")] if problem else []
    badge = virtual_badge(usage.virtual) if usage else []
    title: list[Block] = [*told, *banner_blocks(picture), line(Bold("GPUs"), *badge)]
    if usage is None:
        unknown = "The state of the GPUs is not known: the quota service has not answered yet."
        return [title, [line(Soft(unknown))], [], [], [line(*_knowledge(picture, paused))]]
    mine = [t for t in usage.teams if t.team in picture.teams]
    rest = [t for t in usage.teams if t.team not in picture.teams]
    cluster = line(Soft(f"{number(usage.used)} of {gpus(usage.total)} in use, {number(usage.free)} idle"))
    table: list[Block] = [usage_table([*mine, *rest], usage.total), Drawing(bars.legend())]
    lends: list[Block] = [line(text) for text in borrowing(mine)]
    return [
        title,
        [cluster, *(table if usage.teams else [line(NO_TEAM)]), *lends],
        _section("My jobs", picture.mine, "No job is waiting or running.", owner=False),
        _section("Queue", picture.waiting, "No job is waiting.", owner=True),
        [line(*_knowledge(picture, paused))],
    ]


def live(picture: Picture) -> Markup:
    """Return the whole live output in HTML: it depends on the picture alone, and is the same until that changes."""
    return Markup("").join(html(part) for part in live_parts(picture))


def _knowledge(picture: Picture, paused: str) -> tuple[Inline, ...]:
    if picture.usage is None:
        return ()
    if paused:
        return (Bold(paused), f"State of {full_clock(picture.known_at)}.")
    return (Soft(f"Last change seen here: {full_clock(picture.at)}."),)


def _section(title: str, jobs: Sequence[Job], none: str, owner: bool) -> list[Block]:
    body: Block = jobs_block(jobs[:_MAX_JOBS], None, owner) if jobs else line(Soft(none))
    hidden = len(jobs) - _MAX_JOBS
    more: list[Block] = [line(Soft(f"… and {hidden} more"))] if hidden > 0 else []
    return [line(Bold(title), space=6), body, *more]
