"""Keep credentials sealed: the database has Fernet tokens, and the keys are in a file outside of it.

The file is read with each use, so that a key is replaced without a restart: its first line seals, and all of them open.
What is read back without values is for lists; values leave this module only by `opened`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import delete, insert, select, update

from .. import rows, writes
from ..database.database import Database
from ..records import NewDecision
from ..tables import sealed_secrets

S = sealed_secrets.c
CLOUD, FILE, GIT = "cloud", "file", "git"
KEY_FILE = "credentials.key"


class SecretsLocked(Exception):
    """There is no key to seal or open with; the sentence says which, without any value."""


class CredentialNameTaken(Exception):
    """Another credential has the name; the sentence says of what kind and team it is."""


@dataclass(frozen=True, slots=True)
class StoredCredential:
    """A credential without its values."""

    name: str
    kind: str
    team: str
    updated_at: float
    updated_by: str


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
        """Return all credentials by name, without their values."""
        query = select(S.name, S.kind, S.team, S.updated_at, S.updated_by).order_by(S.name)
        with self._database.read() as connection:
            return [StoredCredential(*row) for row in connection.execute(query)]

    def cloud(self, keys: SecretKeys, deployment: str) -> dict[str, str]:
        """Return what the provider of a deployment logs in with; empty where nothing is set."""
        query = select(sealed_secrets).where(S.kind == CLOUD, S.name == rows.clean(deployment))
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        return {} if row is None else _opened(keys.fernet(), row)

    def cloud_times(self) -> dict[str, float]:
        """Return when what each deployment's provider logs in with was set, in Unix seconds."""
        return {one.name: one.updated_at for one in self.list() if one.kind == CLOUD}

    def write(
        self, saved: StoredCredential, values: Mapping[str, str], keys: SecretKeys, decision: NewDecision
    ) -> None:
        """Seal the values and keep them in place of those before, and log the `decision`.

        CredentialNameTaken where those before are of another kind or team: who replaces a value names both.
        """
        token = keys.fernet(make=True).encrypt(json.dumps(dict(values)).encode()).decode()
        fields = {
            "kind": saved.kind,
            "team": rows.clean(saved.team),
            "sealed": token,
            "updated_at": saved.updated_at,
            "updated_by": rows.clean(saved.updated_by),
        }
        with self._database.write(durable=True) as connection:
            before = connection.execute(select(S.kind, S.team).where(S.name == saved.name)).one_or_none()
            if before is not None and tuple(before) != (saved.kind, fields["team"]):
                raise CredentialNameTaken(_other(saved.name, *before))
            if not connection.execute(update(sealed_secrets).where(S.name == saved.name).values(fields)).rowcount:
                connection.execute(insert(sealed_secrets), {"name": saved.name, **fields})
            writes.log(connection, (), [decision], saved.updated_at)

    def delete(self, name: str, now: float, decision: NewDecision) -> bool:
        """Remove a credential and log the `decision`; False where there is none."""
        with self._database.write(durable=True) as connection:
            if not connection.execute(delete(sealed_secrets).where(S.name == rows.clean(name))).rowcount:
                return False
            writes.log(connection, (), [decision], now)
        return True

    def reseal(self, keys: SecretKeys) -> int:
        """Seal everything with the first key, so that the others may be removed; return how many there are."""
        fernet = keys.fernet()
        with self._database.write(durable=True) as connection:
            result = connection.execute(select(S.name, S.sealed)).all()
            for name, token in result:
                connection.execute(
                    update(sealed_secrets).where(S.name == name).values(sealed=_rotated(fernet, name, token))
                )
        return len(result)

    def opened(self, keys: SecretKeys, kinds: Iterable[str], team: str) -> Sequence[OpenedCredential]:
        """Return the credentials of these kinds that a team, or every team, has, each with its values, by name."""
        query = select(sealed_secrets).where(S.kind.in_(list(kinds)), S.team.in_(["", rows.clean(team)]))
        with self._database.read() as connection:
            result = connection.execute(query.order_by(S.name)).all()
        if not result:
            return []
        fernet = keys.fernet()
        return [(_stored(row), _opened(fernet, row)) for row in result]


def _stored(row: Any) -> StoredCredential:
    return StoredCredential(row.name, row.kind, row.team, row.updated_at, row.updated_by)


def _other(name: str, kind: str, team: str) -> str:
    whose = "" if kind == CLOUD else f" of team {team}" if team else " of all teams"
    return (
        f"The credential {name} is of the kind {kind}{whose}: name these to replace its value, delete it first, "
        "or give this one another name, as each name is there once for all teams."
    )


def _opened(fernet: MultiFernet, row: Any) -> dict[str, str]:
    try:
        values: dict[str, str] = json.loads(fernet.decrypt(row.sealed.encode()))
    except InvalidToken:
        raise SecretsLocked(f"No key of the file opens the credential {row.name}: set it again.") from None
    return values


def _rotated(fernet: MultiFernet, name: str, token: str) -> str:
    try:
        return fernet.rotate(token.encode()).decode()
    except InvalidToken:
        raise SecretsLocked(f"No key of the file opens the credential {name}: set it again.") from None
