"""The clients of the benchmark of requests, in a process of their own: submissions, panels and spawn pages."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import httpx2

from .request_load import API, PREFIX, TEAMS

OFFERS = 2.0
"""seconds between two tables of offers, as in the script of the spawn page"""
CURRENT = re.compile(r'data-after="(\d+)"')
SHOWN = re.compile(r'"after":(\d+)')


async def submit(address: str, clients: int, item: int) -> dict[str, object]:
    """Submit `item` jobs from every client, one after the other."""
    took: list[float] = []

    async def one(number: int) -> None:
        headers = {"Authorization": f"token user{number:02}-1"}
        for _ in range(item):
            began = time.perf_counter()
            ask = {"name": "x", "profile": "gpu1", "command": ["python", "x.py"]}
            (await client.post(f"{address}{API}/jobs", json=ask, headers=headers)).raise_for_status()
            took.append(time.perf_counter() - began)

    async with httpx2.AsyncClient(timeout=120) as client:
        began = time.perf_counter()
        await asyncio.gather(*map(one, range(clients)))
    return {"took": took, "seconds": time.perf_counter() - began}


@dataclass
class Load:
    """Open pages of different users; `took` are the seconds of requests by what was asked for."""

    address: str
    administrators: bool = False
    """whether panels are those of administrators"""
    took: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    arrivals: list[list[tuple[int, float]]] = field(default_factory=list)
    """of each panel: the newest event that each new version shows, and when the version arrived (Unix seconds)"""
    waiting: int = 0
    """clients whose page is not open yet"""
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, client: httpx2.AsyncClient, what: str, path: str, headers: dict[str, str]) -> str:
        """Return an answer; one that asks to come back is tried again when it says."""
        while True:
            began = time.perf_counter()
            answer = await client.get(self.address + path, headers=headers)
            if answer.status_code in (429, 503):
                self.refused += 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
                continue
            answer.raise_for_status()
            self.took.setdefault(what, []).append(time.perf_counter() - began)
            return answer.text

    def is_open(self) -> None:
        """Note that one more client has its page."""
        self.waiting -= 1
        if self.waiting == 0:
            self.opened.set()

    async def panel(self, client: httpx2.AsyncClient, number: int) -> None:
        """Open the panel of a user, and follow its stream, which carries what changes of it."""
        user = f"root{number:02}" if self.administrators else f"user{number % TEAMS:02}-{number // TEAMS}"
        headers = {"Authorization": f"token {user}", "Accept": "text/html"}
        page = await self.get(client, "panel opened", PREFIX, headers)
        match = CURRENT.search(page)
        assert match is not None, "the page says up to which event it is current"
        self.is_open()
        path = f"{API}/events?topics=&parts=panel&after={match[1]}"
        arrivals: list[tuple[int, float]] = []
        self.arrivals.append(arrivals)
        async with client.stream("GET", self.address + path, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith('data: {"part":') and (shown := SHOWN.search(line)) is not None:
                    arrivals.append((int(shown[1]), time.time()))

    async def spawn_page(self, client: httpx2.AsyncClient, number: int) -> None:
        """Open the spawn page of a user: the Hub asks for offers once, then the browser with the ticket."""
        headers = {"Authorization": f"token user{number % TEAMS:02}-{1 + number // TEAMS}"}
        table = json.loads(await self.get(client, "offers opened", f"{API}/offers", headers))
        self.is_open()
        while True:
            await asyncio.sleep(OFFERS)
            path = f"{API}/offers/live?ticket={table['ticket']}"
            table = json.loads(await self.get(client, "offers refreshed", path, {}))


async def load(address: str, pages: int, panels: int, *, administrators: bool = False) -> dict[str, object]:
    """Open all pages, write a line when they are open, and keep them open until standard input ends."""
    whole = Load(address, administrators, waiting=pages + panels)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    began = time.perf_counter()
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        tasks = [asyncio.create_task(whole.panel(client, number)) for number in range(panels)]
        tasks += [asyncio.create_task(whole.spawn_page(client, number)) for number in range(pages)]
        opening = asyncio.create_task(whole.opened.wait())
        done, _ = await asyncio.wait({opening, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {opening}:
            task.result()  # a client that failed
        seconds = time.perf_counter() - began
        whole.took = {what: took for what, took in whole.took.items() if what.endswith("opened")}
        print(json.dumps({"seconds": seconds}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "median": {what: median(took) for what, took in whole.took.items()},
        "requests": sum(map(len, whole.took.values())),
        "refused": whole.refused,
        "parts": sum(map(len, whole.arrivals)),
        "arrivals": whole.arrivals,
    }


if __name__ == "__main__":
    what, url, *rest = sys.argv[1:]
    calls: dict[str, Callable[[str, int, int], Coroutine[Any, Any, dict[str, object]]]] = {
        "submit": submit,
        "load": load,
        "administrators": partial(load, administrators=True),
    }
    print(json.dumps(asyncio.run(calls[what](url, int(rest[0]), int(rest[1])))))
