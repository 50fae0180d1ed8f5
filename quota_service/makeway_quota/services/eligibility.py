"""Check which team and profile a request may use."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.snapshot import Profile
from ..policy import Document, closest
from ..wording import names
from .refusals import refuse


def title_of(document: Document, profile: Profile) -> str:
    """Return the title of a profile."""
    return document.profile_facts[profile.name].title


def titled(document: Document, profile: str) -> str:
    """Return a profile as a refusal lists it, for people who have to type its name: `1 GPU (gpu1)`."""
    title = document.profile_facts[profile].title
    return title if title == profile else f"{title} ({profile})"


def _team(document: Document, team: str) -> str:
    policy = document.policy(team)
    return policy.label if policy else team


def find_image(document: Document, profile: Profile, wanted: str | None) -> str | None:
    """Return the reference of an image that a profile offers, by name or reference; without a wish its default one.

    None: the profile names no image, so that the site's is used. The refusal lists what the profile offers.
    """
    facts = document.profile_facts[profile.name]
    if not wanted or wanted == facts.default_image:
        return facts.default_image
    for image in facts.images:
        if wanted in (image.name, image.image):
            return image.image
    offered = names([image.name for image in facts.images], 20)
    raise refuse(
        f"{facts.title} offers no image “{wanted[:80]}”"
        + (f", but {offered}." if facts.images else ": it offers no choice of images."),
        "unknown_image",
        422,
    )


def offers_image(document: Document, profile: str, image: str | None) -> bool:
    """Whether a profile, by its name, offers an image, by its reference."""
    facts = document.profile_facts.get(profile)
    return facts is not None and image in (facts.image, *(offered.image for offered in facts.images))


def find_profile(document: Document, name: str) -> Profile:
    """Return a profile by name; the refusal lists the known ones."""
    profile = document.profile(name)
    if profile is None:
        known = [p.name for p in document.profiles]
        meant = closest(name, known)
        raise refuse(
            f"There is no profile “{name[:80]}”."
            + (
                f" Did you mean “{meant}”?"
                if meant
                else f" There are {names([titled(document, p) for p in known], 20)}."
            ),
            "unknown_profile",
            404,
        )
    return profile


def check_queue(document: Document, user: str, teams: Sequence[str], team: str, profile: Profile) -> None:
    """Refuse a team that is not the user's, and a profile that the team has no queue for (F11)."""
    if team not in teams:
        yours = (
            f"your teams are {names(teams)}"
            if len(teams) > 1
            else f"your team is {teams[0]}"
            if teams
            else "you are in no team"
        )
        raise refuse(f"{user} is not in the team “{team[:80]}”: {yours}.", "foreign_team", 403)
    if not document.queue_open(team, profile.name):
        open_to = [titled(document, p.name) for p in document.profiles if document.queue_open(team, p.name)]
        raise refuse(
            f"{_team(document, team)} cannot use {title_of(document, profile)}; "
            f"it can use {names(open_to, 20) or 'no profile at all'}.",
            "queue_closed",
            403,
        )


def pick_team(teams: Sequence[str], user: str, named: str | None) -> str:
    """Return the team that a job runs for: of the user's teams the named one, or the only one (F30)."""
    if named is not None:
        if named not in teams:
            yours = f"your teams: {names(teams)}" if teams else "you are in no team; ask an administrator to add you"
            raise refuse(f"{user} is not in the team “{named[:80]}” ({yours}).", "foreign_team", 403)
        return named
    if not teams:
        raise refuse(
            f"{user} is in no team, and GPUs belong to teams: ask an administrator to add you to one.", "no_team", 403
        )
    if len(teams) > 1:
        raise refuse(f"You are in {len(teams)} teams: say which one with --team ({names(teams)}).", "which_team", 422)
    return teams[0]


def pick_profile(document: Document, user: str, team: str, named: str | None) -> Profile:
    """Return the profile that a job of one of the user's teams runs with: the named one, or the team's first."""
    if named is None:
        usable = document.profiles_for(team, "job")
        if not usable:
            raise refuse(f"{_team(document, team)} has no profile for training jobs.", "no_profile", 409)
        return find_profile(document, usable[0])
    profile = find_profile(document, named)
    if "job" not in document.profile_facts[profile.name].kinds:
        raise refuse(f"{title_of(document, profile)} is for notebooks, not for training jobs.", "wrong_kind", 409)
    check_queue(document, user, (team,), team, profile)
    return profile
