"""Answer the web: one class for each noun, put together in `Services`.

Requests read the read model and the store, write through the store, and wake the loop; they plan only for what-if.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..control.components import Components
from .attempts import AttemptService
from .audit import AuditService
from .caller import Caller
from .context import Context
from .event_feed import EventFeed
from .growth import GrowthService
from .hanging import HangingService
from .inventory import InventoryService
from .job_access import JobAccess
from .jobs import JobService
from .listing import ListingService
from .offers import OfferService
from .outputs import OutputService
from .people import PeopleService
from .policies import PolicyService
from .queue_moves import QueueMoveService
from .sessions import SessionService
from .storage import StorageService
from .submissions import SubmissionService
from .usage import UsageService


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
    storage: StorageService
    hanging: HangingService
    growth: GrowthService

    @classmethod
    def of(cls, parts: Components, wake: Callable[[], None], wake_at_once: Callable[[], None]) -> Services:
        """Construct the services of a process; `wake` and `wake_at_once` request a cycle of the loop."""
        context = Context.of(parts, wake, wake_at_once)
        feed = EventFeed(parts.store, context.call)
        access, offers = JobAccess(context), OfferService(context)
        return cls(
            context=context,
            feed=feed,
            jobs=JobService(context, access),
            submissions=SubmissionService(context, access, offers),
            moves=QueueMoveService(context, access),
            outputs=OutputService(context, access),
            sessions=SessionService(context),
            inventory=InventoryService(context),
            listings=ListingService(context),
            offers=offers,
            usage=UsageService(context),
            policies=PolicyService(context),
            people=PeopleService(context),
            audit=AuditService(context, feed),
            attempts=AttemptService(context, parts.channel),
            storage=StorageService(context, access),
            hanging=HangingService(context, parts.servers),
            growth=GrowthService(context),
        )

    def close(self) -> None:
        """End the threads of the requests."""
        self.submissions.close()
        self.context.close()


__all__ = ["Caller", "Services"]
