"""What the backend for pods says while it cannot reach the API server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from api_server import ApiServer
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable
from makeway_quota.store.store import open_store
from pod_backend import Backend

HINT = "networkPolicy.apiServer.ports"
"""The chart's value by which pods reach an API server at another port."""


@pytest.mark.parametrize("in_pod", [True, False])
@pytest.mark.parametrize(
    ("error", "hinted"),
    [
        (ApiUnreachable("the Kubernetes API server does not answer"), True),
        (ApiUnreachable("the Kubernetes API server cannot be reached: [Errno 113] No route to host"), True),
        (ApiStatusError(403, "Forbidden", "pods is forbidden"), False),
    ],
)
async def test_where_the_api_server_never_answered_a_pod_the_value_that_may_be_wrong_is_named(
    tmp_path: Path, error: Exception, hinted: bool, in_pod: bool
) -> None:
    server = ApiServer()
    if in_pod:
        server.connection = replace(server.connection, token_file=tmp_path / "token")
    backend = Backend(server, open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}"))
    backend.pods.problem = str(error)
    assert backend.problem.startswith(str(error))
    assert (HINT in backend.problem) is (hinted and in_pod)


async def test_a_pod_that_was_answered_before_has_the_right_port(tmp_path: Path) -> None:
    server = ApiServer()
    server.connection = replace(server.connection, token_file=tmp_path / "token")
    backend = Backend(server, open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}"))
    await backend.open()
    try:
        await backend.pods.wait_synced()
        backend.pods.problem = "the Kubernetes API server does not answer"
        assert backend.problem == backend.pods.problem
    finally:
        await backend.close(stop_jobs=False)
