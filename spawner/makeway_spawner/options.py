"""Read and check what a spawn asks for: profile, team, preemptible or not.

Called for the picker's form, for a link or a hand-written form, and for the Hub's REST API, whose options arrive as
they were sent (on JupyterHub 5 inside another `user_options`). All are checked alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from makeway_api.models import Offer, OfferTable, Profile, Reason
from makeway_api.quantities import gpus, listed

from .refusal import Refused

SLUG = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
PREEMPTIBLE_HELPS = frozenset({"not_in_quota"})
"""The reasons for which a guaranteed session is refused although a preemptible one might run."""
FRACTIONAL = "fractional_gpus"
"""The reason of an offer that this spawner can never run, whatever is free."""

OPTIONS = frozenset({"profile", "team", "preemptible", "image", "choice"})
_MAX_IMAGE = 1000
_TRUE = frozenset({"1", "on", "true", "yes"})
_FALSE = frozenset({"", "0", "off", "false", "no"})


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the picker; `team` None is for profiles without GPUs."""

    profile: str
    team: str | None = None
    preemptible: bool = False
    image: str = ""
    """the name or the reference of one of the profile's images; empty: its default one"""

    @property
    def queue(self) -> str:
        """The queue: `team/profile`, or `/profile` without a team."""
        return f"{self.team or ''}/{self.profile}"

    def options(self) -> dict[str, Any]:
        """Return the options that the Hub stores; its admin page shows the key `profile`."""
        image = {"image": self.image} if self.image else {}
        return {"profile": self.profile, "team": self.team, "preemptible": self.preemptible, **image}


def read_form(form: Mapping[str, Any]) -> Choice:
    """Read a posted form: `choice=team/profile`, or `profile` and `team`; raise Refused (400) for anything else.

    The image is `image`, or `image:PROFILE` of the chosen profile, as each card of the picker has a list of its own.
    """
    queue = _single(form, "choice")
    if queue:
        team, slash, profile = queue.rpartition("/")
        if not slash:
            raise Refused(f"The choice {queue!r} is not of the form team/profile.", code="bad_choice", status=400)
        image = _image(_single(form, f"image:{profile}") or _single(form, "image"))
        return Choice(_slug("profile", profile), _slug("team", team) if team else None, _ticked(form, queue), image)
    flag = _flag(_single(form, "preemptible"))
    return _choice(_single(form, "profile"), _single(form, "team"), flag, _single(form, "image"))


def read_options(options: Any) -> Choice:
    """Read the options of the REST API or of an earlier start; raise Refused (400) for anything else."""
    if isinstance(options, Mapping) and set(options) == {"user_options"}:
        options = options["user_options"]
    if not isinstance(options, Mapping):
        raise Refused(
            'The options of a server must be an object like {"profile": "gpu1", "team": "rnd"}.',
            code="bad_options",
            status=400,
        )
    unknown = sorted(str(key)[:40] for key in options if key not in OPTIONS)
    if unknown:
        raise Refused(
            f"Unknown option {', '.join(unknown)}: a server takes profile, team, preemptible and image.",
            code="bad_options",
            status=400,
        )
    plain = {key: value[0] if isinstance(value, list) and value else value for key, value in options.items()}
    if plain.get("choice"):
        return read_form(plain)
    return _choice(plain.get("profile"), plain.get("team"), _flag(plain.get("preemptible")), plain.get("image"))


def check(choice: Choice, table: OfferTable) -> Choice:
    """Return the choice checked against the user's offers; raise Refused with the reason and the alternatives.

    A missing team is filled in where only one is possible. Free GPUs change every second, so the service decides on
    them when the session is requested; here only what the offers refuse already is refused.
    """
    profile = next((p for p in table.profiles if p.name == choice.profile), None)
    if profile is None:
        raise Refused(_unknown_profile(choice, table), code="profile_not_available", status=403)
    _check_image(choice, profile)
    offers = [o for o in table.offers if o.profile == choice.profile]
    if choice.team is None and any(o.team is None for o in offers):
        return choice
    if choice.team is None:
        choice = replace(choice, team=_only_team(profile, offers))
    offer = next((o for o in offers if o.team == choice.team), None)
    if offer is None:
        raise Refused(_not_in_team(choice, profile, table), code="team_not_available", status=403)
    if offer.code == "refused" and not (choice.preemptible and preemptible_helps(offer)):
        raise Refused(offer.message, code=offer.reason.code if offer.reason else "refused", status=409)
    return choice


def is_unspecified(options: Any) -> bool:
    """Whether a start names no profile, as one by the Hub's admin page for a person who never chose one."""
    return options is None or options in ({}, {"user_options": {}}, {"user_options": None})


def without_choice(table: OfferTable) -> Choice:
    """Return what a start gets that says nothing: the first profile without GPUs, else the only one that there is.

    Raise Refused where neither is there, with what the user can have.
    """
    free = {profile.name for profile in table.profiles if not profile.gpus}
    offers = sorted((o for o in table.offers if o.profile in free), key=lambda offer: offer.team is not None)
    offers = offers[:1] or [offer for offer in table.offers if offer.code != "refused"]
    if len(offers) == 1:
        return Choice(offers[0].profile, offers[0].team)
    theirs = ", ".join(profile.name for profile in table.profiles)
    teams = f"{table.user} is in {listed(_team(table, team) for team in table.teams)}"
    raise Refused(
        f"This start says no profile, and there is none without GPUs that {table.user} would get: "
        + (
            f"{table.user} chooses one on the start page, or the request names one ({theirs})."
            if theirs
            else f"{teams if table.teams else f'{table.user} is in no team'}, and the policy opens no profile to them."
        ),
        code="profile_missing",
        status=400,
    )


def preemptible_helps(offer: Offer) -> bool:
    """Whether a preemptible session could run where this offer refuses a guaranteed one."""
    return offer.code == "refused" and offer.reason is not None and offer.reason.code in PREEMPTIBLE_HELPS


def fractional(title: str, amount: float) -> str:
    """Return why a session with this many GPUs cannot run on whole devices; empty where it can."""
    if float(amount).is_integer():
        return ""
    return (
        f"{title} asks for {gpus(amount)}, and notebooks on this cluster get whole GPUs only. "
        "Choose a profile with a whole number of GPUs."
    )


def refuse_fractions(table: OfferTable) -> OfferTable:
    """Return the offers with every profile refused that asks for a fraction of a GPU."""
    problems = {profile.name: fractional(profile.title or profile.name, profile.gpus) for profile in table.profiles}
    return table.model_copy(
        update={"offers": [_refused(offer, problems.get(offer.profile, "")) for offer in table.offers]}
    )


def without_images(table: OfferTable) -> OfferTable:
    """Return the offers for a platform without containers: no profile has images to choose from."""
    profiles = [profile.model_copy(update={"images": []}) for profile in table.profiles]
    return table.model_copy(update={"profiles": profiles})


def _refused(offer: Offer, message: str) -> Offer:
    if not message:
        return offer
    reason = Reason(code=FRACTIONAL, message=message)
    return offer.model_copy(
        update={"code": "refused", "message": message, "reason": reason, "seconds": None, "victims": []}
    )


def _unknown_profile(choice: Choice, table: OfferTable) -> str:
    yours = ", ".join(f"{p.title} ({p.name})" if p.title not in ("", p.name) else p.name for p in table.profiles)
    groups = f"you are in {listed(_team(table, team) for team in table.teams)}" if table.teams else "you are in no team"
    return f"The profile {choice.profile} is not available to {table.user}: {groups}. Your profiles: {yours or 'none'}."


def _check_image(choice: Choice, profile: Profile) -> None:
    known = {name for image in profile.images for name in (image.name, image.image)}
    if choice.image in {"", profile.image, *known}:
        return
    offered = listed(f"{image.title} ({image.name})" for image in profile.images)
    raise Refused(
        f"{profile.title or profile.name} offers no image {choice.image!r}"
        + (f", but {offered}." if offered else ": it offers no choice of images."),
        code="image_not_available",
        status=409,
    )


def _not_in_team(choice: Choice, profile: Profile, table: OfferTable) -> str:
    if choice.team not in table.teams:
        teams = ", ".join(table.teams) or "none"
        return f"{table.user} is not a member of the team {choice.team}. Teams to choose from: {teams}."
    title = profile.title or profile.name
    return f"{_team(table, choice.team)} cannot use {title}: the policy does not open this profile to the team."


def _team(table: OfferTable, name: str | None) -> str:
    """Return the title of a team, else its name."""
    return next((usage.title for usage in table.usage if usage.team == name and usage.title), name or "")


def _only_team(profile: Profile, offers: list[Offer]) -> str:
    teams = [o.team for o in offers if o.team is not None]
    if len(teams) == 1:
        return teams[0]
    raise Refused(
        f"Choose a team for {profile.title or profile.name}: {', '.join(teams) or 'none is open to you'}.",
        code="team_missing",
        status=400,
    )


def _choice(profile: Any, team: Any, preemptible: bool, image: Any) -> Choice:
    if not profile:
        raise Refused("No profile was chosen: pick one on the start page.", code="profile_missing", status=400)
    return Choice(_slug("profile", profile), _slug("team", team) if team else None, preemptible, _image(image))


def _image(value: Any) -> str:
    if not value:
        return ""
    if not isinstance(value, str) or len(value) > _MAX_IMAGE or not value.isprintable():
        raise Refused(f"{str(value)[:40]!r} is not the name of an image.", code="bad_image", status=400)
    return value


def _single(form: Mapping[str, Any], key: str) -> str:
    value = form.get(key)
    if isinstance(value, list):
        value = value[0] if value else ""
    return value.strip() if isinstance(value, str) else ""


def _ticked(form: Mapping[str, Any], queue: str) -> bool:
    """Whether the box of this row is ticked; boxes of other rows do not count."""
    boxes = form.get("preemptible")
    values = boxes if isinstance(boxes, list) else [boxes]
    return any(value == queue or (isinstance(value, (str, bool)) and _flag(value, "/")) for value in values)


def _flag(value: Any, other: str = "") -> bool:
    if isinstance(value, bool):
        return value
    text = str(value if value is not None else "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE or (other and other in text):
        return False
    raise Refused(f"preemptible must be true or false, not {text[:40]!r}.", code="bad_options", status=400)


def _slug(what: str, value: Any) -> str:
    if not isinstance(value, str) or not SLUG.fullmatch(value):
        shown = str(value)[:40]
        raise Refused(
            f"{shown!r} is not the name of a {what}: names have small letters, digits, dots, dashes and underscores.",
            code=f"bad_{what}",
            status=400,
        )
    return value
