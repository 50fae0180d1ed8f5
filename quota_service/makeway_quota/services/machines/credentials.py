"""Keep the credentials of jobs, and return them to the launchers of jobs of their team.

Members see the names of their teams' credentials, leads change them; administrators see and change all. Values are
sealed before they are stored. No answer to a person, no line of the decision log and no refusal has them.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import quote

from makeway_api.errors import MakewayError
from makeway_api.models import Credential, CredentialRequest, Resealed
from makeway_api.quantities import count, listed

from ...store.records import NewDecision
from ...store.storage.sealed_secrets import (
    CLOUD,
    FILE,
    GIT,
    CredentialInUse,
    CredentialNameTaken,
    PolicyChanged,
    SecretKeys,
    SecretsLocked,
    StoredCredential,
)
from ..caller import Caller
from ..context import Context
from ..refusals import busy, refuse
from ..times import to_datetime, to_optional_datetime

log = logging.getLogger("makeway.credentials")

GIT_FILE = "git-credentials"
"""The file of jobs that has what Git sends to its servers; Git's own program `credential-store` reads it"""
REQUIRED_KEYS = {GIT: ("host", "token", "user"), FILE: ("content",)}
KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
HOST = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|[A-Za-z0-9.-]+(:[0-9]{1,5})?")


class CredentialService:
    """The credentials of jobs. Leads and administrators write them; they are read for workers alone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        settings = context.settings
        shared = context.store.shared
        self._keys = SecretKeys.of(settings.credentials_key_file, settings.state_dir, shared=shared)

    async def list_all(self, caller: Caller) -> list[Credential]:
        """Return the credentials that a caller may see, by name and without values: those of its teams, or all."""
        stored = await self._context.call(self._context.store.secrets.list)
        teams = self._context.visible_teams(caller)
        if not caller.is_administrator:
            stored = [one for one in stored if one.team and (teams is None or one.team in teams)]
            stored = [one for one in stored if one.disabled_at is None or self.may_change(caller, one.team)]
        return [_model(one) for one in stored]

    async def save(self, caller: Caller, name: str, request: CredentialRequest) -> Credential:
        """Keep a credential in place of the one of its team and name; jobs get it from their next attempt on."""
        context, team = self._context, request.team or ""
        self.check_rights(caller, team)
        values = {key: value.get_secret_value() for key, value in request.values.items()}
        _check(request.kind, name, values)
        if request.kind == CLOUD and team:
            raise refuse("A credential of the kind cloud is of a deployment, not of a team.", "invalid_credential", 422)
        policy = context.world.policy_version if team else None
        if team and context.document.policy(team) is None:
            raise refuse(f"There is no team {team}.", "unknown_team", 422)
        saved = StoredCredential(name, request.kind, team, context.clock(), caller.name)
        whose = "of its deployment" if request.kind == CLOUD else f"of {team or 'all teams'}"
        message = f"{caller.name} set the credential {name} ({request.kind}) {whose}."
        decision = _decision(caller, name, team, message)
        without_others = request.team is None and request.kind != CLOUD
        await self._call(context.store.secrets.write, saved, values, self._keys, decision, without_others, policy)
        return _model(saved)

    async def enable(self, caller: Caller, name: str, team: str) -> Credential:
        """Enable a credential that was disabled when its team left the policy, for the team that has the name now."""
        context = self._context
        if not caller.is_administrator:
            message = "Only administrators enable the credentials of an earlier team: set its value anew instead."
            raise refuse(message, "forbidden", 403)
        policy = context.world.policy_version
        if context.document.policy(team) is None:
            raise refuse(f"There is no team {team}: add it to the policy first.", "unknown_team", 409)
        decision = _decision(caller, name, team, f"{caller.name} enabled the credential {name} of {team} again.")
        await self._call(context.store.secrets.enable, team, name, context.clock(), decision, policy)
        for one in await context.call(context.store.secrets.list):
            if (one.team, one.name) == (team, name):
                return _model(one)
        raise refuse(f"There is no credential {name} of {team}.", "not_found", 404)

    async def delete(self, caller: Caller, name: str, team: str | None = None) -> None:
        """Remove a credential; attempts that run keep theirs until they end. Without `team`, the only one so named.

        That of a deployment is refused while it has machines.
        """
        context = self._context
        team = await self._only_team(caller, name) if team is None else team
        self.check_rights(caller, team)
        whose = f" of {team}" if team else ""
        decision = _decision(caller, name, team, f"{caller.name} deleted the credential {name}{whose}.")
        if not await self._call(context.store.secrets.delete, team, name, context.clock(), decision):
            raise refuse(f"There is no credential {name}{whose}.", "not_found", 404)

    async def _only_team(self, caller: Caller, name: str) -> str:
        """Return the team of the only credential of a name that the caller may change."""
        stored = await self._context.call(self._context.store.secrets.list)
        teams = [one.team for one in stored if one.name == name and self.may_change(caller, one.team)]
        if not teams:
            raise refuse(f"There is no credential {name}.", "not_found", 404)
        if len(teams) > 1:
            owners = listed(team or "all teams" for team in teams)
            message = f"There is a credential {name} of {owners} each: name the team (--team), or all (--all-teams)."
            raise refuse(message, "other_credential", 409)
        return teams[0]

    def may_change(self, caller: Caller, team: str) -> bool:
        """Whether a caller may set and delete the credentials of a team ("": those of all teams)."""
        return caller.is_administrator or (bool(team) and self._context.manages(caller, team))

    def check_rights(self, caller: Caller, team: str) -> None:
        """Refuse who may not change the credentials of a team ("": of all teams), be there any or not."""
        if self.may_change(caller, team):
            return
        if not team:
            raise refuse(
                "Only administrators change credentials of all teams and of deployments: name a team that you lead.",
                "forbidden",
                403,
            )
        message = f"You do not lead the team {team}: its leads and administrators change its credentials."
        raise refuse(message, "foreign_team", 403)

    async def reseal(self, caller: Caller) -> Resealed:
        """Seal all with the first key of the file: the others are not needed any more then."""
        _only_administrators(caller)
        context = self._context

        def decision(many: int) -> NewDecision:
            message = f"{caller.name} sealed {count(many, 'credential')} anew with the first key of the service."
            return NewDecision("credential", None, None, caller.name, "credential", message, {"credentials": many})

        sealed = await self._call(context.store.secrets.reseal, self._keys, context.clock(), decision)
        return Resealed(credentials=sealed)

    async def files(self, team: str) -> dict[str, str]:
        """Return the files that a worker of a team gets: by name, their content."""
        secrets = self._context.store.secrets
        try:
            result = await self._context.call(secrets.opened, self._keys, (GIT, FILE), team)
        except SecretsLocked as locked:
            log.warning("Jobs of team %s do not start: %s", team, locked)
            raise busy(f"The job's credentials cannot be read now: {locked}", "credentials_locked", 503, 10.0) from None
        # A token of the team itself comes before one of all teams for the same server: Git takes the first that fits.
        result = sorted(result, key=lambda one: (not one[0].team, one[0].name))
        files = {one.name: values.get("content", "") for one, values in result if one.kind == FILE}
        if lines := [_git_line(values) for one, values in result if one.kind == GIT]:
            files[GIT_FILE] = "\n".join(lines) + "\n"
        return files

    async def _call(self, work: object, *arguments: object) -> int:
        try:
            result: int = await self._context.call(work, *arguments)  # type: ignore[arg-type]
        except SecretsLocked as locked:
            raise refuse(str(locked), "credentials_locked", 409) from None
        except CredentialInUse as used:
            raise refuse(str(used), "credential_in_use", 409) from None
        except CredentialNameTaken as other:
            raise refuse(str(other), "other_credential", 409) from None
        except PolicyChanged as changed:
            raise refuse(str(changed), "policy_changed", 409) from None
        return result


def _check(kind: str, name: str, values: dict[str, str]) -> None:
    """Refuse values that are missing, unknown, or can be no part of a file of Git; without naming any of them."""
    if kind == CLOUD:
        if not values or not all(KEY.fullmatch(key) and value for key, value in values.items()):
            message = "A credential of the kind cloud has what its provider logs in with, such as access_key_id."
            raise refuse(message, "invalid_credential", 422)
        return
    required = REQUIRED_KEYS[kind]
    if sorted(values) != sorted(required) or not all(values.values()):
        raise refuse(f"A credential of the kind {kind} has exactly {', '.join(required)}.", "invalid_credential", 422)
    if kind == GIT and not HOST.fullmatch(values["host"]):
        message = "The server (host) is an address such as https://git.example.org, without a path."
        raise refuse(message, "invalid_credential", 422)
    if kind == FILE and name == GIT_FILE:
        raise refuse(f"{GIT_FILE} is the file of credentials of the kind git.", "invalid_credential", 422)


def _git_line(values: dict[str, str]) -> str:
    scheme, _, host = values["host"].rpartition("://")
    return f"{scheme or 'https'}://{quote(values['user'], safe='')}:{quote(values['token'], safe='')}@{host}"


def _model(stored: StoredCredential) -> Credential:
    return Credential(
        name=stored.name,
        kind=stored.kind,
        team=stored.team,
        updated_at=to_datetime(stored.updated_at),
        updated_by=stored.updated_by,
        disabled_at=to_optional_datetime(stored.disabled_at),
    )


def _decision(caller: Caller, name: str, team: str, message: str) -> NewDecision:
    return NewDecision("credential", None, team or None, caller.name, "credential", message, {"credential": name})


def _only_administrators(caller: Caller) -> None:
    if not caller.is_administrator:
        raise _forbidden()


def _forbidden() -> MakewayError:
    return refuse("Only administrators seal all credentials anew.", "forbidden", 403)
