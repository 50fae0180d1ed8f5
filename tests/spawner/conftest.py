"""The quota service that a spawner of the tests asks for its lease."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from makeway_api.client import AsyncClient
from makeway_spawner import service
from spawner.quota_fake import URL, QuotaFake, app


@pytest.fixture
async def quota() -> AsyncIterator[QuotaFake]:
    fake = QuotaFake()
    client = AsyncClient(URL, "t", transport=httpx2.ASGITransport(app=app(fake)))
    service._CLIENTS[(URL, "t")] = client
    yield fake
    await client.close()
    del service._CLIENTS[(URL, "t")]
