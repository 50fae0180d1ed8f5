"""The story on Kubernetes: a guaranteed notebook in a pod; training over quota makes way, and resumes in a new pod."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Person, chromium, notebook
from charts import JOBS
from makeway_api.models import Job
from playwright.sync_api import expect
from pods import SPARE, allocatable, wait_until
from portals import CHECKPOINTS, WORKERS, Portal
from stories import STEPS, TRAIN, reads, sees, take, training_cell, uninterrupted, weights
from walk import blocks, steps

from kube_cluster.api import GPU
from kube_cluster.node import Node

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

TRIALS = ["trial-1", "trial-2", "trial-3"]
HURRY = 'pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"], "hurry")'
LOAD, TRAIN_AS_IN_STEP_9 = blocks(steps()[9], "python")
CELLS = [LOAD, "%gpus --live", *(training_cell(name, HURRY) for name in TRIALS), "%jobs", TRAIN_AS_IN_STEP_9]
USER = 1000
"""The user of notebooks, who owns the files in their homes."""


@pytest.fixture
def four_gpus(portal: Portal, real_node: Node) -> Iterator[None]:
    """Have four GPUs on the node, and no work of the portal afterwards."""
    real_node.break_gpus()
    wait_until(lambda: allocatable(portal.api, real_node) == "4", "the node offers four GPUs")
    yield
    portal.clean()
    real_node.break_gpus(*SPARE)
    wait_until(lambda: allocatable(portal.api, real_node) == "2", "the node offers two GPUs")


def put(portal: Portal, person: str, name: str, cells: list[str]) -> None:
    """Write a notebook, and the script that it submits, to the volume of a person's home."""
    home = portal.volume(f"home-{person}")
    notebook(home, name, cells)
    shutil.copy(TRAIN, home)
    for file in (home / name, home / TRAIN.name):
        os.chown(file, USER, USER)


def workers(portal: Portal) -> dict[str, str]:
    """Return the UIDs of the pods of jobs that run, by the names of their jobs."""
    result = [one for one in portal.api.items(WORKERS) if one["status"]["phase"] == "Running"]
    return {one["metadata"]["annotations"]["makeway/name"]: one["metadata"]["uid"] for one in result}


@pytest.mark.covers("N01", "N03", "N05", "N06", "N08", "N11", "F20", "F24", "F26", "F80", "F81", "N21")
@pytest.mark.usefixtures("four_gpus")
def test_the_story_on_kubernetes(portal: Portal, tmp_path: Path, pictures: Path | None) -> None:
    expected = uninterrupted(tmp_path)
    password = portal.release.secret()["password"]
    with chromium() as browser, portal.person("ana").client() as client:
        people = [Person(browser, portal.url, name, password) for name in ("ana", "bo", "admin")]
        ana, bo, admin = people

        def jobs() -> dict[str, Job]:
            result = sorted(client.jobs(mine=True).jobs, key=lambda job: job.submitted_at)
            return {job.name: job for job in result if job.name in TRIALS}

        # ana logs in, picks a profile, sees the phases of the start, and gets JupyterLab in a pod with a GPU.
        ana.log_in()
        expect(ana.row("rnd/gpu1")).to_contain_text("Ready now")
        ana.start("rnd/gpu1")
        ana.page.wait_for_url("**/spawn-pending/**")
        expect(ana.page.locator(".mw-phases li")).to_have_count(5)
        ana.in_lab()
        hers = portal.person("ana").notebook()
        assert hers["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"

        # She trains over her team's quota, on the GPUs that are idle.
        put(portal, "ana", "story.ipynb", CELLS)
        ana.open_notebook("story.ipynb")
        for cell in (0, 1):
            ana.run_cell(cell)
        for number, name in enumerate(TRIALS):
            assert name in ana.run_cell(2 + number)
            wait_until(lambda name=name: name in workers(portal), f"{name} runs in a pod")
        assert "trial-3" in ana.run_cell(len(CELLS) - 2)
        assert all(job.over_quota for job in jobs().values())
        before = workers(portal)
        assert set(before) == set(TRIALS)
        assert portal.walk.step(9).count("Running") == len(TRIALS), "as step 9 of the page lists them"
        wait_until(lambda: "scratch" in client.logs(jobs()["trial-3"].id).text, "the last one trains")

        # bo comes back: he reads whose job makes way, and takes the GPU that is his.
        admin.log_in("/services/makeway/")
        expect(admin.page.get_by_text("trial-3").first).to_be_visible()
        bo.log_in()
        row = bo.row("devops/gpu1")
        expect(row).to_contain_text("R&D")
        expect(row).not_to_contain_text("trial-3")  # another team's
        take(pictures, bo, "kubernetes-picker", height=440)
        bo.start("devops/gpu1")
        bo.page.wait_for_url("**/spawn-pending/**")
        take(pictures, bo, "kubernetes-pending", height=460)
        bo.in_lab()

        # The pod of the job that started last has saved and is gone; no other pod was touched.
        wait_until(lambda: set(workers(portal)) == {"trial-1", "trial-2"}, "one pod has left")
        assert workers(portal) == {name: uid for name, uid in before.items() if name != "trial-3"}
        assert portal.person("ana").notebook()["metadata"]["uid"] == hers["metadata"]["uid"]
        victim = client.job(jobs()["trial-3"].id)
        assert (victim.state, victim.preemptions, victim.attempts[0].outcome) == ("pending", 1, "preempted")
        assert victim.checkpoint is not None
        assert 0 < victim.checkpoint.step < STEPS
        saved = portal.volume(CHECKPOINTS, JOBS) / victim.id
        assert list(saved.rglob("state.pkl")), "its checkpoint is on the volume"

        # His kernel sees one GPU, and everybody reads why.
        put(portal, "bo", "one.ipynb", ["%load_ext makeway\n%gpus", sees(1)])
        bo.open_notebook("one.ipynb")
        bo.run_cell(0)
        assert "1 GPU" in bo.run_cell(1)
        reads(admin, "“trial-3” of ana made way for DevOps")
        expect(admin.page.locator("body")).to_contain_text("node-0")
        take(pictures, admin, "kubernetes-panel")
        widget = ana.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(1)
        expect(widget).to_contain_text("R&D")
        ana.page.locator(".jp-NotebookPanel .jp-CodeCell").first.scroll_into_view_if_needed()
        take(pictures, ana, "kubernetes-notebook", theme=True)

        # bo stops; the job resumes in a new pod from its saved step and ends with the same weights to the last bit.
        portal.person("bo").stop()
        wait_until(lambda: "trial-3" in workers(portal), "the job resumes")
        assert workers(portal)["trial-3"] != before["trial-3"]
        for job in jobs().values():
            (portal.volume(CHECKPOINTS, JOBS) / job.id / "hurry").touch()
        wait_until(lambda: {job.state.value for job in jobs().values()} == {"succeeded"}, "all jobs end")
        log = client.logs(victim.id, attempt=2).text
        assert f"going on at step {victim.checkpoint.step} of {STEPS}" in log
        assert weights(log) == expected
        assert {weights(client.logs(job.id).text) for job in jobs().values()} == {expected}
        verbs = [one.verb for one in client.job_events(victim.id)]
        assert [verb for verb in verbs if verb != "wait"] == ["submit", "start", "evict", "requeue", "start", "finish"]

        # Step 9 of the page: the job of a cell.
        ana.run_cell(len(CELLS) - 1)
        wait_until(lambda: client.jobs(mine=True).jobs[0].state.ended, "the job of the page ends")
        assert "GPUs of this job: 1 in the pod of worker-0" in client.logs(client.jobs(mine=True).jobs[0].id).text
        for person in people:
            assert person.outside == [], "a closed network: nothing is asked outside"
            assert person.errors == []
            person.close()
