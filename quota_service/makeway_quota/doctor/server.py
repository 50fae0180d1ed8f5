"""Check the API server: that it is reached, its version, its certificate, and that its clock shows the same time."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from ..backends.kubernetes.api.client import ApiStatusError, ApiUnreachable, run_all
from .cluster import UNKNOWN, ClusterAccess
from .findings import Finding, Severity

OLDEST = (1, 30)
"""The oldest Kubernetes that the chart takes, as in its Chart.yaml"""
APART, TOO_FAR = 5.0, 30.0
"""Seconds between two clocks that matter, and that end leases and tokens too early"""
EXPIRES = 14 * 86_400.0
"""Seconds before the end of a certificate from which on it is a finding"""
DAY = 86_400.0
WATCH_SECONDS, SILENT_SECONDS = 1, 8.0
"""How long a watch is tried, and how long it may be silent: an API server answers at once, and ends it in time"""


async def check_server(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return a finding if the version is too old; raise if the API server is not reached."""
    answer = await cluster.client.get("/version")
    major, minor = (int(re.sub(r"\D", "", str(answer.get(key) or "0")) or 0) for key in ("major", "minor"))
    if (major, minor) >= OLDEST or not major:
        return []
    oldest = ".".join(map(str, OLDEST))
    return [
        Finding(
            "error",
            f"Kubernetes {major}.{minor} is older than {oldest}, the oldest that Makeway is made for.",
            "API server",
            "Upgrade the cluster.",
        )
    ]


async def check_following(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return the lists whose changes are not reported, though the account may watch them; rights are checked apart."""
    if cluster.as_hub:
        return []
    jobs = f"/api/v1/namespaces/{cluster.jobs_namespace}/pods"
    watched = {"nodes": "/api/v1/nodes", "pods": "/api/v1/pods", f"pods of {cluster.jobs_namespace}": jobs}
    problems = await run_all(_watch_problem(cluster, path) for path in watched.values())
    return [
        Finding(
            "error",
            f"The {what} of the cluster can be listed and not followed, and nothing starts: {why.rstrip('.')}.",
            "API server",
            "Let watches through: a proxy or load balancer before the API server must neither collect answers nor "
            "end them early.",
        )
        for what, why in zip(watched, problems, strict=True)
        if why
    ]


async def _watch_problem(cluster: ClusterAccess, path: str) -> str:
    """Return why a watch of a list does not begin, or ends with an error; "" where it works, or is not allowed."""
    try:
        version = (await cluster.client.get(path, {"limit": "1"})).get("metadata", {}).get("resourceVersion", "")
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        async with (
            asyncio.timeout(WATCH_SECONDS + SILENT_SECONDS),
            cluster.client.stream(path, query, SILENT_SECONDS) as lines,
        ):
            async for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return str(event["object"].get("message") or "the API server answers with an error")
    except ApiStatusError as refusal:
        return "" if refusal.status in UNKNOWN else refusal.message
    except ApiUnreachable as error:
        return str(error)
    except TimeoutError:
        return "the watch did not end when it should"
    except (ValueError, KeyError, TypeError):
        return "what is answered is no stream of events"
    return ""


async def check_clock(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return a finding if the API server's clock shows another time than this machine's."""
    before = cluster.clock()
    await cluster.client.get("/version")
    after = cluster.clock()
    if not cluster.client.date:
        return []
    theirs = parsedate_to_datetime(cluster.client.date).timestamp()
    apart = max(before - theirs - 1.0, theirs - after, 0.0)  # the header has whole seconds
    return clock_skew(apart, "the API server")


def clock_skew(apart: float, whose: str) -> list[Finding]:
    """Return a finding if two clocks are so many seconds apart that it matters."""
    if apart < APART:
        return []
    severity: Severity = "error" if apart >= TOO_FAR else "warning"
    return [
        Finding(
            severity,
            f"This machine's clock and that of {whose} are {apart:.0f} s apart.",
            whose,
            "Set both by NTP (chrony, systemd-timesyncd): leases, tokens and deadlines are times.",
        )
    ]


async def check_certificate(cluster: ClusterAccess, seconds: float = 10.0) -> Iterable[Finding]:
    """Return a finding if the API server's certificate ends soon; with one that is not valid there is no connection."""
    parts = urlsplit(cluster.client.connection.server)
    if parts.scheme != "https" or cluster.client.connection.context.verify_mode == ssl.CERT_NONE:
        return []
    async with asyncio.timeout(seconds):
        _, writer = await asyncio.open_connection(
            parts.hostname, parts.port or 443, ssl=cluster.client.connection.context, server_hostname=parts.hostname
        )
    try:
        result = writer.get_extra_info("peercert") or {}
    finally:
        writer.close()
    return expiring(ssl.cert_time_to_seconds(result["notAfter"]) - cluster.clock()) if "notAfter" in result else []


def expiring(remaining: float) -> list[Finding]:
    """Return a finding if a certificate that ends in so many seconds ends soon."""
    if remaining > EXPIRES:
        return []
    return [
        Finding(
            "warning",
            f"The certificate of the API server ends in {max(0.0, remaining) / DAY:.0f} days.",
            "API server",
            "Renew it (kubeadm certs renew all, or your provider's way) before nothing is reached any more.",
        )
    ]
