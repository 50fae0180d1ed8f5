"""Act on everything of one person, for administrators."""

from __future__ import annotations

from fastapi import APIRouter
from makeway_api.models import GiveRequest, PersonRequest, PersonWork

from ..dependencies import AdminByToken, ServicesDep
from ..server.problems import problems

router = APIRouter(prefix="/people", tags=["people"], responses=problems(404, 409))


@router.post("/cancel", operation_id="cancel_all_of", response_model=PersonWork)
async def cancel_all_of(caller: AdminByToken, services: ServicesDep, request: PersonRequest) -> PersonWork:
    """Cancel every job of a person that has not ended; a repetition changes nothing."""
    return await services.people.cancel_all(caller, request.name)


@router.post("/give", operation_id="give_work", response_model=PersonWork)
async def give_work(caller: AdminByToken, services: ServicesDep, request: GiveRequest) -> PersonWork:
    """File the work of a deleted person under the name of a user."""
    return await services.people.give(caller, request.name, request.to)
