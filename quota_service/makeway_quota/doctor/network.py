"""Check names and addresses: DNS, the ways to the Hub and the service, and the account and logins of images."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from .cluster import ClusterAccess
from .findings import Finding, in_thread

SECONDS = 5.0
"""Seconds for one name or one connection"""
PORTS = {"http": 80, "https": 443}


async def check_address(url: str, what: str, remedy: str) -> Iterable[Finding]:
    """Return that the host of an address has no name, or does not let us connect."""
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


async def check_pull_secrets(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return that the account of jobs, or a login for its images, is missing; unknown where it may not be read."""
    if cluster.hub:
        return []
    namespace, name = cluster.jobs_namespace, cluster.settings.service_account or "default"
    account = await cluster.found(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")
    if account is None:
        return []
    if account is False or not isinstance(account, dict):
        return [
            Finding(
                "error",
                f"The ServiceAccount {name} of jobs is not there.",
                f"namespace {namespace}",
                "Make it, as the chart does: no pod is admitted without it.",
            )
        ]
    found = []
    for secret in account.get("imagePullSecrets") or ():
        if await cluster.found(f"/api/v1/namespaces/{namespace}/secrets/{secret['name']}") is False:
            found.append(
                Finding(
                    "error",
                    f"The Secret {secret['name']} with the login for images is not there.",
                    f"namespace {namespace}",
                    "Make it by kubectl create secret docker-registry: images of a private registry are not pulled.",
                )
            )
    return found
