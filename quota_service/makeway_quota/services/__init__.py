"""Answer the web: one class for each noun, put together in `Services`.

Requests read the read model and the store, write through the store, and wake the loop; they plan only for what-if.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..control.components import Components
from .caller import Caller
from .cluster.agents import AgentService
from .cluster.inventory import InventoryService
from .cluster.offers import OfferService
from .cluster.stuck_workloads import StuckWorkloadService
from .cluster.usage import UsageService
from .context import Context
from .jobs.attempts import AttemptService
from .jobs.job_access import JobAccess
from .jobs.jobs import JobService
from .jobs.listing import ListingService
from .jobs.outputs import OutputService
from .jobs.queue_moves import QueueMoveService
from .jobs.storage import StorageService
from .jobs.submissions import SubmissionService
from .log.audit import AuditService
from .log.event_feed import EventFeed
from .log.growth import GrowthService
from .machine_what_if import MachineWhatIf
from .machines.credentials import CredentialService
from .machines.deployments import DeploymentService
from .machines.machines import MachineService
from .people import PeopleService
from .policies import PolicyService
from .sessions import SessionService


@dataclass(frozen=True, slots=True)
class Services:
    """The services of one process. Every method may raise MakewayError; none calls back into the web."""

    context: Context
    feed: EventFeed
    jobs: JobService
    submissions: SubmissionService
    moves: QueueMoveService
    outputs: OutputService
    sessions: SessionService
    inventory: InventoryService
    listings: ListingService
    offers: OfferService
    usage: UsageService
    policies: PolicyService
    people: PeopleService
    audit: AuditService
    attempts: AttemptService
    agents: AgentService
    storage: StorageService
    stuck_workloads: StuckWorkloadService
    growth: GrowthService
    deployments: DeploymentService
    credentials: CredentialService
    machines: MachineService

    @classmethod
    def of(cls, parts: Components, wake: Callable[[], None], wake_at_once: Callable[[], None]) -> Services:
        """Construct the services of a process; `wake` and `wake_at_once` request a cycle of the loop."""
        context = Context.of(parts, wake, wake_at_once)
        feed = EventFeed(parts.store, context.call)
        machines = MachineWhatIf(context, dict if parts.machines is None else parts.machines.cluster_machines)
        access, offers = JobAccess(context), OfferService(context, machines)
        credentials = CredentialService(context)
        return cls(
            context=context,
            feed=feed,
            jobs=JobService(context, access),
            submissions=SubmissionService(context, access, offers),
            moves=QueueMoveService(context, access),
            outputs=OutputService(context, access),
            sessions=SessionService(context, machines),
            inventory=InventoryService(context),
            listings=ListingService(context),
            offers=offers,
            usage=UsageService(context),
            policies=PolicyService(context, machines),
            people=PeopleService(context),
            audit=AuditService(context, feed),
            attempts=AttemptService(context, parts.channel, credentials),
            agents=AgentService(
                context, parts.machines, parts.channel, None if parts.feed is None else parts.feed.catch_up
            ),
            storage=StorageService(context, access),
            stuck_workloads=StuckWorkloadService(context, parts.servers),
            growth=GrowthService(context),
            deployments=DeploymentService(context),
            credentials=credentials,
            machines=MachineService(context),
        )

    def close(self) -> None:
        """End the threads of the requests."""
        self.submissions.close()
        self.context.close()


__all__ = ["Caller", "Services"]
