"""An API server that does not take the credentials of the service: the refusal says what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiStatusError
from makeway_quota.backends.kubernetes.api.connection import from_kubeconfig, from_pod

STATUS = {"kind": "Status", "status": "Failure", "message": "Unauthorized", "reason": "Unauthorized", "code": 401}


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """The address of an API server that knows no one."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(STATUS).encode()
        head = f"HTTP/1.1 401 Unauthorized\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await listening.wait_closed()


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ({"token": "secret"}, "make a new one by `kubectl create token`, put it there, and restart the service"),
        ({"tokenFile": "token"}, r"write a new one into its file \(tokenFile\)"),
        ({}, "add a token or a client certificate, and restart"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_credentials_that_have_expired_are_named_with_what_to_do(
    tmp_path: Path, server: str, user: dict[str, Any], said: str, streamed: bool
) -> None:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
    }
    (tmp_path / "token").write_text("secret")
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    client = ApiClient(from_kubeconfig(tmp_path / "kubeconfig"))
    with pytest.raises(ApiStatusError, match=rf"\(401 Unauthorized\): Unauthorized; .*{said}$") as refused:
        await (client.stream("/api/v1/nodes", {}, 5.0).__aenter__() if streamed else client.get("/api/v1/nodes"))
    assert "secret" not in str(refused.value)
    await client.close()


def test_a_pod_gets_a_new_token_when_it_starts_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_text("")
    result = from_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    assert result.renewal.endswith("restart the pod")
