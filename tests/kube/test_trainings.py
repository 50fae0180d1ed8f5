"""Trainings as pods make way on a real node, and compute to the last bit what undisturbed ones do.

They use the frameworks of tests/frameworks/environment/uv.lock. In `make test` those are on a volume that the pods of
the notebook's image mount, and PyTorch with workers of its loader and the Trainer of Transformers train. With NOTICES
set, as in `make test-frameworks`, they are in an image that is built upon the notebook's, which takes minutes and 8 GB
of disk, and torchrun in one pod and a gang of two pods train as well.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import set_up
import training_jobs as jobs
from frameworks_image import IMAGE, build, packages
from job_service import NAMESPACE, RUN_AS, Serving, make_namespace
from makeway_api.models import FileIn, Job

from kube_cluster import image_build
from kube_cluster.cluster import Cluster
from kube_cluster.host_volumes import job_template, make_claim
from kube_cluster.problems import NotHere

pytestmark = [pytest.mark.kube, pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1800)]

FULL = bool(os.environ.get("NOTICES"))
HOLD = 3
"""The step after which each training over quota waits for the owner"""
PACKAGES = "/packages"
ENV = {name: value for name, value in jobs.QUIET.items() if name not in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")}
ALONE = {**ENV, "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TRAININGS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "torch": ("gpu1", {**ALONE, "WORKERS": "2"}, ["state.py"]),
    "transformers": ("gpu1", ALONE, ["language.py"]),
}
"""Each training's profile, variables and arguments of Python"""
if FULL:
    TRAININGS |= {
        "torchrun": ("gpu2", ALONE, [*TORCHRUN, "distributed.py"]),
        "gang": ("gang", ENV, ["distributed.py"]),
    }
RANKS, GPUS = (6, 12) if FULL else (2, 4)
"""The ranks of all trainings, and GPUs for all of them twice: undisturbed and over quota"""
SCRIPTS = [
    FileIn(path=file.name, data=base64.b64encode(file.read_bytes()).decode()) for file in jobs.TRAININGS.glob("*.py")
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of its own, because its node has more GPUs and a larger image than that of the others."""
    folder = tmp_path_factory.mktemp("frameworks")
    try:
        archive = build(folder) if FULL else image_build.build(["notebook"])["notebook"]
        if not FULL:
            packages(folder / "packages")
    except (NotHere, set_up.SetUpProblem) as reason:
        pytest.fail(str(reason)) if os.environ.get("CI") else pytest.skip(str(reason))
    with Cluster.start() as result:
        try:
            node = result.add_node(gpus=GPUS)
        except NotHere as reason:
            pytest.skip(str(reason))
        node.import_image(archive)
        make_namespace(result)
        if FULL:
            archive.unlink()
        else:
            make_claim(result.api, NAMESPACE, "packages", folder / "packages", "ReadOnlyMany")
        yield result
    shutil.rmtree(folder)  # 2 GB


@pytest.fixture
def traces(cluster: Cluster, tmp_path: Path) -> Path:
    """Return the folder in which the trainings note what they do: a volume of both teams."""
    made = tmp_path / "traces"
    for kind in ("calm", "moved"):
        for name in TRAININGS:
            (made / kind / name).mkdir(parents=True)
            os.chown(made / kind / name, *RUN_AS)
    make_claim(cluster.api, NAMESPACE, "traces", made)
    return made


@pytest.fixture
async def serving(cluster: Cluster, traces: Path, tmp_path: Path) -> AsyncIterator[Serving]:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    os.chown(checkpoints, *RUN_AS)
    make_claim(cluster.api, NAMESPACE, "checkpoints", checkpoints)
    spec = job_template(cluster.api, NAMESPACE)
    del spec["containers"]  # only the launcher comes from this machine
    image = IMAGE if FULL else image_build.name_of("notebook")
    profile = {"pools": ["gpu"], "grace": 120, "policies": [["rnd", "devops"]], "pod": {"spec": spec}, "image": image}
    volumes = [{"name": "traces", "claim": "traces", "path": "/traces"}]
    if not FULL:
        volumes.append({"name": "packages", "claim": "packages", "path": PACKAGES, "read_only": True})
    owner, borrower = ({"quotas": [{"pools": ["gpu"], "reserved": gpus}], "volumes": volumes} for gpus in (GPUS, 0))
    document = {
        "version": 1,
        "pools": [{"name": "gpu", "size": GPUS, "nodes": {"labels": {"makeway.test/real": "true"}}}],
        "profiles": [
            *({"name": f"gpu{size}", "gpus": size, **profile} for size in (1, 2, GPUS)),
            {"name": "gang", "gpus": 1, "workers": 2, **profile},
        ],
        "policies": [
            {"name": "rnd", "groups": ["rnd"], **borrower},
            {"name": "devops", "groups": ["devops"], **owner},
        ],
    }
    made = Serving(cluster, tmp_path / "state", json.dumps(document))
    made.patience = 900.0
    yield made
    for one in made.clients.values():
        await one.close()
    made.reservation.close()


async def submit(serving: Serving, person: str, kind: str, **env: str) -> dict[str, Job]:
    """Submit all trainings of a person; they note what they do below this kind of folder."""
    return {
        name: await serving.submit(
            person,
            f"{kind} {name}",
            "python3",
            *arguments,
            profile=profile,
            files=SCRIPTS,
            env={**given, **env, **({} if FULL else {"PYTHONPATH": PACKAGES}), "TRACE": f"/traces/{kind}/{name}"},
        )
        for name, (profile, given, arguments) in TRAININGS.items()
    }


def all_hold(traces: Path) -> bool:
    """Whether every rank of the trainings over quota has come to the step after which it waits."""
    notes = {file: file.read_text() for file in traces.glob("moved/*/rank-*")}
    return len(notes) == RANKS and all(f" step {HOLD} " in text for text in notes.values())


@pytest.mark.covers("N12", "F20", "F81")
async def test_trainings_make_way_on_a_node_and_end_bit_identical(serving: Serving, traces: Path) -> None:
    async with serving.running():
        calm = await submit(serving, "bo", "calm")
        moved = await submit(serving, "ana", "moved", HOLD=str(HOLD))
        for job in calm.values():
            done = await serving.reaches(job, "succeeded", "failed")
            assert done.state.value == "succeeded", await serving.log(job)

        async def held() -> bool:
            return await asyncio.to_thread(all_hold, traces)

        await serving.until(held, lambda: f"all trainings come to step {HOLD}")
        owner = await serving.submit("bo", "owner", "true", profile=f"gpu{GPUS}")
        await serving.reaches(owner, "succeeded")
        for name, job in moved.items():
            done = await serving.reaches(job, "succeeded", "failed")
            log = [await serving.log(job, attempt) for attempt in (1, len(done.attempts))]
            assert [item.outcome for item in done.attempts] == ["preempted", "succeeded"], (name, done, log)
            assert done.preemptions == 1
            first = done.attempts[0]
            assert first.checkpoint is not None
            assert HOLD <= first.checkpoint.step <= HOLD + 1, "the ranks agree at the next step"
            remaining, whole = (jobs.Outcome.of([], traces / kind / name) for kind in ("moved", "calm"))
            assert remaining.results == whole.results, name
            for rank in whole.notes:
                steps = [[step for _, *step in outcome.steps(rank)] for outcome in (remaining, whole)]
                assert steps[0] == steps[1], f"{name}: each step once, on the same data"
                assert {attempt for attempt, *_ in remaining.steps(rank)} == {1, 2}
