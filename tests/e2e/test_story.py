"""The story: log in, a guaranteed notebook, over-quota training that makes way and resumes; nothing is simulated."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Person, chromium, notebook
from makeway_api.models import Job
from playwright.sync_api import expect
from stories import TRAIN, reads, sees, take, training_cell, uninterrupted, weights

from benchmarks.portal import Portal

ROOT = Path(__file__).parents[2]


def cells(hurry: Path) -> list[str]:
    """Return a notebook that submits eight trainings."""
    trials = [training_cell(f"trial-{i}", f"pathlib.Path({str(hurry)!r})") for i in range(1, 9)]
    return ["%load_ext makeway", "%gpus --live", *trials, "%jobs"]


@pytest.fixture
def portal() -> Iterator[Portal]:
    sample = (ROOT / "hub_config" / "policy.yaml").read_text(encoding="utf-8")
    with Portal(10, policy=sample, command=["make", "-C", str(ROOT), "run"]) as portal:
        yield portal


def until(found: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.2)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers(
    "N01",
    "N02",
    "N03",
    "N05",
    "N06",
    "N08",
    "N09",
    "N11",
    "N13",
    "N15",
    "F20",
    "F24",
    "F26",
    "F35",
    "F37",
    "F40",
    "F51",
)
def test_story(portal: Portal, tmp_path: Path, pictures: Path | None) -> None:
    base = f"http://127.0.0.1:{portal.port}"
    password = portal.state.password()
    expected = uninterrupted(tmp_path)
    ana_api = portal.user("ana")

    def jobs() -> dict[str, Job]:
        return {job.name: job for job in ana_api.jobs(team="rnd", limit=100).jobs}

    with chromium() as browser:
        admin = Person(browser, base, "admin", password)
        ana = Person(browser, base, "ana", password)
        bo = Person(browser, base, "bo", password)
        people = (admin, ana, bo)

        # ana logs in, picks a 1-GPU profile, gets JupyterLab.
        ana.log_in()
        expect(ana.row("rnd/gpu1")).to_contain_text("Ready now")
        ana.start("rnd/gpu1")
        ana.in_lab()

        # She trains until her team is at its limit.
        home = portal.state.root / "homes" / "ana"
        shutil.copy(TRAIN, home)
        hurry = tmp_path / "hurry"
        story = cells(hurry)
        notebook(home, "story.ipynb", story)
        ana.open_notebook("story.ipynb")
        for cell in range(2):
            ana.run_cell(cell)
        for i in range(1, 9):
            shown = ana.run_cell(1 + i)
            until(lambda i=i: jobs()[f"trial-{i}"].state == "running", f"trial-{i} runs")
        shown = " ".join(shown.split())
        assert "It runs on GPUs of DevOps. It makes way when" in shown
        assert "No checkpoint yet" in shown
        assert "trial-8" in ana.run_cell(len(story) - 1)
        widget = ana.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(1)
        expect(widget).to_contain_text("R&D")
        assert jobs()["trial-8"].over_quota

        # The admin sees ten GPUs, nine of them R&D's.
        admin.log_in("/services/makeway/")
        expect(admin.page.get_by_text("trial-8").first).to_be_visible()

        # bo is told how soon and at whose cost two GPUs are his, and takes them.
        bo.log_in()
        row = bo.row("devops/gpu2")
        expect(row).to_contain_text("30 s")
        expect(row).to_contain_text("R&D")
        expect(row).not_to_contain_text("trial-8")  # another team's
        take(pictures, bo, "picker")
        bo.start("devops/gpu2")
        until(lambda: jobs()["trial-8"].state == "pending", "the job that started last leaves")
        bo.in_lab()
        states = {name: job.state.value for name, job in jobs().items()}
        assert states == {f"trial-{i}": "running" for i in range(1, 8)} | {"trial-8": "pending"}
        victim = ana_api.job(jobs()["trial-8"].id)
        assert (victim.preemptions, victim.attempts[0].outcome) == (1, "preempted")
        saved = victim.checkpoint
        assert saved is not None
        assert 0 < saved.step < 600

        # His kernel sees two GPUs.
        notebook(portal.state.root / "homes" / "bo", "two.ipynb", ["%load_ext makeway\n%gpus", sees(2)])
        bo.open_notebook("two.ipynb")
        bo.run_cell(0)
        assert "2 GPUs" in bo.run_cell(1)

        # Everybody reads why.
        reads(admin, "“trial-8” of ana made way for DevOps")
        take(pictures, admin, "panel")
        widget.scroll_into_view_if_needed()
        ana.page.locator(".jp-NotebookPanel .jp-CodeCell").first.scroll_into_view_if_needed()
        take(pictures, ana, "notebook", theme=True)

        # bo stops; the job resumes from its saved step and ends with the same weights to the last bit.
        portal.stop_server("bo")
        until(lambda: jobs()["trial-8"].state == "running", "the job resumes")
        card = ana.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(9).locator(".jp-OutputArea")
        expect(card).to_contain_text("2 attempts:")
        expect(card).to_contain_text("saved at step")
        if pictures:
            ana.page.wait_for_timeout(20_000)  # until it has a curve again
            take(pictures, ana, "card", theme=True, only=card)
        hurry.touch()
        until(lambda: jobs()["trial-8"].state == "succeeded", "the job ends")
        log = ana_api.logs(victim.id, attempt=2).text
        assert f"going on at step {saved.step} of 600" in log
        assert weights(log) == expected
        until(lambda: all(job.state == "succeeded" for job in jobs().values()), "all jobs end")
        for name, job in jobs().items():
            assert weights(ana_api.logs(job.id).text) == expected, name

        steps = [d.verb for d in ana_api.job_events(victim.id)]
        assert [v for v in steps if v != "wait"] == ["submit", "start", "evict", "requeue", "start", "finish"]
        reads(admin, "“trial-8” of ana succeeded")
        for person in people:
            assert person.outside == [], "a closed network: nothing is asked outside"
            assert person.errors == []
            person.close()
