"""The API's own description (OpenAPI), with the one shape that all refusals have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from makeway_api.models import Problem


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Make the function that FastAPI calls for the document; it is written once."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, tags=TAGS
            )
            schemas = whole.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = whole
        return app.openapi_schema

    return document


TAGS = [
    {"name": "inventory", "description": "What there is, who uses it, what was decided, and what happens now."},
    {"name": "sessions", "description": "Leases of interactive sessions, for the Hub's spawner."},
    {"name": "jobs", "description": "Training jobs."},
    {"name": "attempts", "description": "Workers that are no processes of the service: their launcher calls these."},
    {"name": "agents", "description": "Machines of deployments that have joined: their agent calls these."},
    {"name": "policy", "description": "The policy document and its versions."},
    {"name": "deployments", "description": "Deployments of machines, their machines and their log."},
]
