"""Follow a notebook's pod from its creation until its containers have ended.

`PodSpawner` is KubeSpawner that recognises evicted and lost pods, deletes with the full grace, and whose `stop` returns
once the pod is gone from the API server: a lease that is released earlier would give its GPUs out a second time. While
the API server does not answer, `poll` and `stop` wait: an error would be taken for the end of the server. Where it
refuses what a start or a stop needs, these fail with its reason.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import aiohttp
from jupyterhub.utils import exponential_backoff
from kubernetes_asyncio.client import V1DeleteOptions
from kubernetes_asyncio.client.rest import ApiException
from traitlets import Float, default

from . import api_refusal, pod_end
from .home_claim import HomeClaim
from .pod_watch import PodWatch
from .refusal import Refused

T = TypeVar("T")
READ_BYTES = 2**21
"""The read buffer of kubernetes_asyncio: an object of a watch is one line, of 1.5 MiB at most."""
_NOT_FOUND = 404
_SAVED_AS = "makeway_pod"
"""The key under which the Hub stores that a pod was created and not seen to go."""
START = "makeway/start"
"""The annotation of a pod that names its start."""
_UNSEEN = 5.0
"""Seconds after which the API server is asked for a pod that was created, and that the watch does not show."""
_REFUSED = 3.0
"""Seconds after which a refusal is one: twice that is less than the Hub waits for a stop before it answers."""
_FINAL = 3.0
"""Seconds for which a pod's phase is waited for once its server has ended"""
_WARN_AGAIN = 60.0
"""Seconds after which a warning about a request that still fails is repeated."""
_GLANCE = 0.1
"""Seconds between two looks at the watched pods, which cost no request."""


class PodSpawner(HomeClaim):
    """A notebook server in a pod, from its creation until its containers have ended."""

    lost_seconds = Float(
        10.0,
        min=0.0,
        help="A deleted pod that is still listed this many seconds after its grace counts as lost: its node is gone.",
    ).tag(config=True)
    look_seconds = Float(
        0.5, min=0.05, help="Seconds between two looks at the events of a starting pod, or two requests that failed."
    ).tag(config=True)

    started_here = False
    """Whether this object began a start, so that it knows of every pod."""
    _created = False
    """Whether there may be a pod: one was created, and it was not seen to go."""
    _creating: asyncio.Future[bool] | None = None
    _start_mark = ""
    """The annotation of the pods of this start, by which they are told from those of earlier ones."""
    _checked_at = 0.0
    """When the API server was last asked for a pod that the watch does not show (monotonic)."""
    _requested = False
    """Whether this start has requested a pod."""
    _deleting: tuple[str, float] = ("", 0.0)
    """the pod that is being deleted, by its UID, and since when (monotonic)"""
    _final_by: tuple[str, float] = ("", 0.0)
    """the pod whose server has ended, by its UID, and until when its phase is waited for (monotonic)"""
    _end = ""
    """How the pod ended, as `poll` found it: a sentence for its user."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (api := getattr(self, "api", None)) is not None:
            direct_api(api)

    @default("delete_grace_period")
    def _default_delete_grace_period(self) -> int:
        return 30  # KubeSpawner's default is one second, too short for a kernel to save anything

    @default("poll_interval")
    def _default_poll_interval(self) -> int:
        return 5  # a look at the watched pods, no request

    @property
    def _key(self) -> str:
        return f"{self.namespace}/{self.pod_name}"

    @property
    def pod(self) -> dict[str, Any] | None:
        """The pod as the watch showed it last; None where it shows none."""
        reflector = self.pod_reflector
        result: dict[str, Any] | None = reflector and reflector.pods.get(self._key)
        return result

    def _gone_pod(self) -> dict[str, Any] | None:
        """Return what the watch saw last of a pod that is gone."""
        reflector = self.pod_reflector
        result: dict[str, Any] | None = reflector and reflector.gone.get(self._key)
        return result

    async def _start_reflector(self, kind: str, reflector_class: type, **more: Any) -> Any:
        """Start a watch; that of the pods keeps what was seen last of each."""
        chosen = PodWatch if kind == "pods" else reflector_class
        try:
            return await super()._start_reflector(kind=kind, reflector_class=chosen, **more)
        except Exception:
            failed = self.reflectors.get(self._get_reflector_key(kind))
            if failed is not None:
                _gave_up(failed)  # reads the error: else asyncio logs it when the watch is collected
            raise

    async def follow_pods(self) -> None:
        """Watch the pods, again where KubeSpawner's watch gave up, as it does after a minute without an API server.

        Return once the pods are known.
        """
        await self._until_answered(self._follow_pods)

    async def _follow_pods(self) -> None:
        reflector = self.pod_reflector
        await self._start_watching_pods(replace=reflector is not None and _gave_up(reflector))

    async def _until_answered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until the API server answers it.

        A start and a stop raise ApiException where it refuses for `_REFUSED` seconds, which just after its own start it
        may do to all. Any other look at the pod goes on: the Hub would take an error for the end of the server.
        """
        warned = refused_since = None
        while True:
            try:
                answer = await request()
            except Exception as error:
                now = time.monotonic()
                refused_since = (refused_since or now) if api_refusal.refused(error) else None
                if refused_since is not None and self.pending in ("spawn", "stop") and now - refused_since >= _REFUSED:
                    raise
                if warned is None or now - warned >= _WARN_AGAIN:
                    message = api_refusal.api_message(error) if isinstance(error, ApiException) else error
                    self.log.warning("Kubernetes cannot tell whether the pod of %s runs: %s", self._log_name, message)
                    warned = now
                await asyncio.sleep(self.look_seconds)
            else:
                if warned is not None:
                    self.log.info("Kubernetes answers again about the pod of %s", self._log_name)
                return answer

    async def _start(self) -> Any:
        """Start the pod, with watches that did not give up: KubeSpawner would go on with one that knows nothing."""
        self._creating, self._requested, self._start_mark = None, False, secrets.token_hex(8)
        await self.follow_pods()
        events = self.event_reflector
        if events is not None and _gave_up(events):
            await self._start_watching_events(replace=True)
        starting = asyncio.ensure_future(super()._start())
        try:
            while not starting.done() and not self._runs():
                await asyncio.wait([starting], timeout=_GLANCE)
            return await starting if starting.done() else self._address()
        finally:
            starting.cancel()

    @property
    def created_pod(self) -> dict[str, Any] | None:
        """The pod of this start; None while it is not created, where the watch may show one of an earlier start."""
        return self._of_this_start(self.pod)

    @property
    def deleted_pod(self) -> dict[str, Any] | None:
        """The pod of this start as it was seen last, once it is deleted; None while it is not."""
        if (pod := self.created_pod) is not None:
            return pod if pod_end.is_deleting(pod) else None
        return self._of_this_start(self._gone_pod())

    def _of_this_start(self, pod: dict[str, Any] | None) -> dict[str, Any] | None:
        creating = self._creating
        if creating is None or not creating.done() or creating.cancelled() or creating.exception() is not None:
            return None
        if pod is None or not creating.result():
            return None
        return pod if (pod["metadata"].get("annotations") or {}).get(START) == self._start_mark else None

    async def vanished(self) -> bool:
        """Whether the API server has no pod of this start, though it was created: a watch may never have shown it."""
        creating = self._creating
        if creating is None or not creating.done() or self.pod is not None or self.created_pod is not None:
            return False
        if time.monotonic() - self._checked_at < _UNSEEN:
            return False
        self._checked_at = time.monotonic()
        try:
            await self.api.read_namespaced_pod(self.pod_name, self.namespace)
        except ApiException as error:
            return error.status == _NOT_FOUND
        except Exception:  # no answer: that tells nothing
            return False
        return False

    def _runs(self) -> bool:
        """Whether the pod runs, and nothing else is left to do for its start.

        KubeSpawner looks at its watch ever less often, in the end every five seconds.
        """
        more = self.internal_ssl or self.services_enabled or self.after_pod_created_hook
        return not more and bool(self.is_pod_running(self.created_pod))

    def _address(self) -> Any:
        pod = self.pod
        assert pod is not None
        self.pod_id = pod["metadata"]["uid"]
        return self._get_pod_url(pod)

    def _get_pod_port(self, pod: dict[str, Any]) -> int:
        """Return the port of the notebook's container, whatever other containers have none; else the configured one."""
        for container in pod["spec"]["containers"]:
            for port in container.get("ports") or ():
                if port.get("name") == "notebook-port":
                    return int(port["containerPort"])
        return int(self.port)

    async def _make_create_pod_request(self, pod: Any, request_timeout: float) -> bool:
        """Create the pod in a task of its own: a start cancelled meanwhile must learn that there is a pod to delete."""
        self._created = True
        self._checked_at = time.monotonic()
        pod.metadata.annotations = {**(pod.metadata.annotations or {}), START: self._start_mark}
        self.save_state()
        self._creating = asyncio.ensure_future(self._create(pod, request_timeout))
        return await asyncio.shield(self._creating)

    async def _create(self, pod: Any, request_timeout: float) -> bool:
        """Create the pod; one that an earlier request of this start created, unanswered, is not replaced."""
        if self._requested:
            try:
                result = await asyncio.wait_for(
                    self.api.read_namespaced_pod(self.pod_name, self.namespace), request_timeout
                )
            except TimeoutError:
                return False
            except ApiException as error:
                if error.status != _NOT_FOUND:
                    raise
            else:
                mark = (result.metadata.annotations or {}).get(START)
                same = (pod.metadata.labels or {}).items() <= (result.metadata.labels or {}).items()
                if result.metadata.deletion_timestamp is None and same and mark == self._start_mark:
                    return True
        self._check_other()
        self._requested = True
        return bool(await super()._make_create_pod_request(pod, request_timeout))

    def _is_other(self, pod: dict[str, Any] | None) -> bool:
        """Whether a pod of this name is of another release in the namespace, which this Hub never deletes."""
        return pod is not None and bool(self._other_release(pod["metadata"].get("labels") or {}))

    def _check_other(self) -> None:
        """Raise Refused where the name of the pod is taken: KubeSpawner would delete the pod that has it."""
        if self._is_other(self.pod):
            self._created = False
            raise Refused(
                f"The notebook could not be started: its pod would be called {self.pod_name}, as one of another "
                "installation in this namespace is. An administrator has to set a pod_name_template of its own for "
                "one of the two, or to install one of them in another namespace.",
                code="pod_of_another_release",
            )

    def save_state(self) -> None:
        """Write the state to the Hub's database."""

    async def poll(self) -> int | None:
        """Return None while the containers may run, else an exit status; an evicted pod is deleted."""
        if self.started_here and not self._created:
            return 1  # no pod was requested, so there is nothing to ask for
        await self.follow_pods()
        pod = self.pod
        if self._is_other(pod):
            self._created, self._end = False, "Its pod was replaced by one of another installation in the namespace."
            return 1
        if pod is not None and self._lost(pod):
            self.log.warning("The pod of %s is lost with its node: %s", self._log_name, pod_end.cause(pod) or "deleted")
            self._end = "Its node does not answer, so nothing tells when its server ends."
            return 1
        if pod is not None and pod_end.server_has_ended(pod):
            pod = await self._final(pod)
        status: int | None = await super().poll()
        if status is not None:
            self._end = pod_end.end_message(pod or self._gone_pod(), gone=pod is None)
        if pod is not None and pod_end.has_ended(pod):
            self._end = pod_end.end_message(pod)
            self.log.warning("The pod of %s has ended: %s", self._log_name, pod_end.cause(pod) or "no reason is given")
            if self.delete_stopped_pods:
                await self.stop(now=True)
            return 1 if status is None else status
        return status

    async def _final(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """Return the pod of a server that has ended once its phase is final, else as it is after `_FINAL` seconds.

        The kubelet reports an eviction only after the end of the containers; beside another container, the phase stays.
        """
        uid = pod["metadata"]["uid"]
        if self._final_by[0] != uid:
            self._final_by = (uid, time.monotonic() + _FINAL)
        current: dict[str, Any] | None = pod
        while current is not None and current["metadata"]["uid"] == uid and time.monotonic() < self._final_by[1]:
            if pod_end.has_ended(current) or pod_end.is_deleting(current):
                break
            await asyncio.sleep(_GLANCE)
            current = self.pod
        return current

    async def stop(self, now: bool = False) -> None:
        """Delete the pod and return once the API server has it no more, or once it is lost.

        Without a grace (`now`) only a pod is deleted whose containers have ended or are out of reach: the API server
        forgets such a pod at once, while its containers still hold its GPUs.
        """
        await self._wait_until_created()
        await self.follow_pods()
        pod = self.pod
        if self._is_other(pod):
            self._created = False
            return
        over = pod is not None and (pod_end.has_ended(pod) or self._lost(pod))
        seconds = 0 if now and over else self.delete_grace_period
        await self._until_answered(partial(self._delete, seconds))
        while not await self._until_answered(self._gone):
            await asyncio.sleep(_GLANCE)
            await self.follow_pods()
        if now and self.pod is not None:  # lost: only this removes it before its node is back
            await self._until_answered(partial(self._delete, 0))
        self._created = False
        if self.pod_reflector:
            self.pod_reflector.gone.pop(self._key, None)

    async def _delete(self, seconds: int) -> None:
        options = V1DeleteOptions(grace_period_seconds=seconds)
        request = partial(self._make_delete_pod_request, self.pod_name, options, seconds, self.k8s_api_request_timeout)
        what = f"The pod {self.namespace}/{self.pod_name} could not be deleted"
        await exponential_backoff(request, what, timeout=self.k8s_api_request_retry_timeout)

    async def _wait_until_created(self) -> None:
        """Wait for a request that creates the pod, except within that request, which stops a pod of the same name."""
        creating = self._creating
        if creating is not None and creating is not asyncio.current_task() and not creating.done():
            await asyncio.wait([creating])

    async def _gone(self) -> bool:
        """Whether the pod is gone or lost; the API server is asked only where the watch shows no pod."""
        pod = self.pod
        if pod is not None:
            return self._lost(pod)
        try:
            await self.api.read_namespaced_pod(self.pod_name, self.namespace)
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return True
            raise
        return False

    def kept(self) -> bool:
        """Whether the pod has ended and the site wants to look at it (`delete_stopped_pods`)."""
        pod = self.pod
        return pod is not None and pod_end.has_ended(pod) and not self.delete_stopped_pods

    def _lost(self, pod: dict[str, Any]) -> bool:
        """Whether a deleted pod is lost with its node: its grace is over, and no kubelet confirms that it has ended."""
        if not pod_end.is_deleting(pod) or pod_end.has_ended(pod):
            return False
        uid = pod["metadata"]["uid"]
        if self._deleting[0] != uid:
            self._deleting = (uid, time.monotonic() - pod_end.seconds_since_deletion(pod, time.time()))
        return time.monotonic() - self._deleting[1] > pod_end.grace_seconds(pod) + self.lost_seconds

    def load_state(self, state: dict[str, Any]) -> None:
        """Read back whether there may be a pod."""
        super().load_state(state)
        self._created = bool(state.get(_SAVED_AS))

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores."""
        state: dict[str, Any] = super().get_state()
        if self._created:
            state[_SAVED_AS] = True
        return state


def direct_api(api: Any) -> None:
    """Make a client of KubeSpawner reach the API server directly; its library has no setting for this.

    Else the Hub's requests went through a proxy of its environment, and a .netrc file would break or replace its
    credentials. A proxy that the kubeconfig names stays.
    """
    rest = api.api_client.rest_client
    session = rest.pool_manager
    if session.trust_env:
        connector = session.connector
        session.detach()
        rest.pool_manager = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=READ_BYTES)


def _gave_up(reflector: Any) -> bool:
    """Whether a watch has ended, or never began because its first list failed: then it knows of no pod."""
    first, watch = reflector.first_load_future, reflector.watch_task
    if first.done() and (first.cancelled() or first.exception() is not None):
        return True
    return watch is not None and watch.done()
