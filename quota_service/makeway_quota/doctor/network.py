"""Check names and addresses: DNS, and the ways to the Hub and the service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from .findings import Finding, in_thread

SECONDS = 5.0
"""Seconds for one name or one connection"""
PORTS = {"http": 80, "https": 443}


async def check_own_address(url: str, port: int, what: str, remedy: str) -> Iterable[Finding]:
    """Return as `check_address`; a note where the service listens here, and its own address does not lead back to it.

    Whether a Service leads a pod back to itself (hairpin) depends on the network, and says nothing about other pods.
    """
    result = list(await check_address(url, what, remedy))
    if not any(finding.where.rpartition(":")[2].isdecimal() for finding in result) or not await _listens_here(port):
        return result
    return [
        Finding(
            "note",
            f"Not checked whether {what[:1].lower()}{what[1:]} is reached: its own pod is not led back to itself.",
            result[0].where,
            "helm test asks from another pod.",
        )
    ]


async def _listens_here(port: int) -> bool:
    try:
        async with asyncio.timeout(SECONDS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def check_address(url: str, what: str, remedy: str) -> Iterable[Finding]:
    """Return a finding if the host of an address has no name, or does not accept a connection."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)
    if not host:
        return []
    try:
        async with asyncio.timeout(SECONDS):
            await in_thread(socket.getaddrinfo, host, port)
    except (OSError, TimeoutError) as error:
        return [
            Finding(
                "error",
                f"The name {host} of {what} is not resolved: {_why(error)}.",
                host,
                "Check the cluster's DNS, and that the network policy lets this pod reach its port (dnsPorts).",
            )
        ]
    try:
        async with asyncio.timeout(SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        return [Finding("error", f"{what} is not reached at {host}:{port}: {_why(error)}.", f"{host}:{port}", remedy)]
    return []


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer (a network policy or a firewall drops it)"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
