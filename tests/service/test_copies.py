"""A service on a copy of a state directory runs no job twice on one machine: it does not start, and says why."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from makeway_api import installations
from makeway_hub.address import CannotStart
from makeway_hub.databases import check_no_copy
from makeway_hub.state_directory import StateDirectory
from makeway_quota.application import AlreadyRunning, Application
from makeway_quota.backends.local.backend import LocalBackend
from makeway_quota.settings import load
from makeway_quota.web.app import create_app
from makeway_quota.web.login.auth import TokenAuth
from makeway_quota.web.settings import WebSettings
from running import PEOPLE, Running
from workshop import Workshop

POLICY = "version: 1\npools: [{name: gpu}]\nprofiles: [{name: gpu1, gpus: 1}]\npolicies: [{name: rnd, groups: [rnd]}]\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("makeway_quota.application.TAKEOVER_SECONDS", 0.5)


@asynccontextmanager
async def portal(root: Path) -> AsyncIterator[Running]:
    """Run the service of a state directory with jobs as processes of this machine, which go on after it."""
    root.mkdir(exist_ok=True)
    (root / "policy.yaml").write_text(POLICY)
    environ = {"MAKEWAY_STATE_DIR": str(root), "MAKEWAY_POLICY_FILE": str(root / "policy.yaml")}
    service = await Application.open(load(environ=environ), LocalBackend(root, virtual_gpus=2))
    auth = TokenAuth(PEOPLE)
    run = Running(service, auth, create_app(service.services, WebSettings(secret=b"test" * 8), auth))
    await service.start()
    try:
        yield run
    finally:
        await service.stop(stop_jobs=False)
        for client in run.clients.values():
            await client.close()


def back_up(root: Path, to: Path, *, spool: bool = True) -> None:
    """Copy a state directory as the manual does, or all of it."""
    to.mkdir()
    with closing(sqlite3.connect(root / "makeway.sqlite")) as connection:
        connection.execute("VACUUM INTO ?", [str(to / "makeway.sqlite")])
    for name in ("jobs", "artifacts", *(["spool"] if spool else [])):
        shutil.copytree(root / name, to / name, symlinks=True)


@pytest.mark.parametrize("spool", [False, True])
async def test_a_copy_does_not_start_beside_the_portal_that_it_is_of(tmp_path: Path, spool: bool) -> None:
    async with portal(tmp_path / "one"):
        back_up(tmp_path / "one", tmp_path / "two", spool=spool)
        with pytest.raises(AlreadyRunning, match="is a copy of the data of a portal that runs on this machine") as told:
            async with portal(tmp_path / "two"):
                pass
        assert f"(process {os.getpid()})" in str(told.value)
    async with portal(tmp_path / "two"):
        pass  # once the other has stopped


async def test_the_hub_asks_before_it_takes_notebooks_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = StateDirectory(tmp_path / "one"), StateDirectory(tmp_path / "two")
    async with portal(one.root):
        back_up(one.root, two.root)
        with pytest.raises(CannotStart, match="Stop that one first"):
            check_no_copy(two)
        monkeypatch.chdir(one.root)  # where the service of the portal itself works
        check_no_copy(one)
    check_no_copy(two)
    check_no_copy(StateDirectory(tmp_path / "none"))


async def test_jobs_that_go_on_without_their_portal_are_not_started_again_by_a_copy(tmp_path: Path) -> None:
    """As with KEEP=1, or where the portal's service was killed; the portal itself takes them up again."""
    root, count = tmp_path / "one", tmp_path / "runs"
    command = ["sh", "-c", f"echo run >> {count}; while [ ! -e {tmp_path}/end ]; do sleep 0.1; done"]
    async with portal(root) as run:
        job = await run.submit("ana", "goes-on", command, profile="gpu1", team="rnd")
        await run.job(job.id, "running")
    back_up(root, tmp_path / "two", spool=False)
    with pytest.raises(AlreadyRunning, match=rf"{job.id} in {root}/jobs/{job.id} \(process \d+\)"):
        async with portal(tmp_path / "two"):
            pass
    async with portal(root) as run:
        (tmp_path / "end").touch()
        await run.job(job.id, "succeeded")
    assert count.read_text() == "run\n"


async def test_what_any_account_can_write_keeps_no_portal_from_its_start(tmp_path: Path) -> None:
    """A process may name any job and folder; only an order in the spool of another portal of this account counts."""
    shop = Workshop(tmp_path / "state")
    await shop.backend.open()
    other = tmp_path / "other" / "jobs" / "j-of-copies"
    other.mkdir(parents=True)
    (other.parents[1] / "spool").symlink_to(shop.root / "spool")
    (shop.root / "spool" / "j-of-copies@1").touch()
    marks = {"MAKEWAY_JOB_DIR": str(other), "MAKEWAY_ATTEMPT": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", env=marks, stdin=-1)
    try:
        assert shop.backend.running_elsewhere({"j-of-copies"}) == []
        (other.parents[1] / "spool").unlink()
        assert shop.backend.running_elsewhere({"j-of-copies"}) == []
        (other.parents[1] / "spool").mkdir()
        (other.parents[1] / "spool" / "j-of-copies@1").touch()
        [result] = shop.backend.running_elsewhere({"j-of-copies"})
        assert (result.workload, result.folder, result.pid) == ("j-of-copies", str(other), process.pid)
        assert shop.backend.running_elsewhere({"j-other"}) == []
    finally:
        process.kill()
        await process.wait()
        (shop.root / "spool" / "j-of-copies@1").unlink()
        await shop.backend.close(stop_jobs=False)


def test_a_name_is_free_again_with_its_holder() -> None:
    first = installations.lock("of-this-test")
    assert first is not None
    for _ in range(200):  # however often it is asked for
        assert installations.running_service("of-this-test") is not None
    assert installations.lock("of-this-test") is None
    other = installations.lock("of-another-test")
    assert other is not None
    other.close()
    first.close()
    assert installations.running_service("of-this-test") is None


@pytest.mark.parametrize("folder", ["writable by all", "a link", "a file"])
def test_no_other_account_can_hold_the_name_of_a_portal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The folder of the locks lies where every account may have made it first."""
    monkeypatch.setattr(installations, "FOLDERS", tmp_path)
    own, theirs = tmp_path / f"makeway-{os.geteuid()}", tmp_path / "theirs"
    theirs.mkdir()
    if folder == "writable by all":
        own.mkdir()
        own.chmod(0o777)
    elif folder == "a link":
        own.symlink_to(theirs)
    else:
        own.touch()
    with (theirs / "installation-of-this-test").open("w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        held = installations.lock("of-this-test")
        assert held is not None
        held.close()
        assert installations.running_service("of-this-test") is None
