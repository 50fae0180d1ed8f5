"""The policy document over the counter: read, validate, preview and put into force."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from makeway_api.errors import MakewayError
from makeway_api.models import PolicyAsk, PolicyCheck, PolicyIssue, PolicyVersion, Preview, WorkloadEffect

from ..policy import Document, PolicyInvalid, diff, read
from ..store.errors import Conflict
from ..store.records import NewDecision, Workload
from ..store.records import PolicyVersion as VersionRow
from ..wording import count
from .caller import Caller
from .core import Core, at, refuse
from .what_if import projection


class Policies(Core):
    """Versions are kept for ever, each with its author and time."""

    async def policy_current(self) -> PolicyVersion:
        """The document in force."""
        row = await self.read(self.store.policy_current)
        if row is None:
            raise refuse("There is no policy document yet.", "not_found", 404)
        return _version(row, whole=True)

    async def policy_history(self) -> list[PolicyVersion]:
        """Every version, newest first."""
        return [_version(row) for row in await self.read(self.store.policy_history)]

    async def policy_version(self, n: int) -> PolicyVersion:
        """One version with its document."""
        row = await self.read(self.store.policy_version, n)
        if row is None:
            raise refuse(f"There is no version {n} of the policy.", "not_found", 404)
        return _version(row, whole=True)

    async def policy_validate(self, text: str) -> PolicyCheck:
        """Everything that is wrong with a document, or what it would change."""
        try:
            document = await asyncio.to_thread(read, text, "policy.yaml", self.world.sizes)
        except PolicyInvalid as invalid:
            return PolicyCheck(ok=False, issues=_issues(invalid))
        return PolicyCheck(ok=True, changes=diff(self.document, document))

    async def policy_preview(self, text: str) -> Preview:
        """What would start, leave and wait, beyond what happens anyway."""
        document = await self._read(text)
        rows = await self.world.rows()
        now = self.clock()
        as_it_is, as_it_would_be = self.world.snapshot(rows, now), self.world.snapshot(rows, now, document)
        before = await asyncio.to_thread(projection, as_it_is, rows)
        after = await asyncio.to_thread(projection, as_it_would_be, rows)
        waits = {id: said for id, (code, said) in after.waits.items() if before.waits.get(id, ("",))[0] != code}
        return Preview(
            starts=_effects(rows, after.starts, before.starts),
            leaves=_effects(rows, after.leaves, before.leaves),
            waits=_effects(rows, waits, ()),
            refused=_effects(rows, after.refused, before.refused),
        )

    async def policy_apply(self, caller: Caller, ask: PolicyAsk) -> PolicyVersion:
        """Put a document into force, unless somebody else changed it since `base`."""
        if not caller.sees_all:
            raise refuse("Only administrators can change the policy.", "forbidden", 403)
        document = await self._read(ask.document)
        now = self.clock()
        try:
            row = await self.read(self.store.add_policy, ask.document, caller.name, ask.comment, ask.base, now)
        except Conflict:
            current = await self.policy_current()
            raise refuse(
                f"Somebody changed the policy meanwhile: version {current.version} by {current.author} is in force, "
                f"your edit began with version {ask.base}. Look at theirs, then apply yours again.",
                "conflict",
                409,
                current=current.version,
            ) from None
        changes = diff(self.document, document)
        self.world.use(document, row.version)
        message = (
            f"{caller.name} put policy version {row.version} into force: {' '.join(changes) or 'nothing changed.'}"
        )
        said = NewDecision("policy", None, None, caller.name, "policy", message[:2000], {"version": row.version})
        await self.read(self.store.commit, [], [said], now=now)
        self.wake()
        return _version(row, whole=True)

    async def _read(self, text: str) -> Document:
        try:
            return await asyncio.to_thread(read, text, "policy.yaml", self.world.sizes)
        except PolicyInvalid as invalid:
            issues = _issues(invalid)
            first = issues[0]
            where = "".join(f"{part}: " for part in (first.line and f"line {first.line}", first.where) if part)
            more = "" if len(issues) == 1 else " (`makeway policy validate` lists all.)"
            raise MakewayError(
                f"The policy document has {count(len(issues), 'mistake')}; {where}{first.message}.{more}",
                code="policy_invalid",
                status=422,
                errors=[issue.model_dump() for issue in issues],
            ) from None


def _issues(invalid: PolicyInvalid) -> list[PolicyIssue]:
    return [PolicyIssue(file=i.file, line=i.line, where=i.where, message=i.message) for i in invalid.issues]


def _version(row: VersionRow, *, whole: bool = False) -> PolicyVersion:
    return PolicyVersion(
        version=row.version,
        at=at(row.at),
        author=row.author,
        comment=row.comment,
        document=row.document if whole else None,
    )


def _effects(rows: Mapping[str, Workload], said: Mapping[str, str], anyway: Collection[str]) -> list[WorkloadEffect]:
    """List what happens to whom, first submitted first; but not what happens `anyway`."""
    found = sorted((rows[id].submitted_at, id) for id in said if id not in anyway and id in rows)
    return [
        WorkloadEffect(id=id, name=rows[id].name, team=rows[id].team or "", owner=rows[id].owner, message=said[id])
        for _, id in found
    ]
