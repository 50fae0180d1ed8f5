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
from contextlib import suppress
from datetime import UTC, datetime

from makeway_api.pod_labels import INSTANCE, MANAGED_BY, MANAGER

from .client import ApiClient, ApiRefusal, ApiUnreachable, Object

log = logging.getLogger("makeway.kubernetes")

EVERY = 5.0
"""Seconds between two looks at the Lease"""
DURATION = 20.0
"""Seconds without a renewal after which another database may take the Lease"""
LONG_AGO = 300.0
"""Seconds since the last renewal after which it is taken at once, however much clocks differ"""
ALONE = "sqlite/"
"""How the identity of a database begins that serves a single replica"""
NOT_ALLOWED = (403, 404, 405)
"""Refusals where the account has no right to leases, as with the roles of an earlier release"""


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
        """`holder` is the identity of the database; `changed` is called when the Lease is won or lost."""
        self.problem = ""
        """why this database must leave the pods alone; "" where it holds the Lease"""
        self._client = client
        self._instance = instance
        self._holder = holder
        self._list = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = lease_name(instance)
        self._namespace = namespace
        self._changed = changed
        self._monotonic = monotonic
        self._clock = clock
        self._looked_at: float | None = None
        self._seen: tuple[str, float] = "", 0.0
        """the version of another holder's Lease, and since when it is unchanged (monotonic)"""
        self._ignored = False

    @property
    def may_act(self) -> bool:
        """Whether this database held the Lease a moment ago."""
        if self._ignored:
            return True
        return not self.problem and self._looked_at is not None and self._monotonic() - self._looked_at < DURATION

    async def run(self) -> None:
        """Renew the Lease, or wait for it, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY)

    async def release(self) -> None:
        """Free the Lease for another database at once, unless another replica of this one may be there."""
        if not self.may_act or self._ignored or not self._holder.startswith(ALONE):
            return
        with suppress(ApiRefusal, ApiUnreachable):
            if (found := await self._get()) is not None and found["spec"].get("holderIdentity") == self._holder:
                freed = self._lease(str(found["metadata"].get("resourceVersion") or ""))
                freed["spec"]["holderIdentity"] = ""
                await self._client.replace(f"{self._list}/{self._name}", freed)
        self._looked_at = None

    async def look(self) -> None:
        """Take the Lease, renew it, or see that another has it; without an answer, all stays as it was."""
        try:
            found = await self._get()
            problem = await self._claim(found)
        except ApiRefusal as refusal:
            if refusal.status == 409:  # another replica was faster
                return
            if refusal.status in NOT_ALLOWED and not self._ignored:
                self._ignored = True
                log.warning("A copy of this installation is not noticed: leases cannot be used: %s", refusal)
            return
        except ApiUnreachable:
            return
        except Exception:  # an odd Lease must not end what the installation does
            if not self._ignored:
                log.exception("A copy of this installation is not noticed: its Lease is not understood")
            self._ignored = True
            return
        self._ignored, self._looked_at = False, self._monotonic()
        if problem != self.problem:
            log.warning("%s", problem or "This database acts on the pods of its installation")
            self.problem = problem
            self._changed()

    async def _get(self) -> Object | None:
        try:
            return await self._client.get(f"{self._list}/{self._name}")
        except ApiRefusal as refusal:
            if refusal.status == 404:
                return None
            raise

    async def _claim(self, found: Object | None) -> str:
        """Take or renew the Lease where that may be; return why not, else ""."""
        if found is None:
            await self._client.create(self._list, self._lease())
            return ""
        spec, version = found.get("spec") or {}, str(found["metadata"].get("resourceVersion") or "")
        holder = str(spec.get("holderIdentity") or "")
        if holder not in ("", self._holder) and not self._is_over(version, spec):
            return self._words(spec)
        await self._client.replace(f"{self._list}/{self._name}", self._lease(version))
        return ""

    def _is_over(self, version: str, spec: Object) -> bool:
        """Whether another holder has not renewed its Lease for long enough."""
        now = self._monotonic()
        if self._seen[0] != version:
            self._seen = version, now
        renewed = _time_of(spec.get("renewTime"))
        return now - self._seen[1] >= DURATION or (renewed is not None and self._clock() - renewed >= LONG_AGO)

    def _words(self, spec: Object) -> str:
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


def _time_of(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
