"""Read, validate, preview and apply the policy document."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import yaml
from makeway_api.models import PolicyCheck, PolicyIssue, PolicyRequest, PolicyVersion, Preview, WorkloadEffect
from makeway_api.quantities import listed

from ..control.world.pool_assignment import PoolAssignment
from ..engine.snapshot import ADMITTED, Snapshot
from ..policy import Document, Issue, PolicyInvalid, policy_diff, policy_warnings, read_policy
from ..store.errors import Conflict
from ..store.records import NewDecision, Workload
from ..store.records import PolicyVersion as VersionRow
from ..wording import outcomes
from .caller import Caller
from .context import Context
from .eligibility import title_of
from .machine_what_if import MachineWhatIf
from .projection import Projection, projection
from .refusals import busy, invalid_document, refuse, wire_issues
from .times import to_datetime

MAX_PREVIEWS = 4
"""Previews under way and waiting, of all users; one at a time is computed"""


class PolicyService:
    """The policy document and its versions. Leads of some teams see the policies of these teams only."""

    def __init__(self, context: Context, machines: MachineWhatIf) -> None:
        self._context, self._machines = context, machines
        self._previewing: set[str] = set()
        """The callers whose preview is under way or waits"""

    async def current(self, caller: Caller) -> PolicyVersion:
        """Return the document in force, as far as the caller may read it."""
        context = self._context
        row = await context.call(context.store.policies.current)
        if row is None:
            raise refuse("There is no policy document yet.", "not_found", 404)
        return self._shown(caller, row, self._readable(caller, row.document))

    async def history(self, caller: Caller) -> list[PolicyVersion]:
        """Return every version without its document, newest first."""
        context = self._context
        return [self._shown(caller, row) for row in await context.call(context.store.policies.history, documents=False)]

    async def version(self, caller: Caller, n: int) -> PolicyVersion:
        """Return one version with its document, as far as the caller may read it."""
        context = self._context
        row = await context.call(context.store.policies.version, n)
        if row is None:
            raise refuse(f"There is no version {n} of the policy.", "not_found", 404)
        return self._shown(caller, row, self._readable(caller, row.document))

    async def validate(self, caller: Caller, text: str) -> PolicyCheck:
        """Return everything that is wrong with a document, or what it would change for the caller's teams."""
        context = self._context
        try:
            document = await context.call(read_policy, text, "policy.yaml", context.world.sizes)
        except PolicyInvalid as invalid:
            return PolicyCheck(ok=False, issues=wire_issues(invalid.issues))
        teams = context.managed_teams(caller)
        issues = wire_issues([*await context.call(policy_warnings, text), *await self._without_sessions(document)])
        if teams is None:
            issues += [
                PolicyIssue(file="policy.yaml", where=f"profile {name}", message=f"{why[:1].upper()}{why[1:]}")
                for name, why in await context.backend.policy_notices(document)
            ]
            issues += await self._disabled_credentials(document)
            return PolicyCheck(ok=True, warnings=issues, changes=policy_diff(context.document, document))
        row = await context.call(context.store.policies.current)
        changes = await context.call(_diff_of_teams, row.document if row else text, text, teams)
        return PolicyCheck(ok=True, warnings=issues, changes=changes)

    async def _disabled_credentials(self, document: Document) -> list[PolicyIssue]:
        """Return the teams that a document does not have, and whose credentials it disables."""
        stored, names = await self._context.call(self._context.store.secrets.list), dict[str, list[str]]()
        for one in stored:
            if one.team and one.disabled_at is None and one.team not in document.teams:
                names.setdefault(one.team, []).append(one.name)
        return [
            PolicyIssue(file="policy.yaml", where="policies", message=outcomes.disabled_credentials(team, names[team]))
            for team in sorted(names)
        ]

    async def _without_sessions(self, document: Document) -> list[Issue]:
        """Return the profiles for notebooks that may go to pools whose backend holds none."""
        result = list[Issue]()
        for profile in document.profiles:
            pools = await self._machines.without_sessions(profile.pools) if profile.gpus else []
            if pools and "session" in document.profile_facts[profile.name].kinds:
                message = outcomes.no_sessions(title_of(document, profile), pools)
                result.append(Issue("policy.yaml", None, f"profiles.{profile.name}", message))
        return result

    async def preview(self, caller: Caller, text: str) -> Preview:
        """Return which workloads of the caller's teams would start, be evicted and wait, beyond what happens anyway."""
        if len(self._previewing) >= MAX_PREVIEWS:
            raise busy("Other previews are being computed: try again in a moment.", "previews_busy", 503, 5)
        if caller.name in self._previewing:
            raise busy("Your last preview is still being computed: wait for its end.", "preview_under_way", 429, 5)
        self._previewing.add(caller.name)
        try:
            return await self._preview(caller, text)
        finally:
            self._previewing.discard(caller.name)

    async def _preview(self, caller: Caller, text: str) -> Preview:
        context = self._context
        document = await self._read(text)
        rows = await context.world.rows()
        now = context.clock()
        current, proposed = context.world.snapshot(rows, now), context.world.proposed(rows, now, document)
        arguments = current, proposed, rows, context.world.assignment, caller.manages_all
        before, after, outside = await context.preview(_project_both, *arguments)
        teams = context.managed_teams(caller)
        shown = rows if teams is None else {id: row for id, row in rows.items() if row.team in teams}
        waits = {id: message for id, (code, message) in after.waits.items() if before.waits.get(id, ("",))[0] != code}
        return Preview(
            starts=_effects(shown, after.starts, before.starts),
            evicts=_effects(shown, after.evicts, before.evicts),
            waits=_effects(shown, waits, ()),
            refused=_effects(shown, after.refused, before.refused),
            outside=_effects(shown, outside, ()),
        )

    async def apply(self, caller: Caller, request: PolicyRequest) -> PolicyVersion:
        """Apply a document, unless another version came into force since `base`."""
        context = self._context
        if not caller.is_administrator:
            raise refuse("Only administrators can change the policy.", "forbidden", 403)
        document = await self._read(request.document)
        changes = await context.call(policy_diff, context.document, document)

        def decision(added: VersionRow) -> NewDecision:
            what = " ".join(changes) or "nothing changed."
            message = f"{added.author} put policy version {added.version} into force: {what}"
            return NewDecision("policy", None, None, added.author, "policy", message[:2000], {"version": added.version})

        try:
            row = await context.call(
                context.store.policies.add,
                request.document,
                caller.name,
                request.comment,
                request.base,
                context.clock(),
                decision,
                document.teams,
            )
        except Conflict:
            current = await self.current(caller)
            raise refuse(
                f"The policy changed meanwhile: version {current.version} by {current.author} is in force, "
                f"your edit is based on version {request.base}. Look at the new version, then apply yours again.",
                "conflict",
                409,
                current=current.version,
            ) from None
        context.world.use(document, row.version)
        context.wake()
        return _version(row, row.document)

    def _shown(self, caller: Caller, row: VersionRow, document: str | None = None) -> PolicyVersion:
        """Return a version; a lead of some teams gets author and comment of the own versions only."""
        version = _version(row, document)
        if self._context.managed_teams(caller) is None or row.author == caller.name:
            return version
        return version.model_copy(update={"author": "", "comment": ""})

    def _readable(self, caller: Caller, text: str) -> str:
        """Return the text of a document without the policies of teams that the caller may not read."""
        teams = self._context.managed_teams(caller)
        return text if teams is None else _text_of_teams(text, teams)

    async def _read(self, text: str) -> Document:
        try:
            return await self._context.call(read_policy, text, "policy.yaml", self._context.world.sizes)
        except PolicyInvalid as invalid:
            raise invalid_document(
                invalid, "The policy document", "policy_invalid", "makeway policy validate"
            ) from None


def _project_both(
    current: Snapshot,
    proposed: Callable[[], tuple[Snapshot, PoolAssignment]],
    rows: Mapping[str, Workload],
    pools: PoolAssignment,
    all_names: bool,
) -> tuple[Projection, Projection, dict[str, str]]:
    """Return what happens anyway, what a document does, and what goes on outside of every pool with it."""
    before = projection(current, rows, all_names=all_names)
    snapshot, proposed_pools = proposed()
    after = projection(snapshot, rows, all_names=all_names)
    return before, after, _outside_of_pools(rows, pools, proposed_pools, after.evicts)


def _outside_of_pools(
    rows: Mapping[str, Workload], pools: PoolAssignment, proposed_pools: PoolAssignment, evicted: Collection[str]
) -> dict[str, str]:
    """Return the workloads that go on on GPUs which no pool has any more, with a sentence about where."""
    result: dict[str, str] = {}
    for row in rows.values():
        if row.state in ADMITTED and row.id not in evicted:
            lost = pools.pooled(row.placement) - proposed_pools.pooled(row.placement)
            where = listed(f"GPU {index} of {node}" for node, index in sorted(lost))
            if lost:
                them = "which is then in no pool" if len(lost) == 1 else "which are then in no pool"
                result[row.id] = f"It goes on on {where}, {them}, until it ends, and counts as before."
    return result


def _diff_of_teams(old: str, new: str, teams: Collection[str]) -> list[str]:
    """Return what changes for some teams: both documents are reduced to them first."""
    return list(policy_diff(*(read_policy(_text_of_teams(text, teams), "policy.yaml") for text in (old, new))))


def _text_of_teams(text: str, teams: Collection[str]) -> str:
    """Return a valid document with the policies of `teams` only, and a comment that says so."""
    whole = yaml.safe_load(text)
    policies = whole.get("policies") or []
    by_name = {policy.get("name"): policy for policy in policies}
    shown = {name: policy for name, policy in by_name.items() if name in teams}
    for policy in [*shown.values()]:
        while (parent := by_name.get(policy.get("parent"))) is not None and parent["name"] not in shown:
            shown[parent["name"]] = {key: parent[key] for key in ("name", "title", "parent") if key in parent}
            policy = parent
    profiles = [_profile_of_teams(profile, shown) for profile in whole.get("profiles") or []]
    part = {**whole, "profiles": profiles, "policies": [shown[name] for name in by_name if name in shown]}
    own_teams = sum(name in teams for name in shown)
    return (
        f"# Only the policies of your teams: {own_teams} of {len(policies)}.\n"
        f"{yaml.safe_dump(part, sort_keys=False, allow_unicode=True)}"
    )


def _profile_of_teams(profile: Mapping[str, Any], shown: Collection[str]) -> dict[str, Any]:
    """Return a profile without the names of other teams."""
    ranks = profile.get("policies")
    if ranks is None:
        return dict(profile)
    nested = [rank if isinstance(rank, list) else [rank] for rank in ranks]
    kept = [[name for name in rank if name in shown] for rank in nested]
    return {**profile, "policies": [rank for rank in kept if rank]}


def _version(row: VersionRow, document: str | None = None) -> PolicyVersion:
    return PolicyVersion(
        version=row.version, at=to_datetime(row.at), author=row.author, comment=row.comment, document=document
    )


def _effects(rows: Mapping[str, Workload], effects: Mapping[str, str], anyway: Collection[str]) -> list[WorkloadEffect]:
    """Return an effect for each workload, first submitted first, without those that happen `anyway`."""
    ordered = sorted((rows[id].submitted_at, id) for id in effects if id not in anyway and id in rows)
    return [
        WorkloadEffect(id=id, name=rows[id].name, team=rows[id].team or "", owner=rows[id].owner, message=effects[id])
        for _, id in ordered
    ]
