"""Load the service with the queue mix: 30 users submit their jobs on time, each with the real client."""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

from makeway_api.client import AsyncClient
from makeway_api.models import Job, JobRequest, Priority

from .queue_mix import Class, classes, queues

AT_ONCE = 60
"""requests of one person under way at a time, at most"""


class Load:
    """Submits, and remembers when each job was due, what class it is of, and how long the answer took."""

    def __init__(self, url: str, share: float) -> None:
        self.url = url
        self.share = share
        self.due: dict[str, float] = {}
        self.of: dict[str, str] = {}
        self.took: list[float] = []
        self.late = 0.0

    async def run(self) -> float:
        """Submit all jobs of all users; return when the load began, in Unix seconds."""
        began = time.time() + 0.5
        await asyncio.gather(*(self._person(pool, team, began) for pool, team in queues()))
        return began

    async def _person(self, pool: str, team: str, began: float) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        async with AsyncClient(self.url, team) as client, asyncio.TaskGroup() as tasks:
            for after, number, kind in schedule(self.share):
                await asyncio.sleep(began + after - time.time())
                await room.acquire()
                task = tasks.create_task(self._submit(client, pool, kind, number, began + after))
                task.add_done_callback(lambda _: room.release())

    async def _submit(self, client: AsyncClient, pool: str, kind: Class, number: int, due: float) -> None:
        ask = JobRequest(
            name=f"{kind.name} {number}",
            profile=f"{pool}-{kind.name}",
            command=["work"],
            priority=Priority(kind.priority),
        )
        begin = time.time()
        job: Job = await client.submit(ask)
        self.took.append(time.time() - begin)
        self.late = max(self.late, begin - due)
        self.due[job.id], self.of[job.id] = due, kind.name


def schedule(share: float) -> Iterator[tuple[float, int, Class]]:
    """One person's jobs, in the order of their time: seconds after the beginning, number and class."""
    streams = [[(n * c.every, n, c) for n in range(c.count)] for c in classes(share)]
    return heapq.merge(*streams, key=lambda item: item[0])


def main(url: str, share: str, file: str) -> None:
    """Run the load and write down what is known only here."""
    load = Load(url, float(share))
    began = asyncio.run(load.run())
    cuts = quantiles(load.took, n=20)
    record = {
        "began": began,
        "due": load.due,
        "class": load.of,
        "median": cuts[9],
        "p95": cuts[18],
        "late": load.late,
        "cpu": time.process_time(),
    }
    Path(file).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
