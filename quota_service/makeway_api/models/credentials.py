"""Define the API's models of credentials: clients write their values, and no answer contains them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, SecretStr, StringConstraints

from .base import RequestBody, Wire

CREDENTIAL_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
"""The pattern of names; a credential of the kind file is a file of this name in jobs"""
CredentialKind = Literal["cloud", "git", "file"]
Team = Annotated[str, StringConstraints(max_length=200)]
SecretValue = Annotated[SecretStr, Field(max_length=65_536)]


def parse_cloud_values(text: str) -> dict[str, str]:
    """Return the values in the text of a cloud credential: lines NAME=VALUE, or a JSON object of strings.

    Raise ValueError otherwise; its message contains no part of the text, as that is secret.
    """
    if not text.lstrip().startswith("{"):
        lines = [line.partition("=") for line in text.splitlines() if line.strip()]
        if not all(equals for _, equals, _ in lines):
            raise ValueError("A credential of the kind cloud is lines NAME=VALUE, such as access_key_id=….")
        return {name.strip(): value.strip() for name, _, value in lines}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise ValueError(
            "A credential of the kind cloud that begins with { is a JSON object of texts, as Google writes it."
        )
    return values


class CredentialRequest(RequestBody):
    """A credential to store; it replaces the one of the same team and name, if there is one."""

    kind: CredentialKind = Field(description="cloud: of the deployment of its name; git: of a server; file: for jobs")
    team: Team | None = Field(
        None, description="the team whose jobs get it; empty: all teams; null: all, refused if a team has such a name"
    )
    values: dict[Annotated[str, StringConstraints(max_length=64)], SecretValue] = Field(
        max_length=16, description="git: `host`, `user`, `token`; file: `content`; cloud: as its provider names them"
    )


class Credential(Wire):
    """A credential without its values."""

    name: str
    kind: str
    team: str = Field(description="whose jobs get it; empty: those of all teams")
    updated_at: datetime
    updated_by: str
    disabled_at: datetime | None = Field(
        None, description="when its team left the policy: no job gets it until it is enabled or set anew; null: enabled"
    )


class Resealed(Wire):
    """The number of credentials that are now encrypted with the first key of the key file."""

    credentials: int
