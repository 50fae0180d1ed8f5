"""Keep credentials sealed: the database has Fernet tokens, and the keys are in a file outside of it.

The file is read with each use, so that a key is replaced without a restart: its first line seals, and all of them open.
What is read back without values is for lists; values leave this module only by `opened`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from makeway_api.quantities import count, listed
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from .. import reads, rows, writes
from ..database.database import Database
from ..records import NewDecision
from ..tables import LIVE_MACHINE, machines, sealed_secrets

S = sealed_secrets.c
CLOUD, FILE, GIT = "cloud", "file", "git"
KEY_FILE = "credentials.key"


class SecretsLocked(Exception):
    """There is no key to seal or open with; the sentence says which, without any value."""


class CredentialNameTaken(Exception):
    """Another credential has the name; the sentence says of what kind it is, or of which teams."""


class CredentialInUse(Exception):
    """A deployment that has machines logs in with the credential; the sentence says what to do first."""


class PolicyChanged(Exception):
    """Another version of the policy is in force than the one that the team of a credential was looked up in."""


@dataclass(frozen=True, slots=True)
class StoredCredential:
    """A credential without its values. `disabled_at`: when its team left the policy; no job gets it since then."""

    name: str
    kind: str
    team: str
    updated_at: float
    updated_by: str
    disabled_at: float | None = None


OpenedCredential = tuple[StoredCredential, dict[str, str]]


class SecretKeys:
    """The keys of a file, one in a line. `made`: a file that is missing is made with a new key."""

    def __init__(self, path: Path, made: bool) -> None:
        self.path = path
        self._made = made

    @classmethod
    def of(cls, path: Path | None, state_dir: Path, *, shared: bool) -> SecretKeys:
        """Return the keys of a file that is set, or of one in the state directory.

        Replicas (`shared`) have no folder in common: a key that one of them made would open nothing elsewhere.
        """
        return cls(path or state_dir / KEY_FILE, made=path is None and not shared)

    def fernet(self, *, make: bool = False) -> MultiFernet:
        """Return what seals with the first key and opens with all; SecretsLocked without one."""
        if make and self._made and not self.path.exists():
            self._make()
        try:
            lines = self.path.read_text(encoding="ascii").split()
            return MultiFernet([Fernet(line) for line in lines])
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SecretsLocked(f"The keys of credentials cannot be read from {self.path}: {why}.") from None
        except ValueError:
            raise SecretsLocked(f"{self.path} has no Fernet keys, one in a line.") from None

    def _make(self) -> None:
        """Make the file; of several threads and processes that do so at once, the first one counts."""
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(Fernet.generate_key() + b"\n")
                    file.flush()
                    os.fsync(descriptor)
                with suppress(FileExistsError):
                    os.link(part, self.path)
            finally:
                os.unlink(part)
        except OSError as error:
            message = f"A key of credentials cannot be made at {self.path}: {error.strerror}."
            raise SecretsLocked(message) from None


class SealedSecrets:
    """The credentials of a database. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> list[StoredCredential]:
        """Return all credentials by name, those of all teams first, without their values."""
        columns = (S.name, S.kind, S.team, S.updated_at, S.updated_by, S.disabled_at)
        query = select(*columns).order_by(S.name, S.team)
        with self._database.read() as connection:
            return [StoredCredential(*row) for row in connection.execute(query)]

    def cloud(self, keys: SecretKeys, deployment: str) -> dict[str, str]:
        """Return what the provider of a deployment logs in with; empty where nothing is set."""
        query = select(sealed_secrets).where(S.kind == CLOUD, S.team == "", S.name == rows.clean(deployment))
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        return {} if row is None else _opened(keys.fernet(), row)

    def cloud_times(self) -> dict[str, float]:
        """Return when what each deployment's provider logs in with was set, in Unix seconds."""
        return {one.name: one.updated_at for one in self.list() if one.kind == CLOUD}

    def write(
        self,
        saved: StoredCredential,
        values: Mapping[str, str],
        keys: SecretKeys,
        decision: NewDecision,
        alone: bool = False,
        policy: int | None = None,
    ) -> None:
        """Seal the values, keep them in place of those of the same team and name, and log the `decision`.

        CredentialNameTaken where those before are of another kind, or, with `alone`, where any team has the name;
        PolicyChanged unless version `policy` of the policy, which has the team, is in force (None: any).
        """
        token = keys.fernet(make=True).encrypt(json.dumps(dict(values)).encode()).decode()
        team = str(rows.clean(saved.team))
        fields = {
            "kind": saved.kind,
            "team": team,
            "sealed": token,
            "updated_at": saved.updated_at,
            "updated_by": rows.clean(saved.updated_by),
            "disabled_at": None,
        }
        with self._database.write(durable=True) as connection:
            _check_policy(connection, policy)
            named = connection.execute(select(S.team, S.kind).where(S.name == saved.name).order_by(S.team)).all()
            kinds = {row.team: row.kind for row in named}
            if alone and (teams := [team for team in kinds if team]):
                raise CredentialNameTaken(_of_teams(saved.name, teams))
            if (kind := kinds.get(team)) is not None and kind != saved.kind:
                raise CredentialNameTaken(_of_other_kind(saved.name, kind, team))
            its = _row_of(team, saved.name)
            if not connection.execute(update(sealed_secrets).where(its).values(fields)).rowcount:
                connection.execute(insert(sealed_secrets), {"name": saved.name, **fields})
            writes.log(connection, (), [decision], saved.updated_at)

    def delete(self, team: str, name: str, now: float, decision: NewDecision) -> bool:
        """Remove a credential of a team ("": of all teams) and log the `decision`; False where there is none.

        CredentialInUse where a deployment that has machines logs in with it: they could not be ended without it.
        """
        with self._database.write(durable=True) as connection:
            kind = connection.execute(select(S.kind).where(_row_of(team, name))).scalar()
            if kind == CLOUD and (many := _live_machines(connection, name)):
                raise CredentialInUse(_with_machines(name, many))
            if not connection.execute(delete(sealed_secrets).where(_row_of(team, name))).rowcount:
                return False
            writes.log(connection, (), [decision], now)
        return True

    def enable(self, team: str, name: str, now: float, decision: NewDecision, policy: int) -> bool:
        """Enable a disabled credential of a team again and log the `decision`; False where there is none.

        PolicyChanged unless version `policy` of the policy, which has the team, is in force.
        """
        with self._database.write(durable=True) as connection:
            _check_policy(connection, policy)
            its = and_(_row_of(team, name), S.disabled_at.is_not(None))
            if not connection.execute(update(sealed_secrets).where(its).values(disabled_at=None)).rowcount:
                return False
            writes.log(connection, (), [decision], now)
        return True

    def disable_absent(self, teams: Collection[str], policy: int, actor: str, now: float) -> None:
        """Disable the credentials of teams that version `policy` of the policy does not have, if it is in force."""
        with self._database.read() as connection:
            if not _teams_but(connection, teams):
                return
        with self._database.write(durable=True) as connection, suppress(PolicyChanged):
            _check_policy(connection, policy)
            disable_absent(connection, teams, policy, actor, now)

    def reseal(self, keys: SecretKeys, now: float, decision: Callable[[int], NewDecision]) -> int:
        """Seal everything with the first key, so that the others may be removed; return how many there are.

        `decision` returns what is logged of so many.
        """
        fernet = keys.fernet()
        with self._database.write(durable=True) as connection:
            result = connection.execute(select(S.team, S.name, S.sealed)).all()
            for team, name, token in result:
                new = _rotated(fernet, name, team, token)
                connection.execute(update(sealed_secrets).where(_row_of(team, name)).values(sealed=new))
            writes.log(connection, (), [decision(len(result))], now)
        return len(result)

    def opened(self, keys: SecretKeys, kinds: Iterable[str], team: str) -> Sequence[OpenedCredential]:
        """Return the credentials of these kinds that the jobs of a team get, each with its values, by name.

        A name of the team itself hides that of all teams, which is not even opened. Disabled ones count as not there.
        """
        its = and_(S.kind.in_(list(kinds)), S.team.in_(["", rows.clean(team)]), S.disabled_at.is_(None))
        query = select(sealed_secrets).where(its)
        with self._database.read() as connection:
            result = {row.name: row for row in connection.execute(query.order_by(S.name, S.team))}
        if not result:
            return []
        fernet = keys.fernet()
        return [(_stored(row), _opened(fernet, row)) for row in result.values()]


def disable_absent(connection: Connection, teams: Collection[str], policy: int, actor: str, now: float) -> None:
    """Disable the credentials of teams that a version of the policy does not have, and log which these are.

    A later team of such a name, which may be other people, gets none of them.
    """
    for team in _teams_but(connection, teams):
        its = and_(S.team == team, S.disabled_at.is_(None))
        names = list(connection.execute(select(S.name).where(its).order_by(S.name)).scalars())
        connection.execute(update(sealed_secrets).where(its).values(disabled_at=now))
        what = f"credentials {listed(names)} of {team} are" if len(names) > 1 else f"credential {names[0]} of {team} is"
        message = f"The {what} disabled: policy version {policy} does not have the team."
        told = NewDecision("credential", None, team, actor, "credential", message[:2000], {"credential": names[0]})
        writes.log(connection, (), [told], now)


def _live_machines(connection: Connection, deployment: str) -> int:
    its = and_(machines.c.deployment == rows.clean(deployment), LIVE_MACHINE)
    return connection.execute(select(func.count()).select_from(machines).where(its)).scalar_one()


def _teams_but(connection: Connection, teams: Collection[str]) -> list[str]:
    """Return the other teams that have credentials which are not disabled."""
    query = select(S.team).where(S.team != "", S.disabled_at.is_(None)).distinct().order_by(S.team)
    kept = {rows.clean(team) for team in teams}
    return [team for team in connection.execute(query).scalars() if team not in kept]


def _check_policy(connection: Connection, version: int | None) -> None:
    current = reads.policy(connection, None) if version is not None else None
    if current is not None and current.version != version:
        raise PolicyChanged(f"Policy version {current.version} came into force meanwhile: look at it, then try again.")


def _stored(row: Any) -> StoredCredential:
    return StoredCredential(row.name, row.kind, row.team, row.updated_at, row.updated_by, row.disabled_at)


def _full_name(name: str, team: str) -> str:
    return f"{name} of team {team}" if team else name


def _row_of(team: str, name: str) -> ColumnElement[bool]:
    return and_(S.team == rows.clean(team), S.name == rows.clean(name))


def _of_other_kind(name: str, kind: str, team: str) -> str:
    return (
        f"The credential {_full_name(name, team)} is of the kind {kind}: name this kind to replace its value, delete "
        "it first, or give this one another name."
    )


def _of_teams(name: str, teams: Sequence[str]) -> str:
    return (
        f"There is a credential {name} of {listed(teams)}: name the team whose value this is (--team), or say that it "
        "is for the jobs of all teams (--all-teams)."
    )


def _with_machines(name: str, many: int) -> str:
    return (
        f"The deployment {name} logs in with this credential, and has {count(many, 'machine')} that could not be ended "
        "without it. Set it anew to replace its value; or pause or delete the deployment, and delete the credential "
        "once its machines are gone."
    )


def _opened(fernet: MultiFernet, row: Any) -> dict[str, str]:
    try:
        values: dict[str, str] = json.loads(fernet.decrypt(row.sealed.encode()))
    except InvalidToken:
        raise SecretsLocked(
            f"No key of the file opens the credential {_full_name(row.name, row.team)}: set it again."
        ) from None
    return values


def _rotated(fernet: MultiFernet, name: str, team: str, token: str) -> str:
    try:
        return fernet.rotate(token.encode()).decode()
    except InvalidToken:
        raise SecretsLocked(
            f"No key of the file opens the credential {_full_name(name, team)}: set it again."
        ) from None
