"""Several backends at a time: work runs on each, one that fails stops no other, and none of its attempts is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elsewhere import Processes
from makeway_api.models import Job, JobRequest, SessionRequest
from makeway_quota.backends.base import Backend, BackendUnavailable, NodeStatus, Observation, StartOrder
from makeway_quota.backends.choice import make_backend
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.backends.routing.part import PartLimits
from makeway_quota.backends.routing.placements import EndedPlacements
from makeway_quota.settings import load
from pod_backend import order
from running import Running, python, running

POLICY = """
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: far, nodes: {labels: {kind: far}}}
profiles:
  - {name: here1, gpus: 1, pools: [here], policies: [[rnd]]}
  - {name: far1, gpus: 1, pools: [far], policies: [[rnd]]}
  - {name: both1, gpus: 1, pools: [here, far], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [here], reserved: 2}, {pools: [far], reserved: 2}]}
"""
SOON = PartLimits(open=0.05, observe=0.05, order=0.05)


def memory(name: str = "far", *nodes: str) -> MemoryBackend:
    result = MemoryBackend([NodeStatus(node, "far", (0, 1), virtual=True) for node in nodes or ("far-1",)])
    result.name = name
    return result


def local(folder: Path) -> LocalBackend:
    return LocalBackend(folder, nodes=[NodeStatus("here-1", "", (0, 1), virtual=True)], tick=0.2)


def words(run: Running, job: str) -> Callable[[], object]:
    async def reason() -> str:
        result = await run.client("root").job(job)
        return result.reason.message if result.reason else ""

    return reason


async def test_jobs_run_on_both_and_each_is_ended_logged_and_removed_where_it_ran(tmp_path: Path) -> None:
    far = memory()
    both = RoutingBackend([local(tmp_path / "var"), far])
    async with running(tmp_path / "var", POLICY, backend=both) as run:
        here = await run.submit("ana", "near", python("print('from here')"), profile="here1")
        there = await run.submit("ana", "distant", profile="far1")
        await run.job(here.id, "succeeded")
        await run.job(there.id, "running")
        assert far.newest(there.id).order.workers[0].backend == "far"
        assert "from here" in (await run.client("ana").logs(here.id, attempt=1, offset=0, limit=1000)).text
        far.newest(there.id).log.extend(b"from there")
        assert "from there" in (await run.client("ana").logs(there.id, attempt=1, offset=0, limit=1000)).text
        await run.client("ana").cancel(there.id)
        await run.job(there.id, "cancelled")
        assert {node.name: node.backend for node in run.service.components.world.observation.nodes} == {
            "here-1": "local",
            "far-1": "far",
        }
        await run.until(lambda: not far.attempts, "what is over is forgotten on its backend")


async def test_checkpoints_count_by_the_backend_on_which_a_job_runs(tmp_path: Path) -> None:
    """Those of jobs here are found again, though those elsewhere end with their machines."""
    here = MemoryBackend([NodeStatus("here-1", "here", (0, 1), virtual=True)], leaves_after=0.1, real_time=True)
    far = MemoryBackend([NodeStatus("far-1", "far", (0, 1), virtual=True)], leaves_after=0.1, real_time=True)
    far.name, far.durable_checkpoints = "far", False
    beginning = "starts from the beginning"
    over_quota = POLICY.replace("reserved: 2", "reserved: 0").replace("local: {gpus: all}", "labels: {kind: here}")
    async with running(tmp_path / "var", over_quota, backend=RoutingBackend([here, far])) as run:
        client, world = run.client("ana"), run.service.components.world
        for profile, backend in (("here1", here), ("far1", far)):
            durable = backend.durable_checkpoints
            dry = await client.dry_run(JobRequest(command=["true"], profile=profile, dry_run=True))
            assert (beginning in dry.risk) is not durable, dry.risk
            job = await run.submit("ana", profile, profile=profile)
            await run.job(job.id, "running")
            backend.save(job.id, 7)

            async def saved(id: str = job.id) -> Job | None:
                seen = await client.job(id)
                return seen if seen.checkpoint is not None else None

            seen = await run.until(saved, "its checkpoint is known")
            assert seen.durable_checkpoints is durable
            assert (beginning in seen.reason.message) is not durable, seen.reason.message
            (shown,) = [one for one in world._view.workloads() if one.id == job.id]
            assert (shown.last_checkpoint_at is not None) is durable
            await client.preempt_test(job.id)

            async def again(id: str = job.id) -> bool:
                return (await client.job(id)).attempt == 2

            await run.until(again, "it starts again")
            (message,) = [item.message for item in await client.job_events(job.id) if item.verb == "requeue"]
            assert (beginning in message) is not durable, message
            await client.cancel(job.id)
            await run.job(job.id, "cancelled")


class Breakable(MemoryBackend):
    """A backend that fails, or does not answer, while it is told to."""

    name = "far"
    fails = ""
    hangs = False

    def __init__(self) -> None:
        super().__init__([NodeStatus("far-1", "far", (0, 1), virtual=True)])
        self.released = asyncio.Event()

    async def observe(self, since: int | None = None) -> Observation:
        if self.fails:
            raise OSError(self.fails)
        if self.hangs:
            await self.released.wait()
        return await super().observe(since)


@pytest.mark.parametrize("broken", ["fails", "hangs"])
async def test_a_backend_that_fails_or_hangs_stops_no_other_and_none_of_its_jobs_is_lost(
    tmp_path: Path, broken: str
) -> None:
    far = Breakable()
    both = RoutingBackend([local(tmp_path / "var"), far], SOON._replace(order=20.0))
    async with running(tmp_path / "var", POLICY, backend=both) as run:
        there = await run.submit("ana", "distant", profile="far1")
        await run.job(there.id, "running")
        setattr(far, broken, "no route to host" if broken == "fails" else True)
        here = await run.submit("ana", "near", python("pass"), profile="here1")
        await run.job(here.id, "succeeded")
        kept = await run.job(there.id, "running")
        assert "far, which cannot be observed" in kept.reason.message
        assert run.service.services.audit is not None
        checks = (await run.service.services.audit.ready()).checks
        assert checks["backend"] == "cannot be observed: far"
        assert "Nodes and jobs of far are shown as they were seen last" in run.service.components.world.warnings[0]
        (machine,) = next(pool for pool in await run.client("root").pools() if pool.name == "far").nodes
        assert (machine.backend, machine.observed, machine.cordoned) == ("far", False, True)
        waits = await run.submit("ana", "waits", profile="far1")
        await run.job(waits.id, "pending")
        assert far.starts == 1
        far.fails, far.hangs = "", False
        far.released.set()
        run.service.loop.wake()
        await run.job(waits.id, "running")
        assert (await run.client("root").job(there.id)).attempt == 1
        await run.until(lambda: not run.service.components.world.warnings, "all is observed again")


async def test_a_service_with_one_backend_less_keeps_the_attempts_of_the_other_until_it_is_back(tmp_path: Path) -> None:
    far, var = memory(), tmp_path / "var"
    async with running(var, POLICY, backend=RoutingBackend([local(var), far]), MAKEWAY_KEEP=1) as run:
        there = await run.submit("ana", "distant", profile="far1")
        gone = await run.submit("ana", "gone", profile="far1")
        for job in (there, gone):
            await run.job(job.id, "running")
        far.ignoring |= {there.id, gone.id}
        far.close = _nothing  # type: ignore[method-assign]
    async with running(var, POLICY, backend=local(var)) as run:
        await run.converged()
        kept = await run.job(there.id, "running")
        assert kept.attempt == 1
        assert "It was started on far, which is not among the backends" in kept.reason.message
        assert "Jobs of far, which is not among the backends" in " ".join(run.service.components.world.warnings)
        await run.client("ana").cancel(gone.id)
        await run.job(gone.id, "cancelled")
        here = await run.submit("ana", "near", python("pass"), profile="here1")
        await run.job(here.id, "succeeded")
    async with running(var, POLICY, backend=RoutingBackend([local(var), far])) as run:
        await run.until(lambda: (gone.id, 1) not in far.attempts, "what was given up is ended there")
        assert (await run.job(there.id, "running")).attempt == 1
        far.finish(there.id)
        await run.job(there.id, "succeeded")
        assert far.starts == 2


async def _nothing(*, stop_jobs: bool) -> None:
    return None


class Late(MemoryBackend):
    """A backend that cannot be opened before it is there."""

    name = "far"

    def __init__(self) -> None:
        super().__init__([NodeStatus("far-1", "far", (0, 1), virtual=True)])
        self.there = False
        self.tries = 0

    async def open(self) -> None:
        self.tries += 1
        if not self.there:
            raise OSError("connection refused")


async def test_a_backend_that_starts_late_is_waited_for_by_its_own_jobs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_quota.backends.routing.part.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("makeway_quota.backends.routing.part.MAX_PAUSE", 0.01)
    far, var = Late(), tmp_path / "var"
    far.there = True
    async with running(var, POLICY, backend=RoutingBackend([local(var), far])) as run:
        there = await run.submit("ana", "distant", profile="far1")
        await run.job(there.id, "running")
        far.close = _nothing  # type: ignore[method-assign]
    far.there = False
    async with running(var, POLICY, backend=RoutingBackend([local(var), far], SOON._replace(order=20.0))) as run:
        here = await run.submit("ana", "near", python("pass"), profile="here1")
        await run.job(here.id, "succeeded")
        kept = await run.client("root").job(there.id)
        assert (kept.state.value, kept.attempt) == ("running", 1)
        assert "connection refused" in " ".join(run.service.components.world.warnings)
        far.there = True
        await run.until(lambda: not run.service.components.world.warnings, "it is observed")
        far.finish(there.id)
        await run.job(there.id, "succeeded")
        assert far.starts == 1


async def test_no_notebook_starts_where_only_jobs_run_and_offers_and_the_policy_check_say_so(tmp_path: Path) -> None:
    both = RoutingBackend([local(tmp_path / "var"), memory()])
    async with running(tmp_path / "var", POLICY, backend=both) as run:
        offers = {offer.profile: offer for offer in (await run.client("ana").offers("ana", "session")).offers}
        assert offers["here1"].code == "ready_now"
        for profile in ("far1", "both1"):
            assert offers[profile].code == "refused"
            assert "cannot be used for notebooks: it may go to the pool far" in offers[profile].message
            with pytest.raises(Exception, match="cannot be used for notebooks"):
                await run.client("spawner").request_session(SessionRequest(user="ana", profile=profile, team="rnd"))
        jobs = {offer.profile: offer.code for offer in (await run.client("ana").offers("ana", "job")).offers}
        assert jobs == {"here1": "ready_now", "far1": "ready_now", "both1": "ready_now"}
        check = await run.client("root").policy_validate(POLICY)
        assert check.ok
        assert {issue.where for issue in check.warnings} == {"profiles.far1", "profiles.both1"}


async def test_a_notebook_without_gpus_is_offered_and_started_on_the_first_backend_only(tmp_path: Path) -> None:
    """Its profile names no pool, so that it may run in any: the pool of the other backend comes first by name."""
    with_cpu = POLICY.replace("policies:\n", "  - {name: cpu0, gpus: 0, cpu: 1, policies: [[rnd]]}\npolicies:\n")
    far = memory()
    here = LocalBackend(tmp_path / "var", nodes=[NodeStatus("here-1", "", (0, 1), virtual=True, cpu=1000)], tick=0.2)
    async with running(tmp_path / "var", with_cpu, backend=RoutingBackend([here, far])) as run:
        asked = await run.session("ana", "cpu0", "rnd")
        session = await run.granted(asked.id)
        assert [place.node for place in session.placement] == ["here-1"]
        for kind, code in (("session", "waits"), ("job", "ready_now")):
            offers = {offer.profile: offer.code for offer in (await run.client("ana").offers("ana", kind)).offers}
            assert offers["cpu0"] == code, "the only core is in use"
        there = await run.submit("ana", "distant", profile="cpu0")
        assert [place.node for place in (await run.job(there.id, "running")).placement] == ["far-1"]


async def test_real_workers_elsewhere_and_local_ones_are_told_apart_by_their_reports(tmp_path: Path) -> None:
    """Two backends with workers that report by HTTP share one channel: each sees the reports of its own alone."""
    one, two = (Processes(tmp_path / name, "http://nowhere") for name in ("one", "two"))
    one.name, two.name = "one", "two"
    two._nodes = {"far-2": NodeStatus("far-2", "far", (0,), virtual=True)}
    both = RoutingBackend([one, two])
    both.use_backend_lookup(lambda id, attempt: {"j-1": "one", "j-2": "two"}.get(id, ""))
    channel = FakeChannel()
    both.connect(channel)  # type: ignore[arg-type]
    channel.reports = {("j-1", 1): {}, ("j-2", 1): {}}
    channel.new = {("j-1", 1), ("j-2", 1)}
    assert set(one.channel.worker_statuses()) == {("j-1", 1)}
    assert set(two.channel.worker_statuses()) == {("j-2", 1)}
    assert one.channel.changed() == {("j-1", 1)}
    assert two.channel.changed() == {("j-2", 1)}
    assert one.channel.changed() == set()


class FakeChannel:
    """A channel with the reports that the test sets."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], dict[int, object]] = {}
        self.new: set[tuple[str, int]] = set()
        for name in (
            "on_change",
            "refresh",
            "forget",
            "record_final_reports",
            "credentials",
            "log",
            "log_gap",
            "output",
        ):
            setattr(self, name, None)

    def worker_statuses(self) -> dict[tuple[str, int], dict[int, object]]:
        return self.reports

    def changed(self) -> set[tuple[str, int]]:
        new, self.new = self.new, set()
        return new


def test_settings_name_one_backend_or_several(tmp_path: Path) -> None:
    def backend(**environ: str) -> Backend:
        return make_backend(load(environ={"MAKEWAY_STATE_DIR": str(tmp_path), **environ}))

    assert backend().names == ("local",)
    config = tmp_path / "kubeconfig"
    config.write_text(
        "{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}], "
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: a, user: {token: t}}]}"
    )
    pods = {
        "MAKEWAY_KUBECONFIG": str(config),
        "MAKEWAY_KUBE_LAUNCHER_IMAGE": "makeway:1",
        "MAKEWAY_KUBE_NAMESPACE": "jobs",
        "MAKEWAY_WORKER_URL": "http://10.0.0.1/services/makeway",
    }
    both = backend(MAKEWAY_BACKEND=" local , kubernetes", **pods)
    assert both.names == ("local", "kubernetes")
    assert (both.shared, both.remote, both.keeps_outputs) == (False, True, True)
    for wrong in ("local,local", "moon", ",", "local,moon"):
        with pytest.raises(
            ValueError, match=r"MAKEWAY_BACKEND=.* is not accepted: use local or kubernetes or machines, or several"
        ):
            load(environ={"MAKEWAY_BACKEND": wrong})
    machines = backend(MAKEWAY_BACKEND="local,machines", MAKEWAY_MACHINE_CHECKPOINT_DIR="/mnt/checkpoints")
    assert (machines.names, machines.durable_checkpoints) == (("local", "machines"), True)
    for alone in ("machines", "machines,local"):
        with pytest.raises(ValueError, match="Name another one first, such as local,machines"):
            load(environ={"MAKEWAY_BACKEND": alone})
    with pytest.raises(ValueError, match="use the absolute path"):
        backend(MAKEWAY_BACKEND="local,machines", MAKEWAY_MACHINE_CHECKPOINT_DIR="checkpoints")


async def test_nodes_of_the_same_name_are_offered_by_one_backend_and_the_other_is_told_of(tmp_path: Path) -> None:
    one, two = memory("one", "n1", "n2"), memory("two", "n2", "n3")
    both = RoutingBackend([one, two])
    await both.open()
    seen = await both.observe()
    assert {node.name: node.backend for node in seen.nodes} == {"n1": "one", "n2": "one", "n3": "two"}
    assert [state.name_conflicts for state in seen.backends] == [(), ("n2",)]
    del one.nodes["n2"]
    seen = await both.observe(seen.version)
    assert {node.name: node.backend for node in seen.nodes} == {"n2": "two"}
    one.nodes["n2"] = NodeStatus("n2", "far", (0,))
    seen = await both.observe()
    assert {node.name: node.backend for node in seen.nodes}["n2"] == "two"  # who has it keeps it
    with pytest.raises(ValueError, match="Each backend is named once"):
        RoutingBackend([one, memory("one")])


async def test_an_order_that_hangs_is_broken_off_and_a_backend_that_is_away_is_asked_for_nothing() -> None:
    class Stuck(MemoryBackend):
        asked = 0

        async def start(self, order: StartOrder) -> None:
            self.asked += 1
            await asyncio.Event().wait()

    stuck = Stuck([NodeStatus("n1", "far", (0,))])
    both = RoutingBackend([memory("one", "n2"), stuck], SOON)
    await both.open()
    await both.observe()

    with pytest.raises(Exception, match="The backend memory did not answer in time"):
        await both.start(order_on(order("j-1"), "n1"))
    both.parts[1].failure = OSError("gone")
    with pytest.raises(Exception, match="The backend memory cannot be reached: gone"):
        await both.kill("j-1", 1)
    assert stuck.asked == 1


def order_on(order: StartOrder, node: str) -> StartOrder:

    return replace(order, workers=tuple(place._replace(node=node) for place in order.workers))


async def test_while_a_cycle_observes_a_backend_answers_and_only_a_late_one_is_left_alone() -> None:
    far = Breakable()
    both = RoutingBackend([far, memory("one", "n2")], SOON)
    await both.open()
    await both.observe()
    await both.start(order_on(order("j-1"), "far-1"))
    far.hangs = True
    observing = asyncio.create_task(both.observe())
    await asyncio.sleep(0)
    assert await both.log("j-1", 1, 0, 10) == (b"", 0)
    await observing
    with pytest.raises(BackendUnavailable, match="far cannot be reached: it does not answer"):
        await both.log("j-1", 1, 0, 10)
    far.hangs = False
    far.released.set()
    await both.observe()
    assert await both.log("j-1", 1, 0, 10) == (b"", 0)
    await both.close(stop_jobs=False)


async def test_a_backend_that_cannot_be_reached_hides_no_output_of_the_others(tmp_path: Path) -> None:
    far = memory()
    both = RoutingBackend([memory("away", "n2"), far], SOON)
    async with running(tmp_path / "var", POLICY, backend=both) as run:
        there = await run.submit("ana", "distant", profile="far1")
        await run.job(there.id, "running")
        far.newest(there.id).log.extend(b"from there")
        far.finish(there.id)
        await run.job(there.id, "succeeded")
        await run.until(lambda: not far.attempts, "it is forgotten")
        both.use_backend_lookup(lambda id, attempt: "")
        both.use_ended_backend_lookup(placements())
        both.parts[0].opened = False
        assert "from there" in (await run.client("ana").logs(there.id, attempt=1, offset=0, limit=100)).text
        both.parts[0].opened, both.parts[1].opened = True, False
        for ask in (
            run.client("ana").logs(there.id, attempt=1, offset=0, limit=100),
            run.client("ana").error(there.id),
            run.client("ana").job_storage(there.id),
        ):
            with pytest.raises(Exception, match="cannot be reached at the moment: The backend far") as refused:
                await ask
            assert refused.value.status == 503  # type: ignore[attr-defined]
        both.parts[1].opened = True


def placements(**ended: dict[int, str]) -> Callable[[str], Any]:
    async def read(workload: str) -> dict[int, str]:
        return ended.get(workload, {})

    return read


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_an_ended_job_wrote_is_read_from_its_own_backend_alone(tmp_path: Path, restarted: bool) -> None:
    far, away, var = memory(), memory("away", "n2"), tmp_path / "var"
    away.log = None  # type: ignore[method-assign, assignment]  # it is never asked
    async with running(var, POLICY, backend=RoutingBackend([away, far]), MAKEWAY_KEEP=1) as run:
        there = await run.submit("ana", "distant", profile="far1")
        await run.job(there.id, "running")
        far.finish(there.id)
        await run.job(there.id, "succeeded")
        await run.until(lambda: not far.attempts, "it is forgotten")
        if not restarted:
            await reads_of_far(run, there.id)
    if restarted:
        async with running(var, POLICY, backend=RoutingBackend([away, far])) as run:
            await reads_of_far(run, there.id)


async def reads_of_far(run: Running, id: str) -> None:
    """Read what a job without output left on the backend far, while the other one is away, and then far itself."""
    both, client = run.service.components.backend, run.client("ana")
    assert isinstance(both, RoutingBackend)
    both.parts[0].opened = False
    assert (await client.logs(id, attempt=1, offset=0, limit=100)).text == ""
    with pytest.raises(Exception, match="has left no exception"):
        await client.error(id)
    await client.job_storage(id)
    await both.remove_output(id, 1)
    both.parts[0].opened, both.parts[1].opened = True, False
    for ask in (client.logs(id, attempt=1, offset=0, limit=100), client.error(id)):
        with pytest.raises(Exception, match="cannot be reached at the moment: The backend far") as refused:
            await ask
        assert refused.value.status == 503  # type: ignore[attr-defined]
    both.parts[1].opened = True


async def test_where_ended_attempts_were_placed_is_read_once_and_kept_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("makeway_quota.backends.routing.placements.MAX_WORKLOADS", 2)
    asked: list[str] = []

    async def read(workload: str) -> dict[int, str]:
        asked.append(workload)
        return {} if workload == "new" else {1: "", 2: "far"}

    ended = EndedPlacements()
    ended.read = read
    assert [await ended.backend_of(("a", number)) for number in (1, 2, 1)] == ["", "far", ""]
    assert asked == ["a"]
    assert [await ended.backend_of(("a", 3)), await ended.backend_of(("new", 1))] == ["", ""]
    assert asked == ["a", "a", "new"]  # an attempt that has not ended may end
    for workload in ("b", "c", "b", "a"):
        assert await ended.backend_of((workload, 2)) == "far"
    assert asked == ["a", "a", "new", "b", "c", "a"]


async def test_a_backend_that_was_being_opened_is_closed() -> None:
    class Opening(MemoryBackend):
        closed = False

        async def open(self) -> None:
            await asyncio.Event().wait()

        async def close(self, *, stop_jobs: bool) -> None:
            self.closed = True

    opening = Opening([])
    both = RoutingBackend([memory("one"), opening], SOON._replace(open=0.0))
    await both.open()
    await both.close(stop_jobs=True)
    assert opening.closed


def test_every_method_of_a_backend_is_passed_on() -> None:
    methods = {name for name, value in vars(Backend).items() if callable(value) or isinstance(value, property)}
    assert {name for name in methods if not name.startswith("_")} <= vars(RoutingBackend).keys()


async def test_notices_of_all_backends_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def notices(*given: Any) -> list[Any]:
        return [("far1", "has no claim template")]

    far = memory()
    monkeypatch.setattr(far, "policy_notices", notices)
    monkeypatch.setattr(far, "pod_notices", notices)
    both = RoutingBackend([memory("one", "n2"), far])
    await both.open()
    assert await both.policy_notices(None) == await notices()  # type: ignore[arg-type]
    assert await both.pod_notices("ana", "rnd") == await notices()
