"""Find jobs for a caller: which ones it may see, read and change."""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.models import Job

from ...backends.machines.machine_source import BACKEND as MACHINES
from ...control.machines.channel import options_of
from ...control.reads.read_model import ReadModel
from ...engine.snapshot import ADMITTED
from ...store.records import Attempt, Workload
from ...store.reports.progress import ProgressRow
from ...wording import outcomes
from .. import views
from ..caller import Caller
from ..context import Context
from ..privacy import may_read, private_job
from ..refusals import refuse, removed


class JobAccess:
    """Access to jobs: live ones in memory, ended ones in the store. A job that a caller may not see does not exist."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def visible(self, caller: Caller, id: str) -> Workload:
        """Return a job that the caller may see: its own, or one of a visible team."""
        context = self._context
        row = await context.world.row(id) or await context.call(context.store.workload, id)
        teams = context.visible_teams(caller)
        visible = row is not None and (teams is None or row.owner == caller.name or row.team in teams)
        if row is None and (removal := await context.call(context.store.pruning.removed, id)) is not None:
            own = removal.owner == caller.name
            if removal.kind == "job" and (teams is None or own or removal.team in teams):
                raise removed(f"The job “{id[:80]}”", context.settings.keep_workloads_days)
        if row is None or row.kind != "job" or not visible:
            raise refuse(f"There is no job “{id[:80]}” that you may see.", "not_found", 404)
        return row

    async def readable(self, caller: Caller, id: str) -> Workload:
        """Return a job whose log, result and files the caller may read."""
        row = await self.visible(caller, id)
        if not self.may_read(caller, row):
            raise refuse(
                f"{row.name} belongs to {row.owner}, and its code, log and results are private: ask {row.owner} for "
                "its log, result or files, or a lead of the team.",
                "not_yours",
                403,
            )
        return row

    async def changeable(self, caller: Caller, id: str, what: str) -> Workload:
        """Return a job that the caller may change: its own, or one of a team that it leads."""
        row = await self.visible(caller, id)
        if row.owner != caller.name and not self._context.manages(caller, row.team):
            raise refuse(
                f"{row.name} belongs to {row.owner}: only they or a team lead can {what} it.", "not_yours", 403
            )
        return row

    def may_read(self, caller: Caller, row: Workload) -> bool:
        """Whether the caller may read what a job runs and wrote."""
        return may_read(self._context, caller, row.owner, row.team)

    async def shown(self, caller: Caller, row: Workload, *, whole: bool = False) -> Job:
        """Return a job as the caller may see it; `whole` with its attempts and source."""
        context = self._context
        attempts: Sequence[Attempt] = ()
        if whole and (stored := await context.call(context.store.with_attempts, row.id)) is not None:
            row, attempts = stored
        model = await context.read_models.current() if row.state in ADMITTED else None
        progress = await context.call(context.store.progress.of, [row.id])
        result = self.view(caller, row, model, attempts, progress.get(row.id), whole=True)
        if result.image is None:
            result.image = await self._image_of_machine(row, attempts)
        return result

    async def _image_of_machine(self, row: Workload, attempts: Sequence[Attempt]) -> str | None:
        """Return the image that the machine of a job's newest attempt has for jobs that name none."""
        placement = row.placement or (attempts[-1].placement if attempts else ())
        if MACHINES not in self._context.settings.backends or not placement:
            return None
        if placement[0].backend not in (MACHINES, ""):
            return None  # a place has no backend where there is only one
        machine = await self._context.call(self._context.store.machines.machine, placement[0].node)
        return None if machine is None else options_of(machine.request).image

    def view(
        self,
        caller: Caller,
        row: Workload,
        model: ReadModel | None,
        attempts: Sequence[Attempt] = (),
        progress: ProgressRow | None = None,
        *,
        whole: bool = False,
    ) -> Job:
        """Return a job as the caller may see it, from what was read of it, and its quota as it is in the model.

        Only work that holds something needs a model.
        """
        context = self._context
        row = model.present(row) if model is not None else row
        world = context.world
        durable = world.has_durable_checkpoints(row)
        now = context.clock()
        job = views.job(
            row, virtual=world.virtual, durable=durable, attempts=attempts, now=now, problem=world.problem_of(row)
        )
        job.titles = {team: title for team in views.teams_of(job) if (title := context.title(team)) != team}
        job.progress = views.progress_model(progress, now, running=row.state in ADMITTED, whole=whole)
        if row.live and (warning := views.slow_save(progress, row.grace)):
            job.warnings = [f"{warning[0].upper()}{warning[1:]}: {outcomes.FASTER_SAVES}."]
        if self.may_read(caller, row):
            return job
        return private_job(job)
