"""What goes wrong in the cluster while jobs run as pods: each job ends right, and its owner reads why it waits."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path

import pytest
from informing import start_api_server, stop_api_server
from job_service import NAMESPACE, RUN_AS, Serving, training, waits_because
from makeway_api.models import Job
from pods import wait_until

pytestmark = pytest.mark.kube

DOWN = float(os.environ.get("API_DOWN", "20"))
"""Seconds; as long as the upgrade of a control plane takes: `API_DOWN=60 make kube-test ARGS="-k api_server"`."""
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"


async def test_a_job_waits_for_the_quota_of_the_namespace(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 2.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.MAX_DELAY", 2.0)
    async with serving.running():
        serving.cluster.api.create(QUOTAS, {"metadata": {"name": "site"}, "spec": {"hard": {"pods": "0"}}})
        try:
            in_force = partial(serving.cluster.api.get, f"{QUOTAS}/site")
            await asyncio.to_thread(wait_until, lambda: "used" in in_force()["status"], "the quota is in force")
            job = await serving.submit("ana", "patient", "true")
            await waits_because(serving, job, "cannot be started yet", "quota of the namespace", "limited: pods=0")
            await asyncio.sleep(3)  # it is tried again meanwhile
            assert (await serving.client("root").usage()).used == 0, "its GPUs are free for others"
        finally:
            serving.cluster.api.delete(f"{QUOTAS}/site")
        done = await serving.reaches(job, "succeeded", "failed")
        assert done.state.value == "succeeded", done


async def test_a_job_whose_template_is_refused_waits_without_gpus(serving: Serving, jobs_policy: str) -> None:
    document = json.loads(jobs_policy)
    mounts = document["profiles"][0]["pod"]["spec"]["containers"][0]["volumeMounts"]
    mounts.append({"name": "forgotten", "mountPath": "/data"})
    Path(serving.environ["MAKEWAY_POLICY_FILE"]).write_text(json.dumps(document))
    async with serving.running():
        job = await serving.submit("ana", "refused", "true")
        shown: list[Job] = []

        async def waits() -> bool:
            shown.append(await serving.client("root").job(job.id))
            return shown[-1].reason is not None and shown[-1].reason.code == "no_room"

        await serving.until(waits, lambda: f"it waits for an administrator: {shown[-1]}")
        assert (shown[-1].state.value, shown[-1].placement) == ("pending", [])
        assert shown[-1].reason is not None
        assert "an administrator has to act" in shown[-1].reason.message
        assert "forgotten" in shown[-1].reason.message


@pytest.mark.covers("F47")
async def test_a_job_waits_for_a_volume_whose_export_it_may_not_write_and_begins_once_it_may(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where Kubernetes gives no group: the folder belongs to root with mode 755."""
    monkeypatch.setattr("makeway_quota.control.start_backoff.FIRST_DELAY", 2.0)
    monkeypatch.setattr("makeway_quota.control.start_backoff.MAX_DELAY", 2.0)
    volume = Path(serving.cluster.api.get("/api/v1/persistentvolumes/checkpoints")["spec"]["hostPath"]["path"])
    os.chown(volume, 0, 0)
    volume.chmod(0o755)
    try:
        async with serving.running():
            job = await serving.submit("ana", "saves", "sh", "-c", "echo weights > $MAKEWAY_CHECKPOINT_DIR/file")
            await waits_because(
                serving, job, "no checkpoint can be kept", "may not write there", "An administrator has"
            )
            assert (await serving.client("root").usage()).used == 0, "its GPUs are free for others"
            os.chown(volume, *RUN_AS)
            done = await serving.reaches(job, "succeeded", "failed")
            assert done.state.value == "succeeded", done
            assert (volume / job.id / "file").read_text(encoding="utf-8") == "weights\n"
    finally:
        os.chown(volume, *RUN_AS)


async def test_a_service_that_starts_while_the_api_server_is_down_serves(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows its jobs from the database, says why it decides nothing, and goes on when the cluster can be read."""
    monkeypatch.setattr("makeway_quota.backends.kubernetes.backend.OPEN_TIMEOUT", 3.0)
    async with serving.running():
        job = await serving.submit("ana", "long", "sh", "-c", "echo one; sleep 20; echo two")
        await serving.says(job, "one")
        command = stop_api_server(serving.cluster)
    try:
        async with serving.running():
            waiting = await serving.submit("bo", "waiting", "true")
            during = await serving.reaches(job, "succeeded", "failed")
            assert (during.state.value, len(during.attempts)) == ("succeeded", 1), "its report is enough"
            assert "two" in await serving.log(job)
            assert (await serving.client("root").job(waiting.id)).state.value == "pending"
            problem = (await serving.client("ana").usage()).problem
            assert problem is not None
            assert "API server cannot be reached" in problem
            start_api_server(serving.cluster, command)
            done = await serving.reaches(waiting, "succeeded", "failed")
            assert (done.state.value, len(done.attempts)) == ("succeeded", 1), done
            await serving.no_pod_left()
    finally:
        if not serving.cluster.api.ready():
            start_api_server(serving.cluster, command)


async def test_jobs_go_on_while_the_api_server_is_down(serving: Serving) -> None:
    """Nothing is concluded from what is not seen; what waits starts afterwards."""
    async with serving.running():
        job = await training(serving, "ana", "long", f"{DOWN / 200}")  # twice as long
        await serving.says(job, "step 100")
        command = stop_api_server(serving.cluster)
        try:
            waiting = await training(serving, "bo", "waiting", "0")
            await asyncio.sleep(DOWN)
            during = await serving.client("root").job(job.id)
            assert (during.state.value, during.attempt, during.preemptions) == ("running", 1, 0), during
            later = await serving.client("root").job(waiting.id)
            assert later.state.value in ("pending", "starting"), later
            assert "step 200" in await serving.log(job), "its output still arrives"
        finally:
            start_api_server(serving.cluster, command)
        for item in (job, waiting):
            done = await serving.reaches(item, "succeeded", "failed")
            assert (done.state.value, len(done.attempts)) == ("succeeded", 1), done
