"""Read the form of copies of a job: what differs in them, and a key that a double click repeats.

An empty field is that of the original, as in `job.clone(n, **overrides)`. The key of the page is joined with what was
typed, so that pressing the button twice submits once, and pressing it after a change submits anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from makeway_api.errors import MakewayError
from makeway_api.models import CloneRequest
from pydantic import ValidationError

FIELDS = ("n", "name", "queue", "image", "priority", "workers", "time_limit", "max_failures", "env")
WORDS = {
    "n": "Copies", "name": "Name", "queue": "Queue", "image": "Image", "priority": "Priority", "workers": "Workers",
    "time_limit": "Time limit, in seconds", "max_failures": "Retries after failures",
    "env": "Environment instead of its own, NAME=VALUE, one a line",
}  # fmt: skip
MAX_TYPED = 200_000
"""Characters of a field"""
KEY = re.compile(r"[A-Za-z0-9_-]{16,64}")


def typed(form: Mapping[str, Any]) -> dict[str, str]:
    """Return what was typed into the fields of the form."""
    values = {name: form.get(name, "") for name in FIELDS}
    return {name: value.strip()[:MAX_TYPED] for name, value in values.items() if isinstance(value, str)}


def request_of(values: Mapping[str, str]) -> CloneRequest:
    """Return the request for the copies; MakewayError says which field is wrong, and what was expected."""
    overrides: dict[str, Any] = {name: value for name, value in values.items() if value and name not in ("n", "env")}
    team, slash, profile = overrides.pop("queue", "").partition("/")
    if slash:
        overrides |= {name: value for name, value in (("team", team), ("profile", profile)) if value}
    if values.get("env"):
        overrides["env"] = _environment(values["env"])
    try:
        return CloneRequest.model_validate({"n": values.get("n") or 1, "overrides": overrides})
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][-1]) if first["loc"] else "n"
        name = next((str(part) for part in reversed(first["loc"]) if str(part) in WORDS), field)
        raise MakewayError(f"{WORDS.get(name, name)}: {first['msg']}.", code="bad_override", status=422) from None


def _environment(text: str) -> dict[str, str]:
    result = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if line.strip() and not (equals and name.strip()):
            raise MakewayError("Environment: each line is NAME=VALUE.", code="bad_override", status=422)
        if line.strip():
            result[name.strip()] = value
    return result


def key_of(page: object, values: Mapping[str, str]) -> str | None:
    """Return the key of a submission from a page with a key of its own; None for a page without one."""
    if not isinstance(page, str) or not KEY.fullmatch(page):
        return None
    digest = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode("utf-8", "replace")).hexdigest()
    return f"{page}-{digest[:32]}"
