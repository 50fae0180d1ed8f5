"""A running portal is backed up and restored elsewhere by the commands of the manual, and does not run twice."""

from __future__ import annotations

import base64
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.portal import Portal, until
from makeway_api.models import FileIn, JobRequest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "back-up-and-upgrade.md"
TRAIN = base64.b64encode((ROOT / "docs" / "examples" / "train.py").read_bytes()).decode()
STEPS = ["--steps", "4000", "--every", "5", "--seconds", "0.05"]
RESULT = "import os, pickle; pickle.dump(42, open(os.environ['MAKEWAY_RESULT_FILE'], 'wb')); print('well done')"


def commands(portal: Portal) -> tuple[str, str]:
    """Return the two blocks of commands of the manual: to back up, and to restore without the start."""
    section = PAGE.read_text(encoding="utf-8").partition("## On one machine")[2].partition("\n## ")[0]
    back_up, restore = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert restore.endswith("make run\n")
    return back_up.replace(".venv/bin/python", sys.executable), restore.removesuffix("make run\n")


def run(script: str, folder: Path) -> None:
    subprocess.run(["bash", "-eu", "-c", script], cwd=folder, check=True, timeout=120)


@pytest.fixture
def restored(fresh: Portal, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    """A second portal, whose state directory is to be restored."""
    portal = Portal(tmp_path_factory.mktemp("elsewhere"))
    yield portal
    portal.stop()


def test_a_portal_is_restored_elsewhere_from_a_backup_that_was_made_while_it_ran(
    fresh: Portal, restored: Portal, tmp_path: Path
) -> None:
    fresh.start()
    back_up, restore = commands(fresh)
    assert fresh.hub("POST", "/users/zoe").status_code == 201
    assert fresh.start_server("ana", profile="cpu").is_success
    (fresh.state.homes / "ana" / "notes.txt").write_text("of ana")
    with fresh.client(fresh.user_token("ana")) as ana:
        ended = ana.submit(JobRequest(team="rnd", profile="gpu1", name="ended", command=[sys.executable, "-c", RESULT]))
        runs = ana.submit(
            JobRequest(
                team="rnd",
                profile="gpu1",
                name="runs",
                files=[FileIn(path="train.py", data=TRAIN)],
                command=[sys.executable, "train.py", *STEPS],
            )
        )
        until(lambda: ana.job(ended.id).state == "succeeded", "the first job has ended")
        until(
            lambda: list((fresh.state.root / "jobs" / runs.id / "checkpoints").glob("step-*")),
            "the second has a checkpoint",
        )
        run(back_up, tmp_path)
    run(restore.replace("backup/", f"{tmp_path}/backup/"), restored.root)

    process = restored.launch()  # beside the first one
    until(lambda: process.poll() is not None, "the copy has ended")
    assert process.returncode == 1
    assert f"{restored.state.root} is a copy of the data of a portal that runs on this machine" in restored.printed
    assert f"in {fresh.state.root} (process " in restored.printed
    assert fresh.server("ana")["ready"], "the notebook of the first one goes on"

    fresh.stop()
    restored.start()
    assert restored.hub("GET", "/users/zoe").status_code == 200
    assert restored.state.password() == fresh.state.password()
    assert (restored.state.homes / "ana" / "notes.txt").read_text() == "of ana"
    assert restored.start_server("ana", profile="cpu").is_success
    with restored.client(restored.user_token("ana")) as ana:
        assert ana.job(ended.id).state == "succeeded"
        assert pickle.loads(ana.result(ended.id)) == 42
        assert "well done" in ana.logs(ended.id).text
        until(lambda: ana.job(runs.id).state == "running" and len(ana.job(runs.id).attempts) == 2, "the second goes on")
        until(lambda: "going on at step" in ana.logs(runs.id, attempt=2).text, "it does so from its checkpoint")
        ana.cancel(runs.id)
