"""The service in a process of its own, which tests kill and freeze: `job_service_process.py HOST PORT`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from job_service import served
from makeway_quota.web.server.http_server import run


async def serve(host: str, port: int) -> None:
    """Serve on a port that a test has reserved, until the process is killed."""
    async with served(os.environ, host, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run(serve(sys.argv[1], int(sys.argv[2])))
