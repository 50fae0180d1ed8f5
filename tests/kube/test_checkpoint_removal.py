"""The retention removes the checkpoints of jobs from their claim on a real node, and leaves everything else there."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_service import JOBS, PODS, Serving
from makeway_quota.history import retention

from kube_cluster import image_build
from kube_cluster.image_build import NotHere
from kube_cluster.node import Node

pytestmark = pytest.mark.kube

KEPT_SECONDS = 20
SAVED = "mkdir -p $MAKEWAY_CHECKPOINT_DIR/step-1 && cd $MAKEWAY_CHECKPOINT_DIR && echo weights > step-1/file"


@pytest.fixture
def launcher_image(real_node: Node) -> str:
    """Return an image with the launcher, which the node has."""
    try:
        archives = image_build.build(["quota-service"])
    except NotHere as reason:
        pytest.skip(str(reason))
    real_node.import_image(archives["quota-service"])
    return "makeway.test/quota-service:1"


@pytest.mark.covers("N25")
async def test_the_checkpoints_of_a_removed_job_go_and_those_of_others_stay(
    serving: Serving, launcher_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "EVERY_SECONDS", 1.0)
    monkeypatch.setattr(retention, "PROBE_SECONDS", 1.0)
    serving.environ["MAKEWAY_KEEP_WORKLOADS_DAYS"] = str(KEPT_SECONDS / 86_400)
    serving.environ["MAKEWAY_KUBE_LAUNCHER_IMAGE"] = launcher_image
    volume = Path(serving.cluster.api.get("/api/v1/persistentvolumes/checkpoints")["spec"]["hostPath"]["path"])
    async with serving.running() as service:
        running = await serving.submit("ana", "running", "sh", "-c", f"{SAVED} && echo saved && exec sleep 600")
        await serving.says(running, "saved")
        linking = f"{SAVED} && ln -s ../{running.id} up && ln -s /checkpoints/{running.id} there && chmod -R a-w ."
        ended = await serving.submit("ana", "ended", "sh", "-c", linking)
        await serving.reaches(ended, "succeeded")
        folder = volume / ended.id
        assert (folder.owner(), (folder / "step-1" / "file").read_text()) == (
            (volume / running.id).owner(),
            "weights\n",
        )
        assert (folder / "up" / "step-1" / "file").exists()

        async def gone() -> bool:
            return not folder.exists() and not service.components.store.pruning.to_purge(10)

        await serving.until(gone, lambda: f"the folder of {ended.id} is gone: {[*volume.iterdir()]}")
        assert (volume / running.id / "step-1" / "file").read_text() == "weights\n"
        assert (await serving.client("root").job(running.id)).state.value == "running"

        def pods() -> list[str | None]:
            result = serving.cluster.api.items(PODS, labelSelector=JOBS)
            return [pod["metadata"]["labels"].get("makeway/job") for pod in result]

        async def alone() -> bool:
            return pods() == [running.id]

        await serving.until(alone, lambda: f"the pod that removed the folder is gone, too: {pods()}")
        await serving.client("ana").cancel(running.id)
        await serving.no_pod_left()
