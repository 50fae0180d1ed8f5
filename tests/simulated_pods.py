"""A cluster in memory, on a clock of its own: nodes, a scheduler, kubelets, launchers that save, and watches that lag.

The service of a test is a real one: its loop, store, engine and Kubernetes backend. Only the API server and what is
behind it are simulated, so that a history of minutes takes a fraction of a second. The clock moves from event to event.
"""

from __future__ import annotations

import heapq
import itertools
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from makeway_api.pods import SESSION
from makeway_quota.application import Application
from makeway_quota.backends.base import Key
from makeway_quota.backends.kubernetes.api.client import ApiClient, ApiStatusError, Object
from makeway_quota.backends.kubernetes.api.connection import Connection
from makeway_quota.backends.kubernetes.api.informer import Informer
from makeway_quota.backends.kubernetes.backend import KubernetesBackend
from makeway_quota.backends.kubernetes.cluster.pod_requests import ATTEMPT, JOB, WORKER, pod_requests
from makeway_quota.backends.kubernetes.pods.manifest import PodSettings
from makeway_quota.backends.remote.workers import WorkerStatus
from makeway_quota.control.loop import Loop
from makeway_quota.control.order_retries import OrderRetries
from makeway_quota.settings import ServiceSettings, load
from makeway_quota.store.records import NewWorkload, Workload

GPU = "nvidia.com/gpu"
PODS = "/api/v1/namespaces/jobs/pods"
EPOCH = 1_800_000_000.0
SETTINGS = PodSettings(
    "jobs", "here", "http://10.0.0.1:1/services/makeway", "makeway:1", "notebook:1", checkpoint_claim="checkpoints"
)


@dataclass(slots=True)
class Habits:
    """How the pods of one workload behave; seconds."""

    saves: float = 0.0
    """from the notice to the end of its worker; beyond its grace it is killed at the deadline"""
    exits: float = 0.02
    """from the worker's report to the end of its container"""
    lingers: float = 0.0
    """for which a container beside the worker goes on once the pod is deleted"""
    stuck: bool = False
    """it never ends, whatever deletes it"""


@dataclass(slots=True)
class Running:
    """A pod as its kubelet has it."""

    pod: Object
    began: float | None = None
    reported: bool = False
    over: bool = False
    asked_to_end: bool = False

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def key(self) -> tuple[str, int, int]:
        """Workload, attempt and worker; of a notebook its session, 0 and 0."""
        labels = self.pod["metadata"]["labels"]
        if SESSION in labels:
            return labels[SESSION], 0, 0
        return labels[JOB], int(labels[ATTEMPT]), int(labels[WORKER])

    @property
    def is_notebook(self) -> bool:
        return SESSION in self.pod["metadata"]["labels"]

    @property
    def node(self) -> str:
        return str(self.pod["spec"].get("nodeName") or "")

    @property
    def gpus(self) -> int:
        return pod_requests(self.pod["spec"]).get(GPU, 0)


class Reports:
    """What the launchers reported, as the backend's channel shows it."""

    def __init__(self) -> None:
        self.workers: dict[Key, dict[int, WorkerStatus]] = {}
        self._changed: set[Key] = set()

    def report(self, pod: Running, seen: WorkerStatus) -> None:
        workload, attempt, worker = pod.key
        self.workers.setdefault((workload, attempt), {})[worker] = seen
        self._changed.add((workload, attempt))

    def on_change(self, wake: Callable[[], None]) -> None: ...

    async def refresh(self) -> bool:
        return bool(self._changed)

    def worker_statuses(self) -> Mapping[Key, Mapping[int, WorkerStatus]]:
        return self.workers

    def changed(self) -> set[Key]:
        changed, self._changed = self._changed, set()
        return changed

    def silent(self, seconds: float) -> Mapping[Key, int]:
        return {}

    async def record_final_reports(self, ends: object) -> set[tuple[str, int, int]]:
        return set()

    async def forget(self, workload: str, attempt: int) -> None:
        self.workers.pop((workload, attempt), None)
        self._changed.add((workload, attempt))

    def credentials(self, workload: str, attempt: int, worker: int) -> tuple[str, str]:
        return f"{workload}/{attempt}/{worker}", "token"


class SimulatedCluster(ApiClient):
    """Nodes and pods; `at` runs something later, `advance` lets time pass up to the next event."""

    def __init__(self, nodes: Mapping[str, int], random: Random | None = None, lag: float = 0.01) -> None:
        """`nodes`: GPUs by node; `lag`: the longest time, in seconds, by which each watch is behind."""
        self.connection = Connection("https://127.0.0.1:6443", ssl.create_default_context(), namespace="jobs")
        self.now = EPOCH
        self.random = random or Random(0)
        self.lag = lag
        self.habits: dict[str, Habits] = {}
        self.usual = Habits()
        self.reports = Reports()
        self.pods: dict[str, Running] = {}
        self.gpus = dict(nodes)
        """by node, also while its device plugin is away"""
        self.nodes = {name: _node(name, gpus) for name, gpus in nodes.items()}
        self.backend: SimulatedBackend | None = None
        self.refuses_deletes = False
        self.without_plugin: set[str] = set()
        """nodes whose kubelet has lost its device plugin: it refuses each pod with GPUs"""
        self.deletes: list[tuple[float, str]] = []
        self.bound: dict[str, float] = {}
        """when pods were bound, by name"""
        self.exited: dict[str, float] = {}
        """when the last container of a pod ended, by name"""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._heard_until: dict[Informer[Any], float] = {}

    # -- time

    def at(self, seconds: float, happens: Callable[[], None]) -> None:
        """Make something happen so many seconds from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), happens))

    def advance(self, until: float) -> bool:
        """Go on to the next event, with all that happens at the same moment; False if there is none before `until`."""
        if not self._queue or self._queue[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now = max(self.now, self._queue[0][0])
        while self._queue and self._queue[0][0] <= self.now:
            heapq.heappop(self._queue)[2]()
        return True

    # -- the API server

    def abort_requests(self) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        """Nothing is open."""

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        if path == "/api/v1/nodes":
            return {"metadata": {"resourceVersion": "0"}, "items": [dict(node) for node in self.nodes.values()]}
        if path in (PODS, "/api/v1/pods"):
            held = "fieldSelector" in (query or {})
            there = [p for p in self.pods.values() if path != PODS or not p.is_notebook]
            result = [_copy(p.pod) for p in there if not held or (p.node and not p.over)]
            return {"metadata": {"resourceVersion": "0"}, "items": result}
        name = path.rpartition("/")[2]
        if path.startswith(PODS) and name in self.pods:
            return _copy(self.pods[name].pod)
        raise ApiStatusError(404, "NotFound", f"{name} is not there")

    async def create(self, path: str, body: Object) -> Object:
        made = _copy(body)
        name = made["metadata"]["name"]
        made["metadata"] |= {"uid": f"u{next(self._numbers)}", "creationTimestamp": self._time(self.now)}
        if path != PODS:
            return made
        if name in self.pods:
            raise ApiStatusError(409, "AlreadyExists", f"{name} is there")
        made["status"] = {"phase": "Pending"}
        self.pods[name] = Running(made)
        self._tell("ADDED", self.pods[name])
        self.at(0.005, self.schedule)
        return _copy(made)

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        name = path.rpartition("/")[2]
        if not path.startswith(PODS) or name not in self.pods:
            return False
        result = self.pods[name]
        if uid and result.pod["metadata"]["uid"] != uid:
            return False
        self.deletes.append((self.now, name))
        if self.refuses_deletes:
            raise ApiStatusError(500, "InternalError", "the admission webhook does not answer")
        metadata, usual = result.pod["metadata"], result.pod["spec"].get("terminationGracePeriodSeconds", 30)
        seconds = usual if grace is None else min(grace, usual)
        if "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = self._time(self.now + seconds)
            metadata["deletionGracePeriodSeconds"] = seconds
            self._tell("MODIFIED", result)
            if not result.node or result.over:
                self.at(0.005, lambda: self._gone(result))
            else:
                self._terminate(result, seconds)
        return True

    # -- the scheduler and the kubelets

    def free(self, node: str) -> int:
        """Return the GPUs of a node that no pod holds."""
        return int(self.nodes[node]["status"]["allocatable"][GPU]) - sum(
            p.gpus for p in self.pods.values() if p.node == node and not p.over
        )

    def schedule(self) -> None:
        """Bind the pods that fit on the node that they name, and that is ready."""
        for found in list(self.pods.values()):
            if found.node or "deletionTimestamp" in found.pod["metadata"]:
                continue
            terms = found.pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            node = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
            if node in self.nodes and _ready(self.nodes[node]) and self.free(node) >= found.gpus:
                found.pod["spec"]["nodeName"] = node
                self.bound[found.name] = self.now
                self._tell("MODIFIED", found)
                self.at(0.1 + self.random.random() * 0.1, lambda found=found: self._run(found))  # type: ignore[misc]

    def _run(self, found: Running) -> None:
        if found.over or found.name not in self.pods or "deletionTimestamp" in found.pod["metadata"]:
            return
        if found.node in self.without_plugin and found.gpus:
            self._refuse(found)
            return
        found.began = self.now
        running = {"name": "worker", "state": {"running": {}}}
        found.pod["status"] = {"phase": "Running", "containerStatuses": [running]}
        self._tell("MODIFIED", found)
        if not found.is_notebook:
            self.reports.report(found, WorkerStatus(started_at=self.now))

    def _refuse(self, found: Running) -> None:
        """End a pod as the kubelet does that cannot allocate its devices."""
        found.over = True
        message = f"Allocate failed due to no healthy devices present; cannot allocate unhealthy devices {GPU}"
        found.pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
        self._tell("MODIFIED", found)
        self.at(0.002, self.schedule)

    def lose_plugin(self, node: str, seconds: float, told_after: float) -> None:
        """Restart the device plugin of a node, whose pods go on; its GPUs are gone from its status later."""
        many = str(self.gpus[node])
        self.without_plugin.add(node)
        if told_after < seconds:
            self.at(told_after, lambda: self._offer(node, "0"))
        self.at(seconds, lambda: self.without_plugin.discard(node))
        self.at(seconds, lambda: self._offer(node, many))

    def _offer(self, node: str, gpus: str) -> None:
        """Change how many GPUs a node says that it has."""
        self.nodes[node]["status"]["allocatable"] = {GPU: gpus}
        if self.backend is not None:
            self._send(self.backend.inventory.nodes, "MODIFIED", self.nodes[node])
        self.at(0.005, self.schedule)

    def notice(self, row: Workload) -> None:
        """Make the workers of an attempt save and end, as they read its notice; a repetition does nothing."""
        assert row.notice is not None
        for result in self.pods.values():
            if result.key[:2] == (row.id, row.attempt) and not result.asked_to_end and result.began is not None:
                self._save(result, row.notice.deadline - self.now)

    def finish(self, workload: str) -> None:
        """Make the workers of a workload end by themselves."""
        for result in list(self.pods.values()):
            if result.key[0] == workload and result.began is not None and not result.asked_to_end:
                result.asked_to_end = True
                self._report(result, WorkerStatus(started_at=result.began, ended_at=self.now, exit_code=0))

    def _save(self, found: Running, grace: float) -> None:
        found.asked_to_end = True
        habits = self._habits(found)
        if habits.stuck:
            return
        late = habits.saves > grace
        self.reports.report(found, WorkerStatus(started_at=found.began, notice_received=True))
        self.at(max(0.0, min(habits.saves, grace)), lambda: self._saved(found, late))

    def _saved(self, found: Running, late: bool) -> None:
        if found.over:
            return
        seen = WorkerStatus(
            started_at=found.began,
            notice_received=True,
            ended_at=self.now,
            exit_code=-9 if late else 75,
            killed=late,
            acknowledged=not late,
            saved_at=None if late else self.now,
            step=None if late else 1,
        )
        self._report(found, seen)

    def _report(self, found: Running, seen: WorkerStatus) -> None:
        self.reports.report(found, seen)
        found.reported = True
        if not self._habits(found).lingers:
            self.at(self._habits(found).exits, lambda: self._end(found))

    def _terminate(self, found: Running, grace: float) -> None:
        """SIGTERM: a worker that knows of no notice saves now; the containers beside it end when they like."""
        habits = self._habits(found)
        if habits.stuck:
            return
        last = habits.lingers
        if not found.reported:
            last = max(last, habits.saves if found.began is not None and not found.asked_to_end else 0.0)
        self.at(min(max(last, habits.exits), grace), lambda: self._end(found))

    def _end(self, found: Running) -> None:
        if found.over:
            return
        found.over = True
        self.exited[found.name] = self.now
        ended = {"name": "worker", "state": {"terminated": {"exitCode": 75, "reason": "Error"}}}
        found.pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
        self._tell("MODIFIED", found)
        self.at(0.002, self.schedule)
        if "deletionTimestamp" in found.pod["metadata"]:
            self.at(0.05, lambda: self._gone(found))

    def release(self, workload: str) -> None:
        """End the stuck pods of a workload."""
        for result in list(self.pods.values()):
            if result.key[0] == workload and self._habits(result).stuck:
                self._end(result)

    def _gone(self, found: Running) -> None:
        if self.pods.get(found.name) is found:
            del self.pods[found.name]
            self._tell("DELETED", found)

    def set_ready(self, node: str, ready: bool) -> None:
        """Make a node ready or not, with the taint that Kubernetes gives it."""
        result = self.nodes[node]
        taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
        result["spec"]["taints"] = [] if ready else [taint, {**taint, "effect": "NoExecute"}]
        condition = {
            "type": "Ready",
            "status": "True" if ready else "False",
            "lastTransitionTime": self._time(self.now),
        }
        result["status"]["conditions"] = [condition]
        if self.backend is not None:
            self._send(self.backend.inventory.nodes, "MODIFIED", result)
        self.at(0.005, self.schedule)

    def _habits(self, found: Running) -> Habits:
        return self.habits.get(found.key[0], self.usual)

    # -- the watches

    def _tell(self, kind: str, found: Running) -> None:
        if self.backend is None:
            return
        if not found.is_notebook:
            self._send(self.backend.pods, kind, found.pod)
        if found.node:
            self._send(self.backend.inventory.pods, "DELETED" if found.over else kind, found.pod)

    def _send(self, informer: Informer[Any], kind: str, item: Object) -> None:
        """Send an event in the order in which they happen, some time later."""
        moment = max(self._heard_until.get(informer, 0.0), self.now + self.random.random() * self.lag)
        self._heard_until[informer] = moment
        text = _copy(item)
        text["metadata"]["resourceVersion"] = str(next(self._numbers))
        backend = self.backend

        def hear() -> None:
            if backend is self.backend:
                informer._event(json.dumps({"type": kind, "object": text}).encode())

        self.at(moment - self.now, hear)

    def _time(self, moment: float) -> str:
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class SimulatedBackend(KubernetesBackend):
    """The backend of pods on a simulated cluster, on its clock."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster, SETTINGS, monotonic=lambda: cluster.now)
        self._clock = lambda: cluster.now
        self.cluster = cluster

    def act_for_database(self, database: str) -> None:
        """Nothing else acts on the cluster."""

    def connect(self, channel: Any) -> None:
        super().connect(self.cluster.reports)  # type: ignore[arg-type]

    async def open(self) -> None:
        """Read everything once; the cluster sends the rest."""
        self.cluster.backend = self
        for informer in (self.inventory.nodes, self.inventory.pods, self.pods):
            await informer._list()
        self.inventory.devices.first_answer.set()
        await self.inventory._note_complete()


@dataclass(slots=True)
class Site:
    """A service on a simulated cluster, driven cycle by cycle."""

    cluster: SimulatedCluster
    folder: Path
    policy: str
    cycle_seconds: float = 0.02
    service: Application = field(init=False)
    cycled: Callable[[], None] = field(default=lambda: None)
    """called after each cycle"""

    async def start(self) -> None:
        """Start the service, or start it again."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "policy.yaml").write_text(self.policy)
        environ = {
            "MAKEWAY_STATE_DIR": str(self.folder),
            "MAKEWAY_POLICY_FILE": str(self.folder / "policy.yaml"),
            "MAKEWAY_TICKET_SECRET": "a secret that all replicas have",
        }
        backend = SimulatedBackend(self.cluster)
        self.service = await self.opened(load(environ=environ), backend)
        self.loop.actuator.retries = OrderRetries(lambda: self.cluster.now)
        await self.loop.take_over(self.service.components.leader.term or 0)

    async def opened(self, settings: ServiceSettings, backend: SimulatedBackend) -> Application:
        """Return the service, not started yet, with the clock of its cluster."""
        return await Application.open(settings, backend, clock=lambda: self.cluster.now)

    @property
    def loop(self) -> Loop:
        return self.service.loop

    async def stop(self) -> None:
        """Kill the service; pods go on."""
        self.cluster.backend = None
        await self.service.stop(stop_jobs=False)

    async def restart(self) -> None:
        """Kill the service and start it again."""
        await self.stop()
        await self.start()

    def submit(self, id: str, team: str, profile: str = "one", **more: Any) -> None:
        """Submit a job, or a session, as the API would."""
        store = self.service.components.store
        wanted = {"kind": "job", "owner": team, "gpus": 1000, "command": ("train",), "grace": 30.0} | more
        store.add_workload(NewWorkload(id, team=team, profile=profile, name=id, **wanted), now=self.cluster.now)

    async def rows(self) -> dict[str, Workload]:
        """Return all rows that have not ended."""
        return await self.service.components.world.rows()

    async def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Spend time; a cycle follows each event, as the loop is woken by it, and each second."""
        end = self.cluster.now + seconds
        while self.cluster.now < end and not until():
            self.cluster.advance(min(end, self.cluster.now + 1.0))
            for row in (await self.rows()).values():
                if row.notice is not None and row.state == "checkpointing":
                    self.cluster.notice(row)
            for _ in range(5):
                if not await self.loop.cycle():
                    break
            self.cycled()
            self.cluster.now += self.cycle_seconds


def _copy(item: Object) -> Object:
    result: Object = json.loads(json.dumps(item))
    return result


def _node(name: str, gpus: int) -> Object:
    many = {GPU: str(gpus)}
    status = {"capacity": many, "allocatable": many, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "resourceVersion": "0"}, "spec": {}, "status": status}


def _ready(node: Object) -> bool:
    return bool(node["status"]["conditions"][0]["status"] == "True")
