"""Choose the image of a job's pods: the requested one, that of the notebook that submits it, or a default one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from makeway_api.models import JobRequest

from ...engine.snapshot import ADMITTED, Profile
from ...policy import Document
from ...store.records import Workload
from ..eligibility import find_image, offers_image, title_of


class ImageChoice(NamedTuple):
    """The reference of an image, None for the default image of jobs, and why it is this one, to end a sentence."""

    image: str | None
    why: str


def submitting_session(rows: Iterable[Workload], owner: str, request: JobRequest) -> Workload | None:
    """Return the running session of the job's owner that a job is submitted from; None from elsewhere.

    A notebook names its server, which keeps its name when its lease is replaced.
    """
    if request.server is None:
        return None
    mine = (row for row in rows if row.kind == "session" and row.owner == owner and row.state in ADMITTED)
    return next((row for row in mine if row.server == request.server), None)


def choose_image(document: Document, profile: Profile, wanted: str | None, session: Workload | None) -> ImageChoice:
    """Return the image of a job; MakewayError for a wish that its profile does not offer.

    The session's image is taken where the profile offers it or names no image at all. It was offered to its owner by
    the session's own profile.
    """
    default = find_image(document, profile, wanted)
    if wanted:
        return ImageChoice(default, "as requested")
    title = title_of(document, profile)
    why = f"the default of {title}" if default else "the default image of jobs"
    if session is None or session.image is None:
        return ImageChoice(default, why)
    if default is None or offers_image(document, profile.name, session.image):
        return ImageChoice(session.image, "that of the notebook")
    return ImageChoice(default, f"{why}; this profile does not offer the notebook's image {session.image}")


def image_note(image: str | None, choice: ImageChoice, default: str) -> str:
    """Return a sentence for the owner of a job with this image; `default` is the default image of jobs."""
    why = f" ({choice.why})" if image == choice.image else ""
    return f"The job runs in the image {image or default}{why}."
