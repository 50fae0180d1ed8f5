"""The retention, for administrators: what is kept, for how long, and what the last pass removed."""

from __future__ import annotations

from fastapi import APIRouter
from makeway_api.models import RetentionReport

from ..dependencies import Admin, ServicesDep
from ..server.problems import problems

router = APIRouter(tags=["retention"], responses=problems())


@router.get("/retention", operation_id="retention", response_model=RetentionReport)
async def retention(caller: Admin, services: ServicesDep) -> RetentionReport:
    """Return what is kept, for how long, how much there is, and what the last pass removed."""
    return await services.audit.retention()
