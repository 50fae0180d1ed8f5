"""The GPU picker on the spawn page: what can I have now, and from whom.

Our own template, autoescaped, for both spawners: names of people, teams and jobs come from users. The first state is
rendered here, a small script keeps it live; without the script the form works the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from makeway_api.models import Offer, OfferTable, Profile, TeamUsage

from .options import Choice, helped


@dataclass(frozen=True, slots=True)
class Row:
    """One profile in one team."""

    queue: str
    team: str | None
    title: str
    code: str
    badge: str
    message: str
    helped: bool
    checked: bool
    preemptible: bool

    @property
    def told(self) -> str:
        """Say what the badge does not say already."""
        return "" if self.message.rstrip(".") == self.badge else self.message

    @property
    def disabled(self) -> bool:
        """Tell whether nothing can be started here now, not even a preemptible session."""
        return self.code == "refused" and not self.helped


@dataclass(frozen=True, slots=True)
class Card:
    """One profile with a row for each team that may use it."""

    profile: Profile
    specification: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A team's usage as parts of 100: sessions, jobs in quota, borrowed, lent; then the tick at the reservation."""

    usage: TeamUsage
    parts: tuple[tuple[str, float, float], ...]
    tick: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Picker:
    """Draws the picker for one person."""

    user: str
    hub_url: str
    service_path: str

    def render(self, table: OfferTable, remembered: Choice | None, link: Mapping[str, str]) -> str:
        """Draw the offers; a link's choice is marked first, then the last one, then the first that is ready."""
        marked, note = _marked(table, remembered, link)
        cards = [_card(profile, table, marked) for profile in table.profiles]
        return self._draw(
            cards=[card for card in cards if card.rows],
            bars=[bar(usage) for usage in table.usage if usage.team in table.teams],
            teams=table.teams,
            virtual=table.virtual,
            note=note,
            live=self._live(table.ticket),
        )

    def without_service(self, message: str, profiles: list[str]) -> str:
        """Draw what is possible while the service does not answer: notebooks without GPUs."""
        rows = [
            Row(f"/{name}", None, "No team needed", "ready_now", "Ready now", "Needs no GPU.", False, i == 0, False)
            for i, name in enumerate(profiles)
        ]
        about = "A notebook without a GPU."
        cards = [
            Card(Profile(name=name, title=name.upper(), gpus=0, description=about), "no GPU", (row,))
            for name, row in zip(profiles, rows, strict=True)
        ]
        return self._draw(cards=cards, bars=[], teams=None, virtual=False, note=None, live=None, away=message)

    def _live(self, ticket: str | None) -> str | None:
        return f"{self.service_path.rstrip('/')}/api/v1/offers/live?ticket={quote(ticket)}" if ticket else None

    def _draw(self, **values: Any) -> str:
        template = _environment().get_template("picker.html")
        return template.render(
            user=self.user, static=f"{self.hub_url.rstrip('/')}/makeway-static", panel=self.service_path, **values
        )


@cache
def _environment() -> Environment:
    return Environment(loader=PackageLoader("makeway_spawner"), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def badge(offer: Offer) -> str:
    """Say an offer in two or three words; picker.js says the same."""
    if offer.code == "ready_now":
        return "Ready now"
    if offer.code == "ready_after_reclaim":
        return "Ready soon" if offer.seconds is None else f"Ready in ≤ {offer.seconds} s"
    if offer.code == "waits":
        return "Would wait"
    return "Beyond quota" if helped(offer) else "Not available"


def bar(usage: TeamUsage) -> Bar:
    """Draw a team's usage: the bar ends at the limit (or at what it has and uses, without one)."""
    end = usage.limit if usage.limit is not None else max(usage.reserved, usage.used)
    scale = 100 / end if end else 0.0
    parts, x = [], 0.0
    for name, gpus in (("guaranteed", usage.guaranteed), ("in-quota", usage.in_quota), ("borrowed", usage.borrowed)):
        width = min(gpus * scale, 100 - x)
        parts.append((name, round(x, 2), round(width, 2)))
        x += width
    tick = round(usage.reserved * scale, 2) if usage.reserved and usage.reserved < end else None
    limit = "no limit" if usage.limit is None else f"limit {usage.limit:g}"
    text = f"{usage.used:g} in use · {usage.reserved:g} reserved · {limit}"
    return Bar(usage, tuple(parts), tick, text)


def _card(profile: Profile, table: OfferTable, marked: Choice | None) -> Card:
    titles = {usage.team: usage.title or usage.team for usage in table.usage}
    rows = []
    for offer in table.offers:
        if offer.profile != profile.name:
            continue
        queue = f"{offer.team or ''}/{profile.name}"
        mine = marked is not None and marked.queue == queue
        rows.append(
            Row(
                queue=queue,
                team=offer.team,
                title=titles.get(offer.team, offer.team) if offer.team else "No team needed",
                code=offer.code,
                badge=badge(offer),
                message=offer.message,
                helped=helped(offer),
                checked=mine,
                preemptible=mine and marked is not None and marked.preemptible,
            )
        )
    specification = _specification(profile)
    return Card(profile, "" if specification == profile.title else specification, tuple(rows))


def _specification(profile: Profile) -> str:
    gpus = "no GPU" if not profile.gpus else f"{profile.gpus:g} GPU" + ("" if profile.gpus <= 1 else "s")
    parts = [gpus]
    if profile.cpu:
        parts.append(f"{profile.cpu:g} CPU")
    if profile.memory:
        parts.append(f"{profile.memory / 1024:.3g} GiB")
    return " · ".join(parts)


def _marked(
    table: OfferTable, remembered: Choice | None, link: Mapping[str, str]
) -> tuple[Choice | None, tuple[str, str] | None]:
    """Choose what is marked when the page opens, and what has to be said about it (kind, sentence)."""
    if link.get("profile"):
        wanted = [o for o in table.offers if o.profile == link["profile"] and link.get("team") in (None, "", o.team)]
        open_now = [o for o in wanted if o.code != "refused"]
        if open_now:
            return Choice(open_now[0].profile, open_now[0].team), None
        if not wanted:
            asked = link["profile"][:63] + (f" in {link['team'][:63]}" if link.get("team") else "")
            text = f"The link asks for the profile {asked}, which is not available to {table.user}."
            return _first_ready(table), ("danger", text)
        return _first_ready(table), ("warning", wanted[0].message)
    if remembered is not None:
        offer = next((o for o in table.offers if (o.profile, o.team) == (remembered.profile, remembered.team)), None)
        if offer is not None and (offer.code != "refused" or (remembered.preemptible and helped(offer))):
            return remembered, None
        where = f" in {remembered.team}" if remembered.team else ""
        why = offer.message if offer is not None else "It is no longer offered to you."
        return _first_ready(table), ("info", f"Your last choice was {remembered.profile}{where}. {why}")
    return _first_ready(table), None


def _first_ready(table: OfferTable) -> Choice | None:
    for code in ("ready_now", "ready_after_reclaim", "waits"):
        for offer in table.offers:
            if offer.code == code:
                return Choice(offer.profile, offer.team)
    return None
