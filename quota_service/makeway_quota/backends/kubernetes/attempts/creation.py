"""Create the objects of an attempt once, however often its start is repeated; called by the backend."""

from __future__ import annotations

from makeway_api.pods import INSTANCE

from ..api.client import ApiClient, ApiStatusError, Object
from ..pods.gang import path_of
from ..pods.manifest import PodSettings
from .pod_states import seconds_of

MAX_CLOCK_SKEW = 120.0
"""Seconds by which the clocks of the API server and of the service may differ."""


async def create_once(client: ApiClient, settings: PodSettings, manifest: Object, since: float | None = None) -> Object:
    """Create an object; return the one that is there already, if it is of this installation.

    A pod from before `since` is of an attempt that a restored database does not know: it is deleted.
    """
    path = path_of(manifest, settings.namespace)
    try:
        return await client.create(path, manifest)
    except ApiStatusError as refusal:
        if refusal.reason != "AlreadyExists":
            raise
    name = manifest["metadata"]["name"]
    if manifest["kind"] != "Pod":  # it may belong to pods of an earlier try, and would go with them
        await client.delete(f"{path}/{name}")
        return await client.create(path, manifest)
    try:
        result = await client.get(f"{path}/{name}")
    except ApiStatusError as refusal:
        if refusal.status == 404:  # which would mean that the installation lacks something
            raise ApiStatusError(409, "Conflict", f"{name} was there, and was just removed") from refusal
        raise
    if (result["metadata"].get("labels") or {}).get(INSTANCE) != settings.instance:
        raise ApiStatusError(409, "AlreadyExists", f"{name} belongs to another installation")
    if since is not None and seconds_of(result["metadata"].get("creationTimestamp")) < since - MAX_CLOCK_SKEW:
        await client.delete(f"{path}/{name}", uid=result["metadata"]["uid"])
        raise ApiStatusError(409, "Conflict", f"{name} is from an earlier time and is being removed")
    return result
