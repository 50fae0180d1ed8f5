"""Check the account of jobs and the Secrets with its logins for images."""

from __future__ import annotations

from collections.abc import Iterable

from .cluster import ClusterAccess
from .findings import Finding


async def check_pull_secrets(cluster: ClusterAccess) -> Iterable[Finding]:
    """Return a finding if the account of jobs, or a login for its images, is missing; none where it may not be read."""
    if cluster.as_hub:
        return []
    namespace, name = cluster.jobs_namespace, cluster.settings.service_account or "default"
    account = await cluster.existing(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")
    if account is None:
        return []
    if account is False or not isinstance(account, dict):
        return [
            Finding(
                "error",
                f"The ServiceAccount {name} of jobs does not exist.",
                f"namespace {namespace}",
                "Create it, as the chart does: no pod is admitted without it.",
            )
        ]
    result = []
    for secret in account.get("imagePullSecrets") or ():
        if await cluster.existing(f"/api/v1/namespaces/{namespace}/secrets/{secret['name']}") is False:
            result.append(
                Finding(
                    "error",
                    f"The Secret {secret['name']} with the login for images does not exist.",
                    f"namespace {namespace}",
                    "Create it by kubectl create secret docker-registry: images of a private registry are not pulled.",
                )
            )
    return result
