"""Stop the portal of an installation, then end its workloads, before Helm deletes what protects and serves them.

The chart's hook of `helm uninstall` runs this module as a program, with an account that exists for as long.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .api.client import ApiClient, ApiStatusError, ApiUnreachable, Object
from .api.connection import connection

POLL_SECONDS = 2.0
"""Seconds between two looks at the pods that end."""
PAGE_SIZE = 500
"""Pods of one answer: thousands of whole pods are more than the memory of the hook."""
MAX_CONCURRENT = 16
"""Pods that are deleted at the same time."""
MAX_NAMES = 20
"""Names of pods in one sentence"""


@dataclass(frozen=True, slots=True)
class PodSelector:
    """Pods of one namespace by their labels."""

    namespace: str
    selector: str

    @property
    def path(self) -> str:
        """The path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"


def pod_selector(text: str) -> PodSelector:
    """Return the pods that `NAMESPACE:SELECTOR` says; ValueError without a selector, which would be all pods."""
    namespace, _, selector = text.partition(":")
    if not namespace or not selector:
        raise ValueError(f"{text!r} is no group of pods: expected NAMESPACE:LABEL=VALUE,…")
    return PodSelector(namespace, selector)


class Uninstallation:
    """Ends an installation within some seconds; what has not ended by then does so later, or when its node is back."""

    def __init__(self, client: ApiClient, print_line: Callable[[str], None], seconds: float) -> None:
        self._client = client
        self._print = print_line
        started_at = time.monotonic()
        self._portal_until, self._until = started_at + seconds / 2, started_at + seconds

    async def end(
        self,
        deployments: Sequence[str],
        portal: PodSelector,
        workloads: Sequence[PodSelector],
        leases: Sequence[str] = (),
    ) -> None:
        """Delete deployments and wait for their pods, then leases (`NAMESPACE/NAME`) and the pods of the workloads.

        In this order, because a service that runs would start the jobs anew. The portal's pods have half of the time:
        one on a node that does not answer must not keep the workloads.
        """
        for name in deployments:
            await self._delete(f"/apis/apps/v1/namespaces/{portal.namespace}/deployments/{name}")
        await self._wait_until_gone([portal], "the portal", self._portal_until)
        for lease in leases:
            namespace, _, name = lease.partition("/")
            await self._delete(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
        await self._wait_until_gone(workloads, "jobs and notebooks", self._until, delete=True)

    async def _wait_until_gone(
        self, selectors: Sequence[PodSelector], title: str, until: float, *, delete: bool = False
    ) -> None:
        """Return once none of these pods is left, or at a time of the monotonic clock."""
        deleted = set[str]()
        while True:
            remaining, problem = await self._pods(selectors)
            new = [(path, uid) for path, uid in remaining.items() if delete and uid not in deleted]
            deleted |= {uid for _, uid in new}
            for at in range(0, len(new), MAX_CONCURRENT):
                await asyncio.gather(*(self._delete(*pod) for pod in new[at : at + MAX_CONCURRENT]))
            if not remaining and not problem:
                self._print(f"No pod of {title} is left.")
                return
            if time.monotonic() >= until:
                names = ", ".join([path.rpartition("/")[2] for path in remaining][:MAX_NAMES])
                names += ", …" if len(remaining) > MAX_NAMES else ""
                self._print(problem or _not_ended(len(remaining), title, names))
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _pods(self, selectors: Sequence[PodSelector]) -> tuple[dict[str, str], str]:
        """Return the UIDs of the pods by their paths, and why not all of them are known."""
        result, problem = dict[str, str](), ""
        for item in selectors:
            query = {"labelSelector": item.selector, "limit": str(PAGE_SIZE)}
            try:
                while True:
                    page = await self._client.get(item.path, query)
                    pods: list[Object] = page["items"]
                    result |= {f"{item.path}/{pod['metadata']['name']}": pod["metadata"]["uid"] for pod in pods}
                    if not (more := (page.get("metadata") or {}).get("continue")):
                        break
                    query["continue"] = more
            except (ApiStatusError, ApiUnreachable) as error:
                problem = f"It is not known which pods are left in {item.namespace}: {error}"
        return result, problem

    async def _delete(self, path: str, uid: str = "") -> None:
        """Delete an object; one that cannot be deleted is named, and the rest is deleted all the same."""
        name = path.rpartition("/")[2]
        try:
            if await self._client.delete(path, uid=uid):
                self._print(f"Deleted {name}.")
        except (ApiStatusError, ApiUnreachable) as error:
            self._print(f"{name} is not deleted: {error}")


def _not_ended(pods: int, title: str, names: str) -> str:
    """Return that pods of the portal, or of its work, outlive the hook."""
    if pods == 1:
        return f"1 pod of {title} has not ended yet: {names}. It ends after its grace, or when its node is back."
    return (
        f"{pods} pods of {title} have not ended yet: {names}. They end after their grace, or when their node is back."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program; its status is 0 whatever is left, as a non-zero status would stop `helm uninstall`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployment", action="append", default=[])
    parser.add_argument("--portal-pods", type=pod_selector, required=True, metavar="NAMESPACE:SELECTOR")
    parser.add_argument("--workload-pods", type=pod_selector, action="append", default=[], metavar="NAMESPACE:SELECTOR")
    parser.add_argument("--lease", action="append", default=[], metavar="NAMESPACE/NAME")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(argv)

    async def end() -> None:
        client = ApiClient(connection())
        try:
            uninstallation = Uninstallation(client, print, args.seconds)
            await uninstallation.end(args.deployment, args.portal_pods, args.workload_pods, args.lease)
        finally:
            await client.close()

    asyncio.run(end())
    return 0


if __name__ == "__main__":
    sys.exit(main())
