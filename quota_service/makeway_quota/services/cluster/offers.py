"""Show what a user can have now, from which teams, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from makeway_api.models import Kind, Offer, OfferTable, Reason, Victim

from ...control.world.names import names_of
from ...engine.plan import Offer as EngineOffer
from ...engine.plan import OfferVictim
from ...engine.snapshot import Profile
from ...wording import outcomes, sentence
from ..caller import Caller
from ..context import Context
from ..eligibility import title_of
from ..machine_what_if import MachineWhatIf
from ..times import to_datetime
from ..views import gpu
from .inventory import profile_model, usable
from .offer_engine import Answer, OfferEngine
from .usage import team_usages

OFFER_CODES = {"wait": "waits"}


class OfferService:
    """Offers for every profile and team of a user (N03)."""

    def __init__(self, context: Context, machines: MachineWhatIf) -> None:
        self._context = context
        self._machines = machines
        self._engine = OfferEngine(context, machines=machines)

    async def offers(self, caller: Caller, user: str, groups: Sequence[str], kind: str) -> OfferTable:
        """Return what `user` can have now with every profile in every team of theirs."""
        context, wanted = self._context, Kind(kind)
        document = context.document
        teams = context.teams_of_user(user, groups)
        profiles = [p for p in usable(document, teams, wanted) if kind in document.profile_facts[p.name].kinds]
        offers: list[Offer] = []
        places: list[tuple[str, str]] = []
        for profile in profiles:
            if wanted is Kind.SESSION and document.queue_open(None, profile.name):
                message = "Ready now: it needs no GPU."
                offers.append(
                    Offer(profile=profile.name, team=None, kind=wanted, code="ready_now", message=message, seconds=0)
                )
                continue
            pools = await self._machines.without_sessions(profile.pools) if wanted is Kind.SESSION else []
            if pools:
                offers += [
                    self._not_for_notebooks(profile, team, pools)
                    for team in teams
                    if document.queue_open(team, profile.name)
                ]
                continue
            places += [(team, profile.name) for team in teams if document.queue_open(team, profile.name)]
        engine = self._engine
        answers = await engine.answers(places, wanted.value, user)
        offers += [await self._shown(answer, wanted) for answer in answers]
        model = await context.read_models.current()
        order = {profile.name: rank for rank, profile in enumerate(profiles)}
        return OfferTable(
            user=user,
            teams=list(teams),
            profiles=[profile_model(document, p) for p in profiles],
            offers=sorted(offers, key=lambda offer: order[offer.profile]),
            usage=team_usages(model, teams, user),
            virtual=context.world.virtual,
            problem=context.world.problem,
            at=to_datetime(min((answer.as_of for answer in answers), default=model.at)),
        )

    def _not_for_notebooks(self, profile: Profile, team: str, pools: Sequence[str]) -> Offer:
        """Return the refusal of a profile whose pools are of a backend that holds no notebooks."""
        message = outcomes.no_sessions(title_of(self._context.document, profile), pools)
        return Offer(
            profile=profile.name,
            team=team,
            team_title=self._context.title(team),
            kind=Kind.SESSION,
            code="refused",
            message=message,
            reason=Reason(code="no_sessions", message=message),
        )

    async def offer(self, team: str, profile: str, kind: Kind, user: str) -> tuple[Offer, bool]:
        """Return what one request would get, and whether it would run in quota."""
        answer = await self._engine.answer(team, profile, kind.value, user)
        return await self._shown(answer, kind), answer.offer.in_quota

    async def _shown(self, answer: Answer, kind: Kind) -> Offer:
        """Return an offer with its sentence, written once for each answer of the engine and each policy document."""
        document, known = self._context.document, answer.shown.last
        if known is None or known[0] is not document:
            known = answer.shown.last = document, await self._offer(answer.offer, kind)
        return known[1]

    async def _offer(self, offer: EngineOffer, kind: Kind) -> Offer:
        rows = await self._context.world.rows()
        document = self._context.document
        message = sentence(offer.facts, names_of(document.policies, rows, document).to(offer.team))
        return Offer(
            profile=offer.profile,
            team=offer.team,
            team_title=self._context.title(offer.team),
            kind=kind,
            code=OFFER_CODES.get(offer.code, offer.code),
            message=message,
            seconds=None if offer.seconds is None or offer.code in ("wait", "refused") else round(offer.seconds),
            victims=[await self._victim(victim, offer.team) for victim in (*offer.victims, *offer.moved)],
            reason=Reason(code=offer.reason, message=message, numbers=dict(offer.numbers)),
        )

    async def _victim(self, victim: OfferVictim, team: str) -> Victim:
        """Return a victim as the members of a team see it: that of another team is a job of that team, no more."""
        title = self._context.title(victim.team)
        if victim.team != team:
            return Victim(id="", name="", team=victim.team, team_title=title, owner="", gpus=gpu(victim.gpus))
        row = await self._context.world.row(victim.id)
        return Victim(
            id=victim.id,
            name=row.name if row else victim.id,
            team=victim.team,
            team_title=title,
            owner=victim.owner,
            gpus=gpu(victim.gpus),
        )
