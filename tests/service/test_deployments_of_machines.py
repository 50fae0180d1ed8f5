"""A deployment on the cloud in a folder, with real machines, agents and jobs: it grows for what waits, and shrinks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from job_service import TRAIN
from makeway_api.errors import MakewayError
from makeway_quota.autoscale.machine import Machine
from makeway_quota.autoscale.providers.local import LocalFaults, LocalProvider
from makeway_quota.backends.base import NodeStatus
from makeway_quota.backends.machines.backend import MachinesBackend
from makeway_quota.backends.memory import MemoryBackend
from makeway_quota.backends.routing.backend import RoutingBackend
from makeway_quota.services import Caller
from running import Running, python, running
from web.portal import serving

pytestmark = pytest.mark.slow

POLICY = """
version: 1
pools:
  - {name: here, nodes: {local: {gpus: all}}}
  - {name: cloud, kind: autoscaled}
profiles:
  - {name: gpu1, gpus: 1, pools: [cloud], policies: [[rnd]]}
  - {name: gpu2, gpus: 2, pools: [cloud], policies: [[rnd]]}
policies:
  - {name: rnd, groups: [rnd], quotas: [{pools: [cloud], reserved: 8, limit: 8}]}
"""
DOCUMENT = """
version: 1
name: demo
provider: local
max_machines: 2
poll_interval: 1
machine_types:
  - {name: g2, pool: cloud, instance: g2, gpus: 2, idle_timeout: 3, max_machines: 2, init_script: "echo hello"}
"""


UNTIL = python("import time; time.sleep(600)")


class Site:
    """A service with a deployment, and its cloud."""

    def __init__(self, run: Running, cloud: LocalProvider, address: str) -> None:
        self.run, self.cloud, self.address = run, cloud, address
        self.store = run.service.components.store
        self.told: list[tuple[str, str]] = []

    def described(self) -> str:
        """Return what is known of the deployment, for a failure."""
        loop = self.run.service.machine_loop
        assert loop is not None
        log = [(one.machine, one.state, one.reason, one.message) for one in self.store.machine_log.events()]
        jobs = [(row.id, row.state, row.reason_code, row.message) for row in self.store.active()]
        return "\n".join(map(str, (loop.status("demo"), *log, *jobs, *self.machines, *self.told)))

    @property
    def machines(self) -> list[Machine]:
        return self.store.machines.live()

    def nodes_of(self, job: str) -> list[str]:
        return [place.node for place in self.store.attempts(job)[-1].placement]

    async def until_reason(self, job: str, code: str, message: str) -> None:
        async def there() -> bool:
            reason = (await self.run.client("ana").job(job)).reason
            if reason is not None and (reason.code, reason.message) not in self.told[-1:]:
                self.told.append((reason.code, reason.message))
            return self.told[-1:] == [(code, message)]

        await self.run.until(there, f"{job} waits: {message}", 20)

    async def until_machines(self, *states: str) -> None:
        async def there() -> bool:
            return sorted(machine.state for machine in self.machines) == sorted(states)

        await self.run.until(there, f"machines are {states}")


@asynccontextmanager
async def site(
    folder: Path,
    document: str = DOCUMENT,
    policy: str = POLICY,
    make_cloud: Callable[[Path], LocalProvider] = LocalProvider,
    host: str = "127.0.0.1",
    nodes: Sequence[NodeStatus] = (),
) -> AsyncIterator[Site]:
    """Start a service that machines reach, whose deployment has no machine yet; without one if `document` is empty."""
    cloud = make_cloud(folder / "state" / "machines")
    cloud.set_faults(LocalFaults(boot_seconds=0.5))
    backend = RoutingBackend([MemoryBackend(nodes, real_time=bool(nodes)), MachinesBackend(durable_checkpoints=True)])
    settings = {
        "MAKEWAY_TICK_SECONDS": "0.2",
        "MAKEWAY_TICKET_SECRET": "s" * 32,
        "MAKEWAY_BACKEND": "local,machines",
        "MAKEWAY_MACHINE_CHECKPOINT_DIR": str(folder / "shared"),
    }
    async with running(folder / "state", policy, backend=backend, **settings) as run, serving(run.app, host) as address:
        assert run.service.machine_loop is not None
        run.service.machine_loop._make_provider = lambda deployment: cloud
        machines = run.service.components.settings.machines
        object.__setattr__(machines, "url", f"{address}/services/makeway")
        store = run.service.components.store.deployments
        if document and store.read("demo") is None:
            store.save("demo", document, 0, "root", run.service.components.clock())
        try:
            result = Site(run, cloud, f"{address}/services/makeway/")
            try:
                yield result
            except BaseException:
                print(result.described())
                raise
            assert run.service.components.world.failure is None
            assert not run.service.machine_loop.quarantine.entries
        finally:
            for instance in cloud.list("demo", 0.0).instances:
                cloud.terminate(instance.id)


@pytest.mark.covers("F49", "F54", "F67", "F69", "F70", "F74")
async def test_machines_are_launched_for_jobs_that_wait_and_end_when_they_idle(tmp_path: Path) -> None:
    async with site(tmp_path) as world:
        first = await world.run.submit("ana", "one", python("print('on a machine')"), profile="gpu2")
        done = await world.run.job(first.id, "succeeded", "failed", seconds=90)
        assert done.state.value == "succeeded", done.message
        [machine] = world.machines
        [shown] = await world.run.service.services.deployments.list_all(Caller("root", admin=True))
        assert shown.message == "Launches machines when work waits for them."
        assert shown.step is not None
        assert world.nodes_of(done.id) == [machine.id]
        again = await world.run.submit("ana", "two", python("print('warm')"), profile="gpu1")
        done = await world.run.job(again.id, "succeeded", "failed", seconds=30)
        assert world.nodes_of(done.id) == [machine.id]
        await world.until_machines()
        assert [instance.state for instance in world.cloud.list("demo", 0.0).instances] == ["terminated"]


@pytest.mark.covers("F65")
async def test_a_machine_whose_init_script_fails_is_ended_and_says_why(tmp_path: Path) -> None:
    async with site(tmp_path, DOCUMENT.replace("echo hello", "echo no disk; exit 3")) as world:
        job = await world.run.submit("ana", "one", python("print()"), profile="gpu1")

        async def ended() -> bool:
            return any(event.reason == "init_failed" for event in world.store.machine_log.events())

        await world.run.until(ended, "the machine is ended")
        machine = next(event.machine for event in world.store.machine_log.events() if event.reason == "init_failed")
        [output] = [one for one in world.store.machine_log.outputs(machine) if one.kind == "init"]
        assert (output.exit_code, output.text) == (3, "no disk\n")
        await world.until_machines()
        [console] = [one for one in world.store.machine_log.outputs(machine) if one.kind == "console"]
        assert "no disk\n" in console.text
        await world.until_reason(
            job.id,
            "no_machine",
            "No machine is coming for it: machines of type g2 did not become ready. demo has 0 of at most 2 machines.",
        )
        await world.run.client("ana").cancel(job.id)


@pytest.mark.covers("F02", "F06", "F60")
async def test_a_machine_is_launched_only_where_what_is_there_holds_a_job_not(tmp_path: Path) -> None:
    """The profile names the pool that is there first; what drives its machines is a part of the service, on no GPU."""
    policy = POLICY.replace("gpus: 2, pools: [cloud]", "gpus: 2, pools: [here, cloud]")
    policy = policy.replace("quotas: [{pools: [cloud]", "quotas: [{pools: [here, cloud]")
    policy = policy.replace("{name: here, nodes", "{name: here, size: 2, nodes")
    document = DOCUMENT.replace("idle_timeout: 3", "idle_timeout: 60")
    async with site(tmp_path, document, policy, nodes=[NodeStatus("here-1", "here", (0, 1))]) as world:
        root, ana = world.run.client("root"), world.run.client("ana")

        async def pools() -> dict[str, tuple[str, float, float]]:
            return {pool.name: (pool.kind, pool.total, pool.used) for pool in await root.pools()}

        async def where(name: str) -> tuple[str, list[str]]:
            job = await world.run.job((await world.run.submit("ana", name, UNTIL, profile="gpu2")).id, "running")
            return job.id, [worker.node for worker in job.placement]

        assert await pools() == {"here": ("static", 2.0, 0.0), "cloud": ("autoscaled", 0.0, 0.0)}
        assert (await root.usage()).used == 0, "the loop that drives machines holds no GPU"
        local, nodes = await where("local is free")
        assert nodes == ["here-1"]
        await world.run.converged()
        assert world.machines == []
        _, nodes = await where("local is full")
        [machine] = world.machines
        assert nodes == [machine.id]
        assert await pools() == {"here": ("static", 2.0, 2.0), "cloud": ("autoscaled", 2.0, 2.0)}
        second, nodes = await where("all are full")
        assert set(nodes) == {one.id for one in world.machines} - {machine.id}
        await ana.cancel(second)
        await world.run.job(second, "cancelled")
        await ana.cancel(local)
        await world.run.job(local, "cancelled")

        async def idles() -> bool:
            offers = (await ana.offers(kind="job")).offers
            return next(one.code for one in offers if one.profile == "gpu1") == "ready_now"  # on a machine alone

        await world.run.until(idles, "a machine has room")
        _, nodes = await where("both have room")
        assert nodes == ["here-1"], "the machine that idles does not go before what is there"
        assert len({event.machine for event in world.store.machine_log.events() if event.machine}) == 2


async def test_what_the_console_said_of_a_machine_that_did_not_join_is_there_after_its_end(tmp_path: Path) -> None:
    """Its agent reaches no service; people read the console while it starts; the last one is kept."""
    document = DOCUMENT.replace("gpus: 2,", "gpus: 2, spin_up_timeout: 6,")
    async with site(tmp_path, document) as world:
        machines = world.run.service.components.settings.machines
        object.__setattr__(machines, "url", "http://127.0.0.1:9/services/makeway")
        job = await world.run.submit("ana", "one", python("print()"), profile="gpu1")
        shown, root = world.run.service.services.machines, Caller("root", admin=True)
        await world.until_machines("booting")
        [machine] = world.machines
        assert world.run.service.machine_loop is not None
        driver = world.run.service.machine_loop._drivers["demo"]
        driver.replace(replace(driver.deployment, lost_after=5.0), driver.provider, deleting=False)
        told = set[str]()

        async def said() -> bool:
            try:
                detail = await shown.console(root, "demo", machine.id)
            except MakewayError as error:
                told.add(error.code)
                return False
            return "Connection refused" in detail.outputs[0].text

        await world.run.until(said, "the console is read while the machine starts")
        assert told <= {"no_console"}

        async def ended() -> bool:
            return (await shown.machine(root, "demo", machine.id)).reason == "spin_up_timeout"

        world.store.machine_log.write_output(machine.id, "console", "an older one", None, 0.0)
        await world.run.until(ended, "the machine is ended")
        await world.run.client("ana").cancel(job.id)
        await world.until_machines()
        [output] = (await shown.machine(root, "demo", machine.id)).outputs
        assert (output.kind, "Connection refused" in output.text) == ("console", True), output


@pytest.mark.covers("F54")
async def test_a_job_is_told_which_machine_comes_for_it_and_why_none_does(tmp_path: Path) -> None:
    """A second job that would need a second machine is promised none."""
    document = DOCUMENT.replace("max_machines: 2", "max_machines: 1").replace("gpus: 2,", "gpus: 2, price: 3.10,")
    async with site(tmp_path, document) as world:
        world.cloud.set_faults(LocalFaults(boot_seconds=4))
        has = "demo has 1 of at most 1 machine."
        first = await world.run.submit("ana", "one", python("import time; time.sleep(8)"), profile="gpu2")
        await world.until_reason(
            first.id, "waiting_for_node", f"Waiting for a machine: booting, about 3.10 EUR/h. {has}"
        )
        second = await world.run.submit("ana", "two", python("print()"), profile="gpu2")
        full = f"No machine is coming for it: at most 1 machine of type g2 is allowed. {has}"
        await world.until_reason(second.id, "no_machine", full)
        await world.run.job(first.id, "running", seconds=60)
        busy = "0 of the 2 GPUs of pool cloud are free; this job needs 2. It is within the reservation, but no "
        await world.until_reason(second.id, "no_machine", f"{busy}preemptible workload would free enough GPUs. {full}")
        await world.run.client("ana").cancel(first.id)
        done = await world.run.job(second.id, "succeeded", "failed", seconds=60)
        assert done.state.value == "succeeded", done.message


@pytest.mark.covers("F54")
async def test_a_job_is_told_over_restarts_why_no_machine_comes_for_it(tmp_path: Path) -> None:
    document = DOCUMENT + "paused: true\n"
    none = "No machine is coming for it: demo is paused. demo has 0 of at most 2 machines."
    async with site(tmp_path, document) as world:
        job = await world.run.submit("ana", "three", python("print()"), profile="gpu2")
        await world.until_reason(job.id, "no_machine", none)
    async with site(tmp_path, document) as world:
        await world.until_reason(job.id, "no_machine", none)
        reasons = {code for code, _ in world.told}
        assert reasons <= {"no_machine", "waiting_for_node"}
        await world.run.client("ana").cancel(job.id)


async def test_a_document_that_cannot_be_read_is_quarantined_where_the_panel_and_probes_look(tmp_path: Path) -> None:
    async with site(tmp_path) as world:
        world.store.deployments.save("bad", "version: 1\nname: bad\nprovider: moon\n", 0, "root", 1.0)
        quarantine = world.run.service.components.world.quarantine

        def named() -> bool:
            return "deployment bad" in (quarantine.sentence(named=True) or "")

        await world.run.until(named, "the document is quarantined")
        stored = world.store.deployments.read("bad")
        assert stored is not None
        world.store.deployments.delete("bad", stored.version, "root", 2.0)
        quarantine.passed("reading its document", "deployment", "bad")


@pytest.mark.slow
@pytest.mark.covers("F49")
async def test_three_jobs_that_wait_get_three_instances_and_none_is_left_after_the_idle_timeout(tmp_path: Path) -> None:
    """The provider itself is asked: three instances run at once, then each ends once it idled for three seconds."""
    document = DOCUMENT.replace("max_machines: 2", "max_machines: 5")
    released = tmp_path / "released"
    wait = python(f"import pathlib, time\nwhile not pathlib.Path({str(released)!r}).exists(): time.sleep(0.05)")
    async with site(tmp_path, document) as world:
        jobs = [await world.run.submit("ana", f"job-{n}", wait, profile="gpu2") for n in range(3)]
        for job in jobs:
            await world.run.job(job.id, "running", seconds=60)
        states = [instance.state for instance in world.cloud.list("demo", 0.0).instances]
        assert states == ["running"] * 3, "as many instances as jobs, each with both GPUs of a machine"
        assert len({world.nodes_of(job.id)[0] for job in jobs}) == 3
        released.touch()
        for job in jobs:
            assert (await world.run.job(job.id, "succeeded", "failed", seconds=30)).state.value == "succeeded"
        ended_at = time.monotonic()
        assert len(world.machines) == 3, "none ends at once: the next job may come"
        await world.until_machines()
        assert time.monotonic() - ended_at > 2, "they stayed for the idle timeout"
        assert [instance.state for instance in world.cloud.list("demo", 0.0).instances] == ["terminated"] * 3


@pytest.mark.covers("F49", "F67")
async def test_a_gang_whose_machines_are_ready_one_after_the_other_gets_no_further_one(tmp_path: Path) -> None:
    """The second takes six seconds longer; three are allowed, and the first one idles for longer than it may."""
    script = f"mkdir {tmp_path}/first || sleep 6"
    document = DOCUMENT.replace("echo hello", script).replace("max_machines: 2", "max_machines: 3")
    async with site(tmp_path, document) as world:
        job = await world.run.submit("ana", "gang", python("print()"), profile="gpu2", workers=2)
        done = await world.run.job(job.id, "succeeded", "failed", seconds=90)
        assert done.state.value == "succeeded", done.message
        launched = {event.machine for event in world.store.machine_log.events() if event.machine}
        assert sorted(world.nodes_of(job.id)) == sorted(launched)
        assert len(launched) == 2


@pytest.mark.covers("F49", "F67")
async def test_a_gang_keeps_its_first_machine_while_the_second_one_boots(tmp_path: Path) -> None:
    """A later and smaller job, in quota as well and without an end, starts on neither of the two machines before it."""
    script = f"mkdir {tmp_path}/first || sleep 8"
    async with site(tmp_path, DOCUMENT.replace("echo hello", script)) as world:
        gang = await world.run.submit("ana", "gang", python("print()"), profile="gpu2", workers=2)
        later = await world.run.submit("ana", "later", UNTIL, profile="gpu1")
        await world.until_machines("joining", "ready")
        known = world.run.service.components.world
        await world.run.until(lambda: len(known.booting) == 1, "one machine is a node, and one boots")
        done = await world.run.job(gang.id, "succeeded", "failed", seconds=90)
        assert done.state.value == "succeeded", done.message
        await world.run.job(later.id, "running", seconds=60)
        assert done.started_at is not None
        started = (await world.run.client("ana").job(later.id)).started_at
        assert started is not None
        assert started >= done.started_at
        assert known.booting == ()
        await world.run.client("ana").cancel(later.id)


@pytest.mark.covers("F18", "N11")
async def test_a_job_that_loses_its_spot_machine_in_the_middle_ends_bit_identical(tmp_path: Path) -> None:
    """The agent reads the notice of the provider, the job saves in time, and goes on on a machine on demand."""
    spot = DOCUMENT.replace("gpus: 2,", "gpus: 2, market: spot, spot_price: 1,")
    document = f"{spot}  - {{name: demand, pool: cloud, instance: g2, gpus: 2, idle_timeout: 3}}\n"
    async with site(tmp_path, document) as world:

        async def trained(name: str, pause: str) -> str:
            command = [sys.executable, "train.py", "--steps", "600", "--every", "5000", "--seconds", pause]
            return (await world.run.submit("ana", name, command, profile="gpu2", files=[TRAIN])).id

        async def log(id: str, attempt: int | None = None) -> str:
            return str((await world.run.client("root").logs(id, attempt=attempt, limit=1_000_000)).text)

        rough = await trained("rough", "0.02")

        async def at_work() -> bool:
            job = await world.run.client("ana").job(rough)
            return job.progress is not None and (job.progress.step or 0) >= 50

        await world.run.until(at_work, "it trains")
        [machine] = world.machines
        assert (machine.market, machine.instance is not None) == ("spot", True)
        world.cloud.interrupt(machine.instance or "", 15.0)
        done = await world.run.job(rough, "succeeded", "failed", seconds=120)
        assert (done.state.value, done.attempt, done.failures) == ("succeeded", 2, 0), done.message
        first, second = (one.placement[0].node for one in done.attempts)
        assert first == machine.id != second
        assert done.attempts[0].checkpoint is not None
        calm = await trained("calm", "0")
        await world.run.job(calm, "succeeded", seconds=90)
        weights = [re.search(r"weights (\w+)", await log(id)) for id in (rough, calm)]
        assert None not in weights
        assert len({found[1] for found in weights if found}) == 1, "bit-identical"
        reasons = {event.reason for event in world.store.machine_log.events(machine=machine.id)}
        assert "spot" in reasons, reasons
