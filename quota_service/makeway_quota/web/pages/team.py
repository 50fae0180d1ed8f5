"""The page of one team: usage, quota, queue, what runs and what was decided."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from makeway_api.errors import MakewayError
from makeway_api.models import Policy

from ...services import Caller, Services
from ..dependencies import ServicesDep
from ..settings import WebSettings
from .access import PageVisitor
from .figures.sharing import view_of
from .panel import gather
from .parts import PartSource, shared_page

router = APIRouter(include_in_schema=False)


@router.get("/teams/{team}")
@router.get("/live/teams/{team}")
async def team_page(request: Request, team: str, visitor: PageVisitor, services: ServicesDep) -> Response:
    """One team, whole or (below live/) only its changing part."""
    await _policy(services, visitor.caller, team)  # a refusal waits for no rendering
    return await shared_page(request, visitor, team_part(services, visitor.caller, request.app.state.settings, team))


def team_part(services: Services, caller: Caller, settings: WebSettings, team: str) -> PartSource:
    """Return the changing part of a team's page for a caller; gathering it refuses those who may not see the team."""

    async def collect() -> dict[str, Any]:
        policy = await _policy(services, caller, team)
        panel = await gather(services, caller, settings, team)
        return {"panel": panel, "policy": policy, "team": team, "display": panel.display, "virtual": panel.virtual}

    return PartSource("team", lambda: (team, *view_of(services, caller)), collect, ("team", "display", "virtual"))


async def _policy(services: Services, caller: Caller, team: str) -> Policy:
    policies = await services.inventory.policies(caller)
    policy = next((policy for policy in policies if policy.name == team), None)
    if policy is None:
        raise _unknown_team(caller, team)
    return policy


def _unknown_team(caller: Caller, team: str) -> MakewayError:
    if caller.admin:
        return MakewayError(f"There is no team {team[:80]}.", code="not_found", status=404)
    return MakewayError(
        f"You are not in the team {team[:80]}, so its page is not for you. "
        "An administrator of the Hub can add you to its group.",
        code="foreign_team",
        status=403,
    )
