"""Run all checks for the backend of the settings, and write what they find as text or JSON; `makeway-quota doctor`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from makeway_api.quantities import count, listed

from ..autoscale.deployment import CLUSTER, provisioning_class
from ..autoscale.document import read_deployment
from ..backends.kubernetes.api.client import ApiClient, ApiStatusError, ApiUnreachable
from ..backends.kubernetes.api.connection import connection
from ..backends.kubernetes.settings import check_worker_url
from ..policy import Document, PolicyInvalid, read_policy
from ..settings import ServiceSettings
from ..store.database.postgres_check import stored_deployments, stored_policy
from ..store.errors import StoreError
from . import admission, database, images, machine, network, nodes, rights, server, volumes
from .cluster import ClusterAccess
from .findings import SEVERITIES, Check, Finding, find_all, in_thread

SECONDS = 30.0
"""Seconds that each check may take"""
NO_CLUSTER = (
    "--hub checks the Hub's account on a Kubernetes cluster: set MAKEWAY_BACKEND=kubernetes, with the policy in "
    "MAKEWAY_POLICY_FILE and the namespace of notebooks in the context of the kubeconfig."
)
HUB_REMEDY = "Start the Hub, and let the network policy of the service reach its port."
SERVICE_REMEDY = "Start the service, and let pods of jobs reach its port; MAKEWAY_WORKER_URL is its address."


def doctor_command(settings: ServiceSettings, output: str, *, hub: bool = False, seconds: float = SECONDS) -> int:
    """Print the findings, worst first; return 1 where something will not work, else 0."""
    findings = asyncio.run(diagnose(settings, hub=hub, seconds=seconds))
    print(as_json(findings) if output == "json" else as_text(findings))
    return int(any(finding.severity == "error" for finding in findings))


async def diagnose(settings: ServiceSettings, *, hub: bool = False, seconds: float = SECONDS) -> list[Finding]:
    """Return the findings of all checks that fit the settings; ValueError for `hub` without a cluster."""
    if hub and "kubernetes" not in settings.backends:
        raise ValueError(NO_CLUSTER)
    general = [
        Check("database", partial(in_thread, database.check_database, settings.db_url)),
        Check("folders", partial(in_thread, _list, machine.folders, settings)),
    ]
    if "kubernetes" not in settings.backends:
        return await find_all([*general, *machine_checks(settings)], seconds)
    problems: list[Finding] = []
    try:
        client = ApiClient(connection(settings.kubernetes.kubeconfig, settings.kubernetes.context))
    except ValueError as error:
        problems = [Finding("error", str(error), "API server", "Name a kubeconfig, or run it in a pod.", "api")]
        return [*problems, *await find_all(general, seconds)]
    try:
        document, findings = await in_thread(_policy, settings)
        asks = await in_thread(_asks_for_nodes, settings)
        cluster = ClusterAccess(client, settings.kubernetes, document, time.time, hub, asks)
        checks = [*general, *address_checks(settings, hub=hub), Check("policy", partial(_as_check_result, findings))]
        return await examine(cluster, checks, seconds)
    finally:
        await client.close()


async def examine(cluster: ClusterAccess, more: Sequence[Check], seconds: float = SECONDS) -> list[Finding]:
    """Return the findings on a cluster; without its API server, that alone and those of `more`."""
    try:
        async with asyncio.timeout(seconds):
            await cluster.client.get("/version")
    except (ApiUnreachable, ApiStatusError, TimeoutError) as error:
        why = str(error) or "no answer"
        no_answer = Finding(
            "error",
            f"{why[:1].upper()}{why[1:].rstrip('.')}.",
            cluster.client.connection.server,
            "Check the address and the credentials, and that the network policy lets this pod reach its port.",
        )
        return await find_all([Check("api", partial(_as_check_result, [no_answer])), *more], seconds)
    return [*await find_all([*cluster_checks(cluster), *more], seconds), *_unread(cluster)]


def _unread(cluster: ClusterAccess) -> Iterator[Finding]:
    """Yield a note of the checks that the rights of the account left out."""
    if cluster.unread:
        yield Finding(
            "note",
            f"Not checked: the account may not read {listed(sorted(cluster.unread))}.",
            f"namespace {cluster.work_namespace}",
            "An administrator's kubeconfig shows more: docs/how-to/troubleshooting.md has the command.",
            "unread",
        )


def cluster_checks(cluster: ClusterAccess) -> list[Check]:
    """Return the checks of a cluster in the order of their importance."""
    return [
        Check("version", partial(server.check_server, cluster)),
        Check("rights", partial(rights.check_rights, cluster)),
        Check("following", partial(server.check_following, cluster)),
        Check("images", partial(images.check_pull_secrets, cluster)),
        Check("admission of jobs", partial(admission.check_job_pods, cluster)),
        Check("admission of notebooks", partial(admission.check_notebook_pods, cluster)),
        Check("claims", partial(admission.check_claim_templates, cluster)),
        Check("quotas", partial(admission.check_limits, cluster)),
        Check("volumes", partial(volumes.check_volumes, cluster)),
        Check("nodes", partial(nodes.check_nodes, cluster)),
        Check("clock", partial(server.check_clock, cluster)),
        Check("certificate", partial(server.check_certificate, cluster)),
    ]


def address_checks(settings: ServiceSettings, *, hub: bool = False) -> list[Check]:
    """Return the checks that other parts of the portal can be reached."""
    result: list[Check] = []
    address = settings.kubernetes.worker_url
    with suppress(ValueError):
        check_worker_url(address)  # one of this machine alone is the default, which no pod uses
        own = partial(network.check_own_address, address, settings.port, "The service", SERVICE_REMEDY)
        result.append(Check("service", own))
    if not hub:
        result.append(Check("hub", partial(network.check_address, settings.hub_api_url, "The Hub", HUB_REMEDY)))
    return result


def machine_checks(settings: ServiceSettings) -> list[Check]:
    """Return the checks of one machine."""
    return [
        Check("python", partial(in_thread, machine.python)),
        Check("port", partial(in_thread, _list, machine.port, settings)),
        Check("gpus", partial(in_thread, _list, machine.gpus, settings)),
        Check("secrets", partial(in_thread, _list, machine.exposed_secrets, settings)),
    ]


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings for people: what, where, and what to do."""
    if not findings:
        return "No problems found."
    lines = []
    for finding in findings:
        lines += [
            f"{finding.severity.upper()}  {finding.what}",
            f"  where: {finding.where}",
            f"  do:    {finding.remedy}",
        ]
    severities = [finding.severity for finding in findings]
    numbers = [count(severities.count(name), name) for name in SEVERITIES if name != "note" or name in severities]
    return "\n".join([*lines, "", f"{', '.join(numbers)}."])


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings for programs."""
    keys = ("severity", "what", "where", "remedy", "check")
    return json.dumps({"findings": [{key: getattr(finding, key) for key in keys} for finding in findings]}, indent=2)


def _policy(settings: ServiceSettings) -> tuple[Document | None, list[Finding]]:
    """Return the policy in force, else that of the file in the settings; what is wrong with it is a finding."""
    where = "the policy in force"
    try:
        stored = stored_policy(settings.db_url)
        if stored is not None:
            return read_policy(stored, where, stored=True), []
        if settings.policy_file is None:
            return None, []
        where = str(settings.policy_file)
        return read_policy(settings.policy_file.read_text(encoding="utf-8"), where), []
    except (OSError, UnicodeDecodeError, PolicyInvalid, StoreError) as error:
        words = str(error).strip().splitlines()[:1] or [type(error).__name__]
        what = f"The policy cannot be read: {words[0].rstrip('.')}."
        return None, [Finding("error", what, where, "Correct it: makeway-quota policy validate names every mistake.")]


def _asks_for_nodes(settings: ServiceSettings) -> bool:
    """Whether a stored deployment, or the one that an empty database gets, asks by ProvisioningRequests."""
    try:
        documents = stored_deployments(settings.db_url)
        if not documents and settings.deployment_file is not None:
            documents = [settings.deployment_file.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError, StoreError):  # a finding of the check of the database, or of the service
        return False
    for document in documents:
        with suppress(PolicyInvalid):
            deployment = read_deployment(document, stored=True)
            if deployment.provider == CLUSTER and provisioning_class(deployment.settings):
                return True
    return False


def _list(function: object, *args: object) -> list[Finding]:
    return list(function(*args))  # type: ignore[operator]


async def _as_check_result(findings: Iterable[Finding]) -> Iterable[Finding]:
    return findings
