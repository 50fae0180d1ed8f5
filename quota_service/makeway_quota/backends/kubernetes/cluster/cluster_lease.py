"""Restrict the pods of an installation to one database: a copy of it beside the original leaves them alone.

Pods are told apart by the installation's name, which a restored copy of the database, or a second release with the same
name, has too. So every replica renews a Lease of Kubernetes in the name of its database; one whose database does not
hold the Lease starts and removes nothing until the holder is gone for `DURATION`. Called by the backend.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER

from ..api.client import ApiClient, ApiStatusError, ApiUnreachable, Object

log = logging.getLogger("makeway.kubernetes")

RENEW_SECONDS = 5.0
"""Seconds between two renewals of the Lease"""
DURATION = 20.0
"""Seconds without a renewal, on this process's own clock, after which another database may take the Lease"""
MAX_TRIES = 3
"""How often a renewal begins again because another replica has changed the Lease meanwhile"""
SINGLE_REPLICA = "sqlite/"
"""How the identity of a database begins that serves a single replica"""
NO_RIGHT_STATUSES = (403, 404, 405)
"""Refusals where the account has no right to leases, as with the roles of an earlier release"""
REFUSED_SECONDS = 8.0
"""Seconds for which they have to last: the rights of a new installation take a moment to count"""


def lease_name(instance: str) -> str:
    """Return the name of an installation's Lease; the chart's hook that deletes it says the same."""
    return f"makeway-{hashlib.sha256(instance.encode()).hexdigest()[:16]}"


class ClusterLease:
    """The Lease of one installation, held by a database."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        instance: str,
        holder: str,
        changed: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`holder` is the identity of the database; `changed` is called when `problem` is another one."""
        self.tried = asyncio.Event()
        """set after the first try, whatever came of it"""
        self._client = client
        self._instance = instance
        self._holder = holder
        self._leases_path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = lease_name(instance)
        self._namespace = namespace
        self._changed = changed
        self._monotonic = monotonic
        self._clock = clock
        self._conflict = ""
        """a message if another database holds the Lease; "" where this one does, as far as is known"""
        self._renewed_at: float | None = None
        """when the last successful request to read or renew the Lease was sent (monotonic)"""
        self._failure = ""
        """the error of the last try; "" after a success"""
        self._refused_since: float | None = None
        self._other_lease: tuple[str, float] = "", 0.0
        """the version of another holder's Lease, and since when it is unchanged (monotonic)"""
        self._disabled = False
        """whether pods are handled without the Lease, as it cannot be used"""
        self._logged_problem = ""
        """the problem that was logged last"""

    @property
    def may_act(self) -> bool:
        """Whether this database held the Lease a moment ago."""
        if self._disabled:
            return True
        return not self._conflict and self._renewed_at is not None and self._monotonic() - self._renewed_at < DURATION

    @property
    def problem(self) -> str:
        """Return why this database must leave the pods alone; "" where it holds the Lease."""
        if self.may_act or self._conflict:
            return self._conflict
        if not self._failure:
            return ""
        return (
            f"the Lease {self._name} in the namespace {self._namespace} cannot be renewed ({self._failure}), so that "
            "another database might hold it: this one starts and removes nothing until it can"
        )

    async def run(self) -> None:
        """Renew the Lease, or wait for it, until cancelled."""
        while True:
            await self.renew()
            self.tried.set()
            await asyncio.sleep(RENEW_SECONDS)

    async def release(self) -> None:
        """Free the Lease for another database at once, unless another replica of this one may be there."""
        if not self.may_act or self._disabled or not self._holder.startswith(SINGLE_REPLICA):
            return
        try:
            if (lease := await self._get()) is not None and lease["spec"].get("holderIdentity") == self._holder:
                freed = self._lease(str(lease["metadata"].get("resourceVersion") or ""))
                freed["spec"]["holderIdentity"] = ""
                await self._client.replace(f"{self._leases_path}/{self._name}", freed)
        except Exception as error:  # it ends by itself, and nothing else is kept from ending
            log.warning("The Lease %s was not released, and ends in %.0f s: %s", self._name, DURATION, error)
        self._renewed_at = None

    async def renew(self) -> None:
        """Take the Lease, renew it, or see that another has it; without an answer, all stays as it was."""
        for _ in range(MAX_TRIES):
            if await self._renew_once():
                break
        if (problem := self.problem) != self._logged_problem:
            self._logged_problem = problem
            log.warning("%s", problem or "This database acts on the pods of its installation")
            self._changed()

    async def _renew_once(self) -> bool:
        """Try once; return False if another replica changed the Lease meanwhile, so that it has to be tried again."""
        began = self._monotonic()  # of the renewal itself the API server may know long before its answer is here
        try:
            conflict = await self._claim(await self._get())
        except ApiStatusError as refusal:
            self._failure = str(refusal)
            if refusal.status == 409:
                return False
            self._note_refusal(refusal)
            return True
        except ApiUnreachable as error:
            self._failure, self._refused_since = str(error), None
            return True
        except Exception:  # an odd Lease must not end what the installation does
            if not self._disabled:
                log.exception("A copy of this installation is not noticed: its Lease is not understood")
            self._disabled = True
            return True
        self._conflict, self._renewed_at = conflict, began
        self._disabled, self._failure, self._refused_since = False, "", None
        return True

    def _note_refusal(self, refusal: ApiStatusError) -> None:
        """Continue without the Lease if the account has no right to it, unless another database was seen to hold it."""
        if refusal.status not in NO_RIGHT_STATUSES or self._conflict:
            self._refused_since = None
            return
        now = self._monotonic()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= REFUSED_SECONDS and not self._disabled:
            self._disabled = True
            log.warning("A copy of this installation is not noticed: leases cannot be used: %s", refusal)

    async def _get(self) -> Object | None:
        try:
            return await self._client.get(f"{self._leases_path}/{self._name}")
        except ApiStatusError as refusal:
            if refusal.status == 404:
                return None
            raise

    async def _claim(self, lease: Object | None) -> str:
        """Take or renew the Lease where that may be; return why not, else ""."""
        if lease is None:
            await self._client.create(self._leases_path, self._lease())
            return ""
        spec, version = lease.get("spec") or {}, str(lease["metadata"].get("resourceVersion") or "")
        holder = str(spec.get("holderIdentity") or "")
        if holder not in ("", self._holder) and not self._has_expired(version):
            return self._conflict_message(spec)
        try:
            await self._client.replace(f"{self._leases_path}/{self._name}", self._lease(version))
        except ApiStatusError as refusal:
            if refusal.status == 404:  # it was deleted since it was read
                raise ApiStatusError(409, "Conflict", "it was deleted meanwhile") from refusal
            raise
        return ""

    def _has_expired(self, version: str) -> bool:
        """Whether another holder has not renewed its Lease for long enough."""
        now = self._monotonic()
        if self._other_lease[0] != version:
            self._other_lease = version, now
        return now - self._other_lease[1] >= DURATION  # its own time of renewal may be that of a clock which is wrong

    def _conflict_message(self, spec: Object) -> str:
        renewed = str(spec.get("renewTime") or "an unknown time")[:19].replace("T", " ")
        return (
            f"another database acts on the pods of the installation {self._instance} in the namespace "
            f"{self._namespace} (renewed {renewed} UTC): this one is a copy, or has the same MAKEWAY_KUBE_INSTANCE. "
            "Stop the other service, or give this one another name, and it acts within half a minute"
        )

    def _lease(self, version: str = "") -> Object:
        metadata: Object = {
            "name": self._name,
            "namespace": self._namespace,
            "labels": {MANAGED_BY: MANAGER, INSTANCE: self._instance},
        }
        if version:
            metadata["resourceVersion"] = version
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": round(DURATION),
            "renewTime": datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
