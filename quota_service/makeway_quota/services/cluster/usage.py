"""Return the current usage of teams, from the read model, and what Prometheus may scrape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from makeway_api.models import Lending, TeamUsage, Usage

from ... import metrics
from ...autoscale.budget import count_money
from ...autoscale.document import read_deployment
from ...control.reads.read_model import ReadModel, TeamLoad
from ...engine.rules.usage import TeamCount
from ...engine.snapshot import TeamQuota
from ...policy import PolicyInvalid
from ...store.records import StoredDeployment
from ...store.store import Store
from ..caller import Caller
from ..context import Context
from ..health import WORKING, checks
from ..times import to_datetime
from ..views import gpu


class UsageService:
    """Usage of teams and of the cluster."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def usage(self, caller: Caller) -> Usage:
        """Return the usage of the teams that the caller may see, and of the cluster as a whole."""
        model = await self._context.read_models.current()
        return usage_model(model, self._context.visible_teams(caller), caller.name, self._context.world.problem)

    async def metrics(self) -> bytes:
        """Return everything that Prometheus may scrape, as of now."""
        model = await self._context.read_models.current()
        parts = {part: state == WORKING[part] for part, state in checks(self._context).items()}
        now = self._context.clock()
        deployments = await self._context.call(measure_deployments, self._context.store, now)
        metrics.show(usage_model(model, None, ""), model.workloads, parts)
        metrics.show_deployments(deployments, now)
        return metrics.render()


def usage_model(model: ReadModel, teams: Sequence[str] | None, user: str, problem: str | None = None) -> Usage:
    """Return the usage of `teams` (None: all) as the API shows it."""
    return Usage(
        at=to_datetime(model.at),
        teams=team_usages(model, teams, user),
        total=model.total,
        used=gpu(model.used),
        free=gpu(model.free),
        virtual=model.virtual,
        problem=problem,
    )


def team_usages(model: ReadModel, teams: Sequence[str] | None, user: str) -> list[TeamUsage]:
    """Return the usage of `teams` (None: all) in the order of the policy document; `mine` counts the GPUs of `user`.

    Where all are shown, teams that were removed follow for as long as they use GPUs, in the order of their names.
    """
    lent_to: dict[str, list[Lending]] = {}
    for team, count in model.usage.items():
        for lender, milli in count.borrowed_from:
            lent_to.setdefault(lender, []).append(_lending(model, team, milli))
    result = [
        _team_usage(model, policy, model.usage[policy.name], user, lent_to.get(policy.name, []))
        for policy in model.document.policies
        if (teams is None or policy.name in teams) and policy.name in model.usage
    ]
    return result if teams is not None else [*result, *_removed_teams(model, user)]


def _lending(model: ReadModel, team: str, milli: int) -> Lending:
    """Return GPUs of one team that run another team's jobs; `team` is the other side."""
    policy = model.document.policy(team)
    return Lending(team=team, title=policy.label if policy else "", gpus=gpu(milli))


def _removed_teams(model: ReadModel, user: str) -> Iterator[TeamUsage]:
    """Yield the usage of the teams that still use GPUs although the policy has them no more."""
    known = {policy.name for policy in model.document.policies}
    for name in sorted(model.usage.keys() - known):
        usage = _team_usage(model, TeamQuota(name, title=f"{name} (removed)"), model.usage[name], user, [])
        if usage.used:
            yield usage.model_copy(update={"removed": True})


def _team_usage(model: ReadModel, policy: TeamQuota, count: TeamCount, user: str, lent_to: list[Lending]) -> TeamUsage:
    load = model.loads.get(policy.name, TeamLoad())
    return TeamUsage(
        team=policy.name,
        title=policy.label,
        reserved=gpu(count.reserved),
        limit=None if count.limit is None else gpu(count.limit),
        used=gpu(count.guaranteed + count.in_quota + count.borrowed),
        guaranteed=gpu(count.guaranteed),
        in_quota=gpu(count.in_quota),
        borrowed=gpu(count.borrowed),
        lent=gpu(count.lent),
        free=gpu(max(0, count.reserved - count.guaranteed - count.in_quota - count.lent)),
        mine=gpu(model.held_by.get((policy.name, user), 0)),
        waiting=load.waiting,
        running=load.running,
        borrowed_from=[_lending(model, team, milli) for team, milli in count.borrowed_from],
        lent_to=lent_to,
    )


def measure_deployments(store: Store, now: float) -> list[metrics.DeploymentNumbers]:
    """Return what is measured of each deployment of machines, as the database has it; for worker threads."""
    return [_measured(store, stored, now) for stored in store.deployments.list()]


def _measured(store: Store, stored: StoredDeployment, now: float) -> metrics.DeploymentNumbers:
    rows = store.machines.read(stored.name)
    try:
        deployment = read_deployment(stored.document, stored.name, stored=True)
    except PolicyInvalid:
        return metrics.DeploymentNumbers(stored.name, None, rows.machines, rows.backoffs)
    money = count_money(deployment, rows.machines, rows.closed_spend, now)
    return metrics.DeploymentNumbers(stored.name, deployment, rows.machines, rows.backoffs, money)
