"""A server that ends while it starts is told at once, with how it ended: a process of this machine, and a pod."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makeway_spawner import pod_end
from makeway_spawner.kube import MakewayKubeSpawner
from makeway_spawner.local import MakewayLocalSpawner
from makeway_spawner.pod_spawner import PodSpawner
from makeway_spawner.refusal import Refused
from makeway_spawner.server_log import last_line
from spawner.kube_fake import KubeFake, serving, spawner_for
from spawner.quota_fake import URL, QuotaFake

SOON = 15.0
"""Seconds that count as at once on a busy machine; the timeouts are minutes."""


def local(tmp_path: Path, program: str) -> MakewayLocalSpawner:
    """Return a spawner on this machine whose server is a program in Python."""
    db = SimpleNamespace(commit=lambda: None)
    user: Any = SimpleNamespace(name="ana", escaped_name="ana", url="/user/ana/", server=None, db=db)
    hub: Any = SimpleNamespace(
        base_url="/hub/", api_url="http://127.0.0.1:1/hub/api", public_host="", server=None, ip="127.0.0.1"
    )
    spawner = MakewayLocalSpawner(
        user=user,
        hub=hub,
        cmd=[sys.executable, "-c", program],
        homes=str(tmp_path / "homes"),
        logs=str(tmp_path / "logs"),
        makeway_api_url=URL,
        makeway_token="t",
        renew_seconds=0.1,
        start_timeout=120,
    )
    (tmp_path / "logs").mkdir(parents=True)
    spawner.orm_spawner = SimpleNamespace(server=None, name="", state={}, user_options={})
    spawner.user_options = {"profile": "gpu1", "team": "rnd"}
    return spawner


async def refusal_of(spawner: Any) -> str:
    """Start as the Hub does, and return why it fails; the lease is released."""
    await spawner.run_pre_spawn_hook()
    began = time.monotonic()
    with pytest.raises(Refused) as told:
        await spawner.start()
    assert time.monotonic() - began < SOON
    await spawner.stop()
    await spawner.run_post_stop_hook()
    return str(told.value)


LISTEN = """
import socket, sys, time, os
server = socket.create_server(("127.0.0.1", int(os.environ["JUPYTERHUB_SERVICE_URL"].split(":")[2].split("/")[0])))
"""


@pytest.mark.covers("N05")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise ValueError('broken by ana')", ["with exit code 1", "ValueError: broken by ana."]),
        (
            "import sys; print('\\x1b[31mNo such option\\x1b[0m\\n\\n'); sys.exit(3)",
            ["exit code 3", "log: No such option."],
        ),
        ("import os; os.kill(os.getpid(), 9)", ["by the signal SIGKILL"]),
        ("pass", ["with exit code 0"]),
        (LISTEN + "time.sleep(0.5); sys.exit('extension failed')", ["with exit code 1", "extension failed"]),
    ],
    ids=["faulty configuration", "wrong option", "killed", "ends well", "ends after it listened"],
)
async def test_a_process_that_ends_is_told_with_its_exit_code_and_the_last_line_of_its_log(
    tmp_path: Path, quota: QuotaFake, program: str, words: list[str]
) -> None:
    message = await refusal_of(local(tmp_path, program))
    assert all(word in message for word in words), message
    assert f"The whole log is {tmp_path}/logs/ana.log" in message
    assert quota.live == [], "its GPUs are free"


ANSWER = (
    LISTEN
    + """
time.sleep(0.3)
while True:
    one, _ = server.accept()
    one.recv(1000)
    one.sendall(b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\n\\r\\n")
    one.close()
"""
)


async def test_a_process_that_answers_has_started(tmp_path: Path, quota: QuotaFake) -> None:
    spawner = local(tmp_path, ANSWER)
    await spawner.run_pre_spawn_hook()
    host, _ = await asyncio.wait_for(spawner.start(), 60)
    assert host == "127.0.0.1"
    assert spawner.orm_spawner.state["pid"] == spawner.pid
    await spawner.stop(now=True)
    await spawner.run_post_stop_hook()
    assert quota.live == []


async def test_a_hub_that_is_killed_while_a_process_starts_finds_it(tmp_path: Path, quota: QuotaFake) -> None:
    spawner = local(tmp_path, "import time; time.sleep(60)")
    await spawner.run_pre_spawn_hook()
    starting = asyncio.ensure_future(spawner.start())
    await until(lambda: spawner.orm_spawner.state.get("pid"))
    assert not starting.done()
    starting.cancel()
    await asyncio.wait([starting])
    await spawner.stop(now=True)
    await spawner.run_post_stop_hook()


def test_the_last_line_is_short_and_plain() -> None:
    assert last_line("a\nb\r\n \x1b[0m\n") == "b"
    assert last_line("") == ""
    assert len(last_line("x" * 10_000)) == 300
    assert last_line("\x07bell\x00") == "bell"


# -- pods ------------------------------------------------------------------------------------------------------


async def until(true: Callable[[], object]) -> None:
    """Wait until `true` holds, 10 seconds at most."""
    async with asyncio.timeout(10):
        for _ in iter(lambda: bool(true()), True):
            await asyncio.sleep(0.01)


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeFake]:
    async with serving(monkeypatch) as fake:
        yield fake


@pytest.fixture
async def starting(
    kube: KubeFake, quota: QuotaFake, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[MakewayKubeSpawner, Any]]:
    """Return a spawner whose start has created its pod, and the start."""
    monkeypatch.setattr("makeway_spawner.kube.HELD_PAUSES", (0.1, 0.1, 0.1))
    spawner = spawner_for(makeway_api_url=URL, makeway_token="t", renew_seconds=0.1, start_timeout=300)
    spawner.user_options = {"profile": "gpu1", "team": "rnd"}
    await spawner.run_pre_spawn_hook()
    task = asyncio.ensure_future(spawner.start())
    await until(lambda: spawner.created_pod)
    yield spawner, task
    task.cancel()
    await asyncio.wait([task])
    kube.objects["pods"].clear()
    await spawner._release()


async def said_by(task: Any) -> str:
    with pytest.raises(Refused) as told:
        await asyncio.wait_for(task, SOON)
    return str(told.value)


POD = "jupyter-ana"
TARGET = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}


def place(kube: KubeFake) -> None:
    """Have the kubelet of a node take the pod."""
    kube.change_pod(POD, podIP="127.0.0.1")
    pod = kube.objects["pods"][POD]
    kube.add("pods", {**pod, "spec": {**pod["spec"], "nodeName": "node-1"}})
    kube.change_pod(
        POD,
        containerStatuses=[{"name": "notebook", "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}],
    )


@pytest.mark.covers("N05")
@pytest.mark.parametrize("placed", [False, True])
async def test_a_pod_that_is_deleted_while_it_starts_is_told_at_once(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any], placed: bool
) -> None:
    if placed:
        place(kube)
    kube.remove("pods", POD)
    assert "Its pod was deleted in Kubernetes, not by Makeway." in await said_by(starting[1])


async def test_a_pod_that_terminates_while_it_starts_is_told_before_it_is_gone(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any]
) -> None:
    place(kube)
    kube.delete_pod(POD, grace=600)
    assert "Its pod was deleted in Kubernetes, not by Makeway." in await said_by(starting[1])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"conditions": [TARGET]}, "Its pod was evicted, as before maintenance of its node"),
        (
            {"conditions": [{**TARGET, "reason": "PreemptionByScheduler"}]},
            "Kubernetes removed its pod for one with a higher priority",
        ),
    ],
)
async def test_a_pod_that_is_evicted_while_it_starts_is_told_with_the_reason(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any], status: dict[str, Any], words: str
) -> None:
    place(kube)
    kube.change_pod(POD, **status)
    kube.delete_pod(POD)
    assert words in await said_by(starting[1])


async def test_a_pod_that_its_node_evicts_while_it_starts_is_told(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any]
) -> None:
    place(kube)
    kube.change_pod(POD, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert "Its node evicted its pod (Evicted: The node was low on resource: memory)." in await said_by(starting[1])


async def test_the_eviction_of_a_running_server_is_told_though_its_end_is_reported_before(
    kube: KubeFake, quota: QuotaFake
) -> None:
    """As the kubelet does: the reason of the pod comes after the end of its containers."""
    about = {"name": "notebook", "ready": True, "image": "notebook:1", "imageID": "1", "restartCount": 0}
    pod_labels = {"component": "singleuser-server"}
    status = {"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": [{**about, "state": {"running": {}}}]}
    pod = {"metadata": {"name": POD, "labels": pod_labels}, "spec": {"containers": [about]}, "status": status}
    kube.add("pods", pod)
    state = {"pod_name": POD, "kubespawner_version": "7.1.0", "makeway_pod": True}
    spawner = spawner_for("ana", state, makeway_api_url=URL, makeway_token="t")
    assert await PodSpawner.poll(spawner) is None
    killed = {"terminated": {"reason": "Error", "exitCode": 137}}
    kube.change_pod(POD, containerStatuses=[{**about, "ready": False, "state": killed}])
    await until(lambda: pod_end.server_has_ended(spawner.pod))
    polled = asyncio.ensure_future(PodSpawner.poll(spawner))
    await asyncio.sleep(0.5)
    kube.change_pod(POD, phase="Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds 50M.")
    exit_status = await asyncio.wait_for(polled, SOON)
    assert exit_status is not None
    assert spawner.how_server_ended(exit_status).startswith("Its node evicted its pod (Evicted: Pod ephemeral local")


NO_DEVICE = {
    "phase": "Failed",
    "reason": "UnexpectedAdmissionError",
    "message": "Allocate failed due to no healthy devices present",
    "containerStatuses": [],
}


def uid_of(kube: KubeFake) -> str:
    pod = kube.objects["pods"].get(POD)
    return "" if pod is None else str(pod["metadata"]["uid"])


SAYS = "Its node refused its pod (UnexpectedAdmissionError: Allocate failed due to no healthy devices present)."


@pytest.mark.covers("N05")
@pytest.mark.parametrize("refusals", [1, 3])
async def test_a_pod_that_its_node_refuses_for_a_moment_is_created_again_with_its_lease(
    kube: KubeFake,
    quota: QuotaFake,
    starting: tuple[MakewayKubeSpawner, Any],
    refusals: int,
) -> None:
    spawner, start = starting
    lease = spawner._lease
    assert lease is not None

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        spawner.port = server.sockets[0].getsockname()[1]
        for _ in range(refusals):
            old = uid_of(kube)
            place(kube)
            kube.change_pod(POD, **NO_DEVICE)
            await until(lambda old=old: uid_of(kube) not in ("", old) and spawner.created_pod)
        place(kube)
        running = [{"name": "notebook", "ready": True, "state": {"running": {}}}]
        kube.change_pod(POD, phase="Running", containerStatuses=running)
        assert await asyncio.wait_for(start, SOON)
    assert spawner._lease is not None
    assert spawner._lease.id == lease.id
    assert not quota.released
    assert spawner._progress is not None
    said = [event["message"] for event in spawner._progress.events if "refused" in event["message"]]
    assert said == [f"{SAYS} It keeps its GPUs, and is started again in 0.1 s."] * refusals


async def test_a_pod_that_its_node_refuses_again_and_again_is_given_up_with_the_reason(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any]
) -> None:
    async def refuse() -> None:
        while True:
            pod = kube.objects["pods"].get(POD)
            if pod is not None and pod["status"]["phase"] == "Pending":
                kube.change_pod(POD, **NO_DEVICE)
            await asyncio.sleep(0.01)

    refusing = asyncio.ensure_future(refuse())
    assert await said_by(starting[1]) == f"The notebook could not be started. {SAYS}"
    assert [asked for asked in kube.asked if asked == "POST pods/"] == ["POST pods/"] * 4
    refusing.cancel()


async def test_a_pod_whose_lease_has_ended_is_not_created_again(
    kube: KubeFake, quota: QuotaFake, starting: tuple[MakewayKubeSpawner, Any]
) -> None:
    spawner, start = starting
    await quota.end(quota.live[0])
    await until(lambda: spawner._ended)
    place(kube)
    kube.change_pod(POD, **NO_DEVICE)
    assert await said_by(start) == "The notebook could not be started. Its lease has ended: The lease s1 is over."
    assert kube.asked.count("POST pods/") == 1


@pytest.mark.parametrize("reason", ["NodeAffinity", "NodeShutdown", "TopologyAffinityError"])
async def test_a_pod_that_its_node_refuses_for_longer_is_told_at_once(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any], reason: str
) -> None:
    kube.change_pod(POD, phase="Failed", reason=reason, message="Pod was rejected")
    assert f"Its node refused its pod ({reason}: Pod was rejected)." in await said_by(starting[1])
    assert kube.asked.count("POST pods/") == 1


async def test_a_pod_that_is_gone_before_the_watch_shows_it_is_missed(
    kube: KubeFake, quota: QuotaFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("makeway_spawner.pod_spawner._UNSEEN", 0.2)
    monkeypatch.setattr(kube, "_tell", lambda *_: None)
    spawner = spawner_for(makeway_api_url=URL, makeway_token="t", renew_seconds=0.1, start_timeout=300)
    spawner.user_options = {"profile": "gpu1", "team": "rnd"}
    await spawner.run_pre_spawn_hook()
    task = asyncio.ensure_future(spawner.start())
    await until(lambda: kube.objects["pods"])
    kube.objects["pods"].clear()
    assert "Its pod is gone, and Kubernetes does not say why." in await said_by(task)
    await spawner._release()


FAILED = {"terminated": {"reason": "Error", "exitCode": 1, "message": "Traceback …\nValueError: broken by ana\n"}}


@pytest.mark.parametrize("phase", ["Failed", "Running"], ids=["the only container", "beside a sidecar"])
async def test_a_server_that_ends_in_its_pod_is_told_with_the_last_line_of_its_log(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any], phase: str
) -> None:
    place(kube)
    kube.change_pod(
        POD,
        phase=phase,
        containerStatuses=[{"name": "notebook", "ready": False, "state": FAILED}, {"name": "other", "ready": True}],
    )
    message = await said_by(starting[1])
    assert "Its server ended by itself (Error: exit code 1)." in message
    assert "The last line of its log: ValueError: broken by ana." in message


async def test_an_init_container_that_fails_is_named(kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any]) -> None:
    place(kube)
    failed = [{"name": "fetch", "state": {"terminated": {"reason": "Error", "exitCode": 2}}}]
    kube.change_pod(POD, phase="Failed", initContainerStatuses=failed)
    message = await said_by(starting[1])
    assert (
        "The init container fetch of its pod failed, so that its server was not started (Error: exit code 2)" in message
    )


async def test_the_kubelet_keeps_the_end_of_the_log_with_the_pod(
    kube: KubeFake, starting: tuple[MakewayKubeSpawner, Any]
) -> None:
    (container,) = kube.objects["pods"][POD]["spec"]["containers"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


async def test_the_pod_of_an_earlier_start_that_goes_is_not_this_one(kube: KubeFake, quota: QuotaFake) -> None:
    old = {"name": POD, "labels": {"component": "singleuser-server"}, "annotations": {"makeway/start": "earlier"}}
    kube.add("pods", {"metadata": old, "spec": {}, "status": {"phase": "Running"}})
    spawner = spawner_for(makeway_api_url=URL, makeway_token="t", renew_seconds=0.1, start_timeout=300)
    spawner.user_options = {"profile": "gpu1", "team": "rnd"}
    await spawner.run_pre_spawn_hook()
    task = asyncio.ensure_future(spawner.start())
    await until(lambda: spawner.created_pod)
    await asyncio.sleep(0.3)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    await spawner._release()
