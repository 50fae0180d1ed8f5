"""The policy document over the counter: read, validate, preview and put into force."""

from __future__ import annotations

import asyncio

from makeway_api.errors import MakewayError
from makeway_api.models import PolicyAsk, PolicyCheck, PolicyIssue, PolicyVersion, Preview, WorkloadEffect

from ..engine.schedule import schedule
from ..phrases import count
from ..policy import Document, PolicyInvalid, diff, read
from ..store.errors import Conflict
from ..store.records import NewDecision, Workload
from ..store.records import PolicyVersion as VersionRow
from .caller import Caller
from .core import Core, at, refuse


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
            document = await asyncio.to_thread(read, text, "policy.yaml", self.watch.sizes)
        except PolicyInvalid as invalid:
            return PolicyCheck(ok=False, issues=_issues(invalid))
        return PolicyCheck(ok=True, changes=diff(self.document, document))

    async def policy_preview(self, text: str) -> Preview:
        """What would start, leave and wait, beyond what happens anyway."""
        document = await self._read(text)
        rows = await self.watch.rows()
        now = self.clock()
        before = await asyncio.to_thread(schedule, self.watch.snapshot(rows, now))
        after = await asyncio.to_thread(schedule, self.watch.snapshot(rows, now, document))
        anyway = {s.id for s in before.start} | {e.id for e in before.evict} | {m.id for m in before.move}
        waiting = {item.id: item.code for item in before.pending}
        return Preview(
            starts=[_effect(rows, s.id, s.message) for s in after.start if s.id not in anyway],
            leaves=[_effect(rows, e.id, e.message) for e in after.evict if e.id not in anyway]
            + [_effect(rows, m.id, m.message) for m in after.move if m.id not in anyway],
            waits=[_effect(rows, w.id, w.message) for w in after.pending if waiting.get(w.id) != w.code],
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
        self.watch.use(document, row.version)
        message = (
            f"{caller.name} put policy version {row.version} into force: {' '.join(changes) or 'nothing changed.'}"
        )
        said = NewDecision("policy", None, None, caller.name, "policy", message[:2000], {"version": row.version})
        await self.read(self.store.commit, [], [said], now=now)
        self.wake()
        return _version(row, whole=True)

    async def _read(self, text: str) -> Document:
        try:
            return await asyncio.to_thread(read, text, "policy.yaml", self.watch.sizes)
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


def _effect(rows: dict[str, Workload], id: str, message: str) -> WorkloadEffect:
    row = rows[id]
    return WorkloadEffect(id=id, name=row.name, team=row.team or "", owner=row.owner, message=message)
