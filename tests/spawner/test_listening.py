"""The wait for a server that was started ends as soon as it accepts a connection."""

from __future__ import annotations

import asyncio
import socket

import pytest
from makeway_spawner import listening


@pytest.mark.parametrize("form", ["pair", "url"])
async def test_it_ends_when_the_server_listens_and_not_before(form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    waiting = asyncio.ensure_future(
        listening.wait(("127.0.0.1", port) if form == "pair" else f"http://127.0.0.1:{port}/user/ana/")
    )
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
        await asyncio.wait_for(waiting, 60)


async def test_an_address_that_is_none_is_not_waited_for() -> None:
    await listening.wait("")
