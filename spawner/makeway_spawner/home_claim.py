"""Find the claim of a user's home over upgrades of KubeSpawner and refused starts, and never that of another user.

The base of `PodSpawner`. KubeSpawner 7 writes users' names in another way than 6. It looks for a claim of the old name
only while the stored state has no version, and stores its version with every state, also where a start was refused
before it looked: the next start would make a new, empty home.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from jupyterhub.utils import exponential_backoff
from kubernetes_asyncio.client.rest import ApiException
from kubespawner import KubeSpawner

from .refusal import Refused

_NOT_FOUND = 404
_VERSION = "kubespawner_version"
_UNKNOWN = "unknown"
"""KubeSpawner's word for a state that may be of an older one: it looks for a claim of the old name."""
_OF_ONE_USER = re.compile(r"\{\w*user")
"""What a template of claims contains that gives each user one; else they share it, and the first one is its owner."""
_RELEASE = ("app.kubernetes.io/name", "app.kubernetes.io/instance")
"""The labels with the chart and the release of pods and claims"""
_OWNER = "hub.jupyter.org/username"
"""The annotation of a claim with the name of its user, which KubeSpawner 6 writes, too."""


class HomeClaim(KubeSpawner):  # type: ignore[misc]
    """A notebook server in a pod with the same claim at every start."""

    _pvc_exists: bool
    _state_kubespawner_version: str | None

    def load_state(self, state: dict[str, Any]) -> None:
        """Read the state back; one without the name of a claim may be older than the version in it says."""
        super().load_state(state)
        if state and "pvc_name" not in state:
            self._state_kubespawner_version = _UNKNOWN

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores; without a version until it is known which claim is the user's."""
        state: dict[str, Any] = super().get_state()
        if "pvc_name" not in state and self._state_kubespawner_version == _UNKNOWN:
            state.pop(_VERSION, None)
        return state

    async def _start(self) -> Any:
        """Start the pod; a claim that was deleted meanwhile is looked for, or made, as for a user without one."""
        if self.storage_pvc_ensure and self._pvc_exists:
            result = None
            with suppress(ApiException):
                result = await self._claim()
                if result is None:
                    self._pvc_exists, self._state_kubespawner_version = False, _UNKNOWN
                    self.pvc_name = self._expand_user_properties(self.pvc_name_template)
            if result is not None:
                await self._check_release(result)
        return await super()._start()

    async def _check_pvc_exists(self, pvc_name: str, namespace: str) -> bool:
        """Whether there is such a claim that is not another user's."""
        claim = await self._claim(pvc_name)
        return claim is not None and self._may_use(claim)

    async def _make_create_pvc_request(self, pvc: Any, request_timeout: float) -> bool:
        """Create the claim unless it is there; raise Refused where it is another user's."""
        if not await super()._make_create_pvc_request(pvc, request_timeout):
            return False
        result = None
        with suppress(ApiException):  # an account that may not read claims could make them until now
            result = await self._claim()
        if result is not None and not self._may_use(result):
            raise Refused(
                f"The notebook could not be started: the claim {self.pvc_name} for its home belongs to the user "
                f"{_owner(result)}. An administrator has to give that user's claim another name, or to change "
                "pvc_name_template in the Hub's configuration.",
                code="claim_of_another_user",
            )
        if result is not None:
            await self._check_release(result)
        return True

    async def _check_release(self, claim: Any) -> None:
        """Raise Refused where the claim is of another release that still runs: both would write to it.

        One that was uninstalled leaves its claims to the next, whatever the name of that one is.
        """
        release = self._other_release(claim.metadata.labels or {})
        if not release:
            return
        selector = ",".join(f"{label}={value}" for label, value in zip(_RELEASE, release, strict=True))
        if (await self.api.list_namespaced_pod(self.namespace, label_selector=selector, limit=1)).items:
            raise Refused(
                f"The notebook could not be started: the claim {self.pvc_name} for its home belongs to {release[1]}, "
                "another installation in this namespace. An administrator has to set a pvc_name_template of its own "
                "for one of the two, or to install one of them in another namespace.",
                code="claim_of_another_release",
            )

    def _other_release(self, labels: Mapping[str, str]) -> tuple[str, str] | None:
        """Return chart and release of an object by its labels; None where it has none, or those of this Hub."""
        theirs, own = _release_of(labels), _release_of(self.common_labels)
        return theirs if theirs and own and theirs != own else None

    async def _claim(self, name: str = "") -> Any:
        """Return a claim as the API server has it, None where there is none; by default that of this server."""
        read = self.api.read_namespaced_persistent_volume_claim
        request = partial(read, name=name or self.pvc_name, namespace=self.namespace)
        what = f"Could not check if PVC {name or self.pvc_name} exists"
        try:
            return await exponential_backoff(request, what, timeout=self.k8s_api_request_retry_timeout)
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def _may_use(self, claim: Any) -> bool:
        own = _OF_ONE_USER.search(self.pvc_name_template) is not None
        return not own or _owner(claim) in ("", self.user.name)


def _release_of(labels: Mapping[str, str]) -> tuple[str, str] | None:
    chart, release = (labels.get(label, "") for label in _RELEASE)
    return (chart, release) if chart and release else None


def _owner(claim: Any) -> str:
    """Return the user whose home a claim is by its annotation; empty where it says nothing, as one made by hand."""
    return str((claim.metadata.annotations or {}).get(_OWNER) or "")
