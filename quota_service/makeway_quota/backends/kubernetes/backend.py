"""Run jobs as pods of one Kubernetes cluster: one pod for each worker, with the launcher as its first process.

What runs is read back from the cluster: nodes and pods by informers, reports of workers by the attempt protocol. A
pod that never gets to run, for whatever reason, ends its attempt after a time that depends on the reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from makeway_api.durations import duration
from makeway_api.pods import INSTANCE, MANAGED_BY, MANAGER

from ...policy import Document
from ...quarantine import Quarantine
from ..base import (
    LOST_AFTER,
    BackendError,
    BackendFull,
    BackendRejected,
    BackendUnavailable,
    Key,
    NodeStatus,
    StartOrder,
    TerminationProgress,
)
from ..remote.backend import REPORT_WITHIN, RemoteBackend
from ..remote.worker_hosts import WorkerHosts
from .api.client import OTHER_PORT, SILENT, UNREACHABLE, ApiClient, ApiStatusError, ApiUnreachable, Object, run_all
from .api.health_check import HEALTH_CHECK_TIMING, HealthCheck, HealthCheckTiming
from .api.informer import DEFAULT_TIMING, Informer, Timing
from .attempts.attempt_pods import AttemptPods
from .attempts.creation import create_once
from .attempts.event_reader import EventReader
from .attempts.event_recorder import EventRecorder
from .attempts.pod_states import JobPod, project_job_pod
from .attempts.pod_waits import MAX_WAIT_SECONDS
from .attempts.removals import Removals
from .attempts.start_errors import start_error
from .attempts.termination_message import record_final_reports
from .cluster.cluster_lease import ClusterLease
from .cluster.dead_nodes import NODE_LOST_AFTER, DeadNodes, NodeReadiness
from .cluster.inventory import KubernetesInventory
from .cluster.nodes import Toleration, selectors
from .cluster.pod_requests import JOB
from .machines.held_nodes import held_nodes, machines_of
from .machines.provisioning_requests import consumed_by
from .pods.checkpoint_folders import CheckpointFolders
from .pods.claim_templates import ClaimTemplates
from .pods.gang import create_shared
from .pods.homes import Homes, HomeSetting
from .pods.manifest import PodSettings, attempt_name, pod_name, token_secret_of
from .pods.token_secrets import StartTokens, TokenSecrets
from .pods.volumes import team_mounts, with_mounts
from .pods.worker_pods import WorkerPods

log = logging.getLogger("makeway.kubernetes")

OPEN_TIMEOUT = 20.0
"""How long a service waits at its start for the first lists; then it begins without them."""
REMOVAL_GRACE = 2
"""Seconds that a pod gets which is removed and has nothing to save, or had its notice and its grace before."""
ZONE = "topology.kubernetes.io/zone"
"""The label of a node with its zone"""
MAX_CONCURRENT_CREATES = 16
"""Pods that are created at the same time, of all attempts together: fewer than the client has connections."""
UNREACHABLE_PAUSE = 10.0
"""How long nothing is asked of an API server that did not answer: each request that waits for it holds up a cycle."""
POLICY_CHECK_TIMEOUT = 5.0
"""How long the check of a policy document waits for what the API server says about its profiles."""
NO_CLAIMS = "Its pods would not get their GPUs, and an administrator has to act"
KEEP_GONE_PODS = 300.0
"""How long a follower remembers pods that are gone, of attempts without a report: only the leader forgets them."""


class KubernetesBackend(RemoteBackend):
    """The pods of one installation in one namespace of one cluster."""

    name = "kubernetes"

    def __init__(
        self,
        client: ApiClient,
        settings: PodSettings,
        tolerations: Sequence[Toleration] = (),
        *,
        timing: Timing = DEFAULT_TIMING,
        health_check_timing: HealthCheckTiming = HEALTH_CHECK_TIMING,
        limits: Mapping[str, float] = MAX_WAIT_SECONDS,
        home: HomeSetting | None = None,
        lost_after: float = LOST_AFTER,
        node_lost_after: float = NODE_LOST_AFTER,
        report_within: float = REPORT_WITHIN,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lost_after=lost_after, report_within=report_within, monotonic=monotonic)
        self.settings = settings
        self._client = client
        self.attempt_pods = AttemptPods(limits, monotonic)
        self._dead_nodes = DeadNodes(min(node_lost_after, lost_after), monotonic)
        self.lease: ClusterLease | None = None
        """of the database that this service acts for, once it is known"""
        self._unreachable_until = 0.0
        """until when the API server is not asked, as it did not answer (monotonic)"""
        self._wake: Callable[[], None] = lambda: None
        self.inventory = KubernetesInventory(
            *(client, (), settings.instance, self._changed, timing),
            namespace=settings.namespace,
            clock=lambda: self._clock(),
        )
        self.pods: Informer[JobPod] = Informer(
            client,
            f"{self._namespace}/pods",
            project_job_pod,
            query={"labelSelector": f"{MANAGED_BY}={MANAGER},{INSTANCE}={settings.instance},{JOB}"},
            wake=self._changed,
            gone=self.attempt_pods.gone,
            timing=timing,
        )
        self._worker_pods = WorkerPods(
            settings, self.inventory, tolerations, lambda *worker: self.channel.credentials(*worker)[0]
        )
        self._create = partial(create_once, client, settings)
        self._creating = asyncio.Semaphore(MAX_CONCURRENT_CREATES)
        self._tokens = TokenSecrets(partial(client.create, f"{self._namespace}/secrets"), settings.instance)
        self._removals = Removals(
            client, f"{self._namespace}/pods", settings.instance, lambda: self._may_act(), monotonic
        )
        self.folders = CheckpointFolders(client, settings, tolerations, lambda: self._may_act(), monotonic)
        self.durable_checkpoints = bool(settings.checkpoint_claim)
        self._events = EventRecorder(client, settings.namespace, lambda: self._may_act())
        self._event_reader = EventReader(client, settings.namespace, self._changed, monotonic)
        self._homes = Homes(client, settings.namespace, home, monotonic)
        self._claim_templates = ClaimTemplates(client, monotonic)
        self._health_check = HealthCheck(client, self._on_health_change, health_check_timing)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def reachable(self) -> bool:
        """Whether the API server answers this replica, which has seen all of the cluster."""
        elsewhere = self.lease is not None and bool(self.lease.problem)
        return self._health_check.answers and self.inventory.synced and self.pods.synced and not elsewhere

    @property
    def _namespace(self) -> str:
        return f"/api/v1/namespaces/{self.settings.namespace}"

    # -- what the service calls

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a node, a pod or a report changes."""
        super().on_change(wake)
        self._wake = wake

    def act_for_database(self, database: str) -> None:
        """Act on the pods only while this database holds the installation's Lease."""
        named = self.settings.namespace, self.settings.instance, database
        self.lease = ClusterLease(self._client, *named, self._changed, self._monotonic)

    def fence_with(self, may_act: Callable[[], bool]) -> None:
        """Act only while `may_act`, and while no other database acts on the pods."""
        super().fence_with(lambda: may_act() and (self.lease is None or self.lease.may_act))

    def begin_term(self) -> None:
        """Forget what an earlier term concluded and ordered, and end what it still deletes."""
        super().begin_term()
        self.attempt_pods.end_term()
        self._removals.drop()

    def quarantine_in(self, quarantine: Quarantine) -> None:
        """Add what an observation fails with to this quarantine."""
        super().quarantine_in(quarantine)
        self.attempt_pods.quarantine = self.inventory.quarantine = quarantine

    def follow_policy(self, document: Callable[[], Document]) -> None:
        """Use the pools and pod templates of the document that this returns."""
        self._worker_pods.follow(document)

    @property
    def problem(self) -> str:
        """Why the cluster cannot be followed at the moment; "" when it can."""
        silent = "" if self._health_check.answers else SILENT
        problem = self.inventory.problem or self.pods.problem or silent or (self.lease.problem if self.lease else "")
        in_pod, never = self._client.connection.token_file is not None, not self.pods.synced
        return f"{problem}; {OTHER_PORT}" if in_pod and never and problem.startswith((SILENT, UNREACHABLE)) else problem

    async def open(self) -> None:
        """Read nodes and pods, or begin without them where the API server is down; BackendError where it refuses."""
        await super().open()
        self._tasks = [asyncio.create_task(self.pods.run()), asyncio.create_task(self._health_check.run())]
        if self.lease is not None:
            self._tasks.append(asyncio.create_task(self.lease.run()))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                if self.lease is not None:
                    await self.lease.tried.wait()
                await self.inventory.open()
                await self.pods.wait_synced()
        except TimeoutError:
            why = self.problem or "it does not answer"
            message = f"The Kubernetes cluster at {self._client.connection.server} cannot be read: {why}."
            if self.inventory.refused or self.pods.refused:
                await self._stop_following(stop_jobs=False)  # the client is kept: it may be opened again
                raise BackendError(message) from None
            log.warning("%s Jobs go on, and nothing is decided until it can", message)

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop following the cluster; pods go on."""
        await self._stop_following(stop_jobs=stop_jobs)
        await self._client.close()

    async def _stop_following(self, *, stop_jobs: bool) -> None:
        await self.inventory.close()
        await self._removals.close()
        await self._events.close()
        await self._event_reader.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, super().close(stop_jobs=stop_jobs), return_exceptions=True)
        if self.lease is not None:
            await self.lease.release()

    async def nodes(self) -> Mapping[str, NodeStatus]:
        """Return the nodes by name, in the pools of the policy in force; none before there is one."""
        return held_nodes(self._worker_pods.nodes(), self.inventory.nodes.objects, machines_of(self.machine_source))

    async def hosts(self) -> Mapping[Key, WorkerHosts] | None:
        """Return what the pods of each attempt are together; None before the first complete list."""
        if not self.pods.synced or not self.inventory.synced:
            return None
        self._take_pod_changes()
        reported = self.channel.worker_statuses()
        if not self._may_act():
            self.attempt_pods.drop_last(KEEP_GONE_PODS, reported)
            self.attempt_pods.end_term()
            self._tokens.clear()
            self._removals.drop()
        usable = {name: node.ready for name, node in self.inventory.nodes.objects.items()}
        with self.quarantine.step("deleting pods that stay"):
            self._removals.retry_due(self._uid_of_listed, self._is_ending, self._check_reachable)
        with self.quarantine.step("looking for dead nodes"):
            self._dead_nodes.observe(self._node_states(), up_to_date=not self.problem)
        unrecorded = set[Key]()
        if self._may_act():
            unrecorded = await record_final_reports(self.channel, self.attempt_pods, reported)
            self._event_reader.observe(self.attempt_pods)
        result = self.attempt_pods.hosts(usable, self.channel.worker_statuses())
        # How these ended is known and not recorded yet: until then they are as they were.
        return result | {key: self._hosts.get(key, WorkerHosts(1)) for key in unrecorded & result.keys()}

    async def start(self, order: StartOrder) -> None:
        """Create the pods of an attempt; those that are there already are left alone."""
        self._check_reachable()
        key = (order.workload, order.attempt)
        if self._removals.undoing(key):
            raise BackendUnavailable("its pods of a start that was refused are being deleted")
        if self.attempt_pods.stranded(key):
            raise self._discard_start(order)
        tokens = [self.channel.credentials(*key, number)[1] for number in range(len(order.workers))]
        start_tokens = self._tokens.for_start(key, tokens)
        try:
            await self._start(order, start_tokens)
        finally:
            start_tokens.abandon()

    async def _start(self, order: StartOrder, start_tokens: StartTokens) -> None:
        key = (order.workload, order.attempt)
        try:
            manifests = self._worker_pods.manifests(order, start_tokens.secret.name, consumed_by(self.machine_source))
        except BackendUnavailable:
            raise
        except BackendError:
            self._tokens.done(key)
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # one job must not stop all others
            self._tokens.done(key)
            log.exception("The pods of %s cannot be described", attempt_name(order.workload, order.attempt))
            raise BackendError(f"Its pod cannot be made with the pod template of its profile: {error!r}") from error

        self._take_pod_changes()
        there = {pod.name: pod.uid for pod in self.attempt_pods.of(key) if pod.tokens == start_tokens.secret.name}

        async def create(manifest: Object) -> Object:
            name = manifest["metadata"]["name"]
            if name in there:
                return {**manifest, "metadata": {**manifest["metadata"], "uid": there[name]}}
            async with self._creating:
                self._check_reachable()  # others may have waited for it meanwhile
                return await self._create(manifest, order.admitted_at)

        pods: list[Object] = []
        try:
            if why := await self._claim_problem(order):
                raise BackendFull(f"{NO_CLAIMS}: {why}")
            home = await self._homes.mount(order.owner)
            mounts = [*([home] if home else ()), *team_mounts(self._worker_pods.document, order.team)]
            pods = await run_all([create(with_mounts(manifest, mounts)) for manifest in manifests])
            named = {token_secret_of(pod) for pod in pods}
            if len(named) > 1 or start_tokens.before in named:
                raise self._discard_start(order)
            await create_shared(self._create, self.settings, order, pods, self._creating)
            # Last, as no launcher runs without it: one that does has everything, wherever a start breaks off. Whole
            # attempts of other starts have theirs, or are stranded as soon as the kubelet misses it.
            if start_tokens.secret.name in named:
                await start_tokens.written(pods)
        except (ApiStatusError, ApiUnreachable) as error:
            raise self._start_failure(order, error, 0 if pods else len(manifests)) from error
        except BackendFull:  # nothing was created
            self._tokens.done(key)
            raise
        except BackendUnavailable:  # another request found that the API server does not answer
            self.attempt_pods.break_off(key)
            raise
        except asyncio.CancelledError:  # it took longer than this replica may act without looking again
            self._note_unreachable(ApiUnreachable(f"{SILENT} in time"))
            self.attempt_pods.break_off(key)
            raise
        self._tokens.done(key)
        self.attempt_pods.started(key, len(order.workers))

    async def remove(self, workload: str, attempt: int) -> None:
        """Delete the pods of an attempt; what belongs to them goes with them."""
        self._take_pod_changes()
        pods = [(pod.name, pod.uid, self._grace(pod)) for pod in self.attempt_pods.of((workload, attempt))]
        try:
            await self._removals.delete(pods, self._check_reachable)
        except (ApiStatusError, ApiUnreachable) as error:
            self._note_unreachable(error)
            raise BackendUnavailable(str(error)) from error
        except asyncio.CancelledError:
            self._note_unreachable(ApiUnreachable(f"{SILENT} in time"))
            raise
        self._tokens.done((workload, attempt))
        self.attempt_pods.show((workload, attempt))

    async def forget(self, workload: str, attempt: int) -> None:
        """Delete the pods, and report the attempt no more."""
        await super().forget(workload, attempt)
        self.attempt_pods.forget((workload, attempt))

    def termination_progress(self, workload: str) -> TerminationProgress | None:
        """Return what was done to end the pods that are left of a workload; None where there are none."""
        pods = [pod for key in self.attempt_pods.keys_of(workload) for pod in self.attempt_pods.of(key) if pod.present]
        result, asked = super().termination_progress(workload), self._removals.asked(pod.name for pod in pods)
        if not pods:
            return result
        targets, space = tuple(f"pod {pod.name}" for pod in pods), self.settings.namespace
        problem = next((item.problem for item in asked if item.problem), "")
        if result is not None:
            return replace(result, targets=targets, problem=result.problem or problem, namespace=space)
        if not asked:
            return TerminationProgress(targets, namespace=space)
        next_at = self._clock() + min(item.next_at for item in asked) - self._monotonic()
        return TerminationProgress(targets, max(item.tries for item in asked), next_at, problem, space)

    def cut_off(self) -> Mapping[Key, tuple[int, str]]:
        """Return the attempts with a silent worker on a dead node."""
        result: dict[Key, tuple[int, str]] = {}
        if dead := self._dead_nodes.dead():
            silence = duration(self._dead_nodes.after)
            for key, worker in self.channel.silent(self._dead_nodes.after).items():
                node = next((pod.node for pod in self.attempt_pods.of(key) if pod.worker == worker), "")
                if node in dead:
                    result[key] = worker, f"its node {node} is down, and worker {worker} was not heard of for {silence}"
        return result

    def unreported_message(self, key: Key, worker: int) -> str:
        """Return which address a launcher did not reach, from which node, and what to check."""
        node = next((pod.node for pod in self.attempt_pods.of(key) if pod.worker == worker), "an unknown node")
        return (
            f"the launcher of worker {worker} on {node} did not reach {self.settings.address} within "
            f"{duration(self.report_within)}: check MAKEWAY_WORKER_URL and the network policies"
        )

    def publish_event(self, key: Key, code: str, message: str) -> None:
        """Show a decision about an attempt as an event of its pods."""
        self._events.publish_events(self.attempt_pods.known(key), code, message)

    async def pod_notices(self, owner: str, team: str) -> list[str]:
        """Return why the pods of a job do not have its owner's home, where they do not."""
        paths = [mount.path for mount in team_mounts(self._worker_pods.document, team)]
        return list(filter(None, [await self._homes.home_notice(owner, paths)]))

    async def policy_notices(self, document: Document) -> list[tuple[str, str]]:
        """Return the profiles whose pods would not get their GPUs by the claims of their pod templates."""
        own = {"job": self.settings.namespace, "session": self._client.connection.namespace}
        try:
            async with asyncio.timeout(POLICY_CHECK_TIMEOUT):
                return await self._claim_templates.profile_problems(document, selectors(document), own)
        except (ApiStatusError, ApiUnreachable, TimeoutError) as error:
            log.info("The claim templates of profiles cannot be looked at: %s", error)
            return []

    async def notebook_problem(self, profile: str) -> str:
        """Return why no notebook of a profile would get its GPUs by the claims of its pod template."""
        document = self._worker_pods.document
        definition = document.profile(profile) if document is not None else None
        if document is None or definition is None or self.problem or self._monotonic() < self._unreachable_until:
            return ""
        try:
            async with asyncio.timeout(POLICY_CHECK_TIMEOUT):
                return await self._claim_templates.notebook_problem(
                    document, definition, selectors(document), self._client.connection.namespace
                )
        except (ApiStatusError, ApiUnreachable, TimeoutError) as error:
            log.info("The claim templates of %s cannot be looked at: %s", profile, error)
            return ""

    # -- inside

    async def _claim_problem(self, order: StartOrder) -> str:
        """Return why the pods of an attempt would not get their GPUs by claims; "" where they would, or have none."""
        for template, gpus, resource in self._worker_pods.claims(order):
            if why := await self._claim_templates.problem(template, gpus, resource, self.settings.namespace):
                return why
        return ""

    def _uid_of_listed(self, name: str) -> str | None:
        """Return the UID of a pod that is listed."""
        pod = self.pods.objects.get(f"{self.settings.namespace}/{name}")
        return None if pod is None else pod.uid

    def _node_states(self) -> dict[str, NodeReadiness]:
        """Return where the nodes of pools are, and which of them are ready."""
        result = {name: node for name, node in self.inventory.node_statuses().items() if node.pool}
        zones = {name: self.inventory.nodes.objects[name].labels.get(ZONE, "") for name in result}
        return {
            name: NodeReadiness(node.ready, node.pools, zones[name], node.down_since) for name, node in result.items()
        }

    def _is_ending(self, name: str) -> bool:
        """Whether the end of the attempt of a pod was ordered, so that its pods are removed again for that."""
        key = self.attempt_pods.key_of(name)
        return key is not None and self._ending(key) is not None

    def _grace(self, pod: JobPod) -> int | None:
        """Return the seconds that a pod gets when it is deleted; None: its own, in which its job saves.

        A job that was to save and end, and whose launcher does not show that it knows, learns it by the deletion.
        """
        ending = self._ending(pod.key)
        worker = self.channel.worker_statuses().get(pod.key, {}).get(pod.worker)
        notice_received = worker is not None and (worker.notice_received or worker.ended)
        return None if pod.over or (ending is not None and ending.notice and not notice_received) else REMOVAL_GRACE

    def _changed(self) -> None:
        self._wake()

    def _on_health_change(self, answers: bool) -> None:
        """Take up everything at once when the API server answers again; a leader hands over when it does not.

        It does so between two cycles, so nothing that the present one has requested is waited for.
        """
        if answers:
            self._unreachable_until = 0.0
            self.pods.retry_now()
            self.inventory.retry_now()
        else:
            self._client.abort_requests()
        self._changed()

    def _take_pod_changes(self) -> None:
        self.attempt_pods.sort(self.pods.take(), self.pods.objects)

    def _check_reachable(self) -> None:
        """Raise BackendUnavailable where the API server is known not to answer: trying would hold up the cycle."""
        if self.problem or self._monotonic() < self._unreachable_until:
            raise BackendUnavailable(self.problem or SILENT)

    def _note_unreachable(self, error: BaseException) -> None:
        """Remember for a while that the API server did not answer: nothing is asked of it then."""
        if isinstance(error, ApiUnreachable):
            self._unreachable_until = self._monotonic() + UNREACHABLE_PAUSE

    def _start_failure(self, order: StartOrder, error: Exception, pods: int) -> BackendError:
        """Return why a start broke off. What was refused leaves no pods; without an answer, it goes on from there."""
        self._note_unreachable(error)
        key, result = (order.workload, order.attempt), start_error(error, pods)
        (self.attempt_pods.break_off if isinstance(result, BackendUnavailable) else self.attempt_pods.show)(key)
        if isinstance(error, ApiStatusError):  # also for a while: half a gang would keep what another one needs
            self._tokens.done(key)
            self._remove_created_pods(order)
        return result

    def _discard_start(self, order: StartOrder) -> BackendRejected:
        """Delete the pods of a start that broke off, which get their tokens no more; return what to raise."""
        key = (order.workload, order.attempt)
        self.attempt_pods.break_off(key)
        self._tokens.done(key)
        self._remove_created_pods(order)
        return BackendRejected("its pods are of a start that broke off, and are made anew")

    def _remove_created_pods(self, order: StartOrder) -> None:
        key = (order.workload, order.attempt)
        self._removals.undo(key, [pod_name(*key, number) for number in range(len(order.workers))])
