"""Render the GPU picker of the spawn page: every offer of the user, with its reason.

An autoescaped template for both spawners: names of users, teams and jobs are user input. The first state is rendered
here and picker.js keeps it live; without scripts the form works the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from makeway_api.bars import KINDS, WHEN_NEEDED, Bar, bar, scale
from makeway_api.durations import duration
from makeway_api.models import Offer, OfferTable, Profile, TeamUsage
from makeway_api.quantities import gpus, memory, number

from .options import FRACTIONAL, Choice, preemptible_helps

_NO_GPU = "A notebook without a GPU."


@dataclass(frozen=True, slots=True)
class Row:
    """One profile in one team. `final`: live numbers cannot change it."""

    queue: str
    team: str | None
    title: str
    code: str
    badge: str
    message: str
    preemptible_helps: bool = False
    checked: bool = False
    preemptible: bool = False
    final: bool = False

    @property
    def details(self) -> str:
        """The message, unless the badge says the same."""
        return "" if self.message.rstrip(".") == self.badge else self.message

    @property
    def disabled(self) -> bool:
        """Whether nothing can be started here now, not even a preemptible session."""
        return self.code == "refused" and not self.preemptible_helps


@dataclass(frozen=True, slots=True)
class Card:
    """One profile with a row for each team that may use it."""

    profile: Profile
    specification: str
    rows: tuple[Row, ...]
    image: str = ""
    """the name of the image that is selected"""


@dataclass(frozen=True, slots=True)
class DrawnBar:
    """A team's bar in percent of the longest one: (style, x, width) of every part, the mark, and where it ends."""

    bar: Bar
    parts: tuple[tuple[str, float, float], ...]
    mark: float | None
    end: float


@dataclass(frozen=True, slots=True)
class Picker:
    """The picker of one user."""

    user: str
    hub_url: str
    service_path: str
    admin: bool = False
    """whether the user, or who starts a server for them, can change teams"""

    def render(self, table: OfferTable, last: Choice | None, link: Mapping[str, str]) -> str:
        """Return the form; preselected is the link's choice, else the last one, else the first that is ready."""
        chosen, note = _preselect(table, last, link)
        cards = [_card(profile, table, chosen) for profile in table.profiles]
        return self._render(
            cards=[card for card in cards if card.rows],
            bars=drawn([usage for usage in table.usage if usage.team in table.teams]),
            kinds=KINDS,
            teams=table.teams,
            virtual=table.virtual,
            problem=table.problem,
            note=note,
            live=self._live(table.ticket),
        )

    def without_service(self, message: str, profiles: Mapping[str, str]) -> str:
        """Return the form while the service does not answer: profiles without GPUs, by name and title."""
        cards = [
            Card(
                Profile(name=name, title=name.upper() if title == name else title, gpus=0, description=_NO_GPU),
                "no GPU",
                (Row(f"/{name}", None, "No team needed", "ready_now", "Ready now", "Needs no GPU.", checked=i == 0),),
            )
            for i, (name, title) in enumerate(profiles.items())
        ]
        return self._render(cards=cards, bars=[], teams=None, virtual=False, note=None, live=None, unavailable=message)

    def _live(self, ticket: str | None) -> str | None:
        return f"{self.service_path.rstrip('/')}/api/v1/offers/live?ticket={quote(ticket)}" if ticket else None

    def _render(self, **values: Any) -> str:
        template = _environment().get_template("picker.html")
        hub = self.hub_url.rstrip("/")
        known = {"user": self.user, "admin": self.admin, "hub": hub, "when_needed": WHEN_NEEDED}
        return template.render(static=f"{hub}/makeway-static", **known, **values)


@cache
def _environment() -> Environment:
    return Environment(loader=PackageLoader("makeway_spawner"), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def badge(offer: Offer) -> str:
    """Return an offer in two or three words, as picker.js does."""
    if offer.code == "ready_now":
        return "Ready now"
    if offer.code == "ready_after_reclaim":
        return "Ready soon" if offer.seconds is None else f"Ready in ≤ {duration(offer.seconds)}"
    if offer.code == "ready_after_launch":
        return "Starts a machine" if offer.seconds is None else f"Ready in about {duration(offer.seconds)}"
    if offer.code == "waits":
        return "Would wait"
    return "Over quota" if preemptible_helps(offer) else "Not available"


def drawn(teams: list[TeamUsage]) -> list[DrawnBar]:
    """Return the bars of all teams on one scale, as picker.js draws them again."""
    bars = [bar(usage) for usage in teams]
    unit = scale(bars, 100)
    return [
        DrawnBar(
            item,
            tuple((part.kind.css, round(part.start * unit, 2), round(part.gpus * unit, 2)) for part in item.parts),
            round(item.reserved * unit, 2) if item.reserved else None,
            round(item.end * unit, 2),
        )
        for item in bars
    ]


def _card(profile: Profile, table: OfferTable, chosen: Choice | None) -> Card:
    rows = tuple(_row(offer, table, chosen) for offer in table.offers if offer.profile == profile.name)
    specification = _specification(profile)
    return Card(profile, "" if specification == profile.title else specification, rows, _image(profile, chosen))


def _image(profile: Profile, chosen: Choice | None) -> str:
    """Return the name of the image of the last choice while it is offered, else of the default one."""
    if chosen is not None and chosen.profile == profile.name:
        for image in profile.images:
            if chosen.image in (image.name, image.image):
                return image.name
    return next((image.name for image in profile.images if image.default), "")


def _row(offer: Offer, table: OfferTable, chosen: Choice | None) -> Row:
    queue = f"{offer.team or ''}/{offer.profile}"
    mine = chosen is not None and chosen.queue == queue
    return Row(
        queue=queue,
        team=offer.team,
        title=_team_title(table, offer.team) or "No team needed",
        code=offer.code,
        badge=badge(offer),
        message=offer.message,
        preemptible_helps=preemptible_helps(offer),
        checked=mine,
        preemptible=mine and chosen is not None and chosen.preemptible,
        final=offer.reason is not None and offer.reason.code == FRACTIONAL,
    )


def _specification(profile: Profile) -> str:
    parts = [gpus(profile.gpus) if profile.gpus else "no GPU"]
    if profile.cpu:
        parts.append(f"{number(profile.cpu)} CPU")
    if profile.memory:
        parts.append(memory(profile.memory))
    return " · ".join(parts)


def _team_title(table: OfferTable, team: str | None) -> str:
    return next((usage.title for usage in table.usage if usage.team == team and usage.title), team or "")


def _titles(table: OfferTable, profile: str, team: str | None) -> str:
    """Return profile and team by their titles: `2 GPUs for R&D`; names where the user is offered neither."""
    title = next((p.title for p in table.profiles if p.name == profile and p.title), profile[:63])
    return title + (f" for {_team_title(table, team)[:63]}" if team else "")


def _preselect(
    table: OfferTable, last: Choice | None, link: Mapping[str, str]
) -> tuple[Choice | None, tuple[str, str] | None]:
    """Return the row that is chosen when the page opens, and a note about it (kind of alert, sentence)."""
    if link.get("profile"):
        return _from_link(table, link["profile"], link.get("team") or None)
    if last is None:
        return _first_ready(table), None
    offer = next((o for o in table.offers if (o.profile, o.team) == (last.profile, last.team)), None)
    if offer is not None and (offer.code != "refused" or (last.preemptible and preemptible_helps(offer))):
        return last, None
    reason = offer.message if offer is not None else "It is no longer offered to you."
    note = f"Your last choice was {_titles(table, last.profile, last.team)}. {reason}"
    return _first_ready(table), ("info", note)


def _from_link(table: OfferTable, profile: str, team: str | None) -> tuple[Choice | None, tuple[str, str] | None]:
    wanted = [offer for offer in table.offers if offer.profile == profile and team in (None, offer.team)]
    available = [offer for offer in wanted if offer.code != "refused"]
    if available:
        return Choice(available[0].profile, available[0].team), None
    if wanted:
        return _first_ready(table), ("warning", wanted[0].message)
    note = f"The link asks for {_titles(table, profile, team)}, which is not available to {table.user}."
    return _first_ready(table), ("danger", note)


def _first_ready(table: OfferTable) -> Choice | None:
    for code in ("ready_now", "ready_after_reclaim", "ready_after_launch", "waits"):
        for offer in table.offers:
            if offer.code == code:
                return Choice(offer.profile, offer.team)
    return None
