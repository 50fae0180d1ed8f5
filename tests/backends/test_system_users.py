"""System users mode: every job runs as the account of its owner, and no user reads another's files."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from makeway_quota.backends.base import BackendError
from makeway_quota.backends.local.launch import check_shared
from workshop import Workshop

pytestmark = pytest.mark.root
PYTHON = "/usr/bin/python3"
PEOPLE = ("mkw-ana", "mkw-bo")
TEAM = "mkw-team"


@pytest.fixture(scope="module")
def people() -> Iterator[dict[str, pwd.struct_passwd]]:
    """Two accounts with homes, one of them in a group of its team."""
    subprocess.run(["groupadd", "--force", TEAM], check=True)
    for name in PEOPLE:  # a run that was killed leaves its accounts behind
        subprocess.run(["userdel", "--force", "--remove", name], check=False, capture_output=True)
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/sh", name], check=True, capture_output=True)
    subprocess.run(["usermod", "--append", "--groups", TEAM, PEOPLE[0]], check=True)
    yield {name: pwd.getpwnam(name) for name in PEOPLE}
    for name in PEOPLE:
        subprocess.run(["userdel", "--force", "--remove", name], check=True, capture_output=True)
    subprocess.run(["groupdel", TEAM], check=True)


@pytest.fixture
async def shared(people: dict[str, pwd.struct_passwd]) -> AsyncIterator[Workshop]:
    """A backend that runs jobs under their owners' accounts."""
    root = Path(tempfile.mkdtemp(prefix="makeway-"))
    root.chmod(0o755)
    shop = Workshop(root / "state", system_users=True, launcher_python=PYTHON)
    await shop.backend.open()
    yield shop
    await shop.backend.close(stop_jobs=True)
    shutil.rmtree(root)


def as_user(name: str, *command: str) -> str:
    """What a command says when that person types it."""
    entry = pwd.getpwnam(name)
    done = subprocess.run(
        command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


async def test_a_job_runs_as_its_owner(shared: Workshop, people: dict[str, pwd.struct_passwd]) -> None:
    await shared.run("j-1", "sh", "-c", "id -un; id -Gn; echo $HOME $USER $SHELL; pwd; touch made; cat a.txt",
                     owner=PEOPLE[0], files={"a.txt": "text\n"})  # fmt: skip
    assert (await shared.over("j-1")).exit_code == 0
    home = people[PEOPLE[0]].pw_dir
    work = str(shared.path("j-1", "work").resolve())
    name, groups, *rest = shared.log("j-1").splitlines()
    assert name == PEOPLE[0]
    assert set(groups.split()) == {PEOPLE[0], TEAM}
    assert rest == [f"{home} {PEOPLE[0]} /bin/sh", work, "text"]
    for path in [shared.path("j-1"), *shared.path("j-1").rglob("*")]:
        assert path.lstat().st_uid == people[PEOPLE[0]].pw_uid, path


async def test_users_cannot_read_anothers_job(shared: Workshop) -> None:
    await shared.run("j-1", "sh", "-c", "echo secret; sleep 60", owner=PEOPLE[0], env={"TOKEN": "secret"})
    await shared.running("j-1", says="secret")
    job = shared.path("j-1")
    for path in (job, job / "attempt-1" / "log", job / "checkpoints", shared.root / "spool"):
        assert "Permission denied" in as_user(PEOPLE[1], "ls", str(path))
    assert "denied" in as_user(PEOPLE[1], "cat", str(shared.root / "spool" / "j-1@1"))
    assert "denied" in as_user(PEOPLE[1], "cat", f"/proc/{shared.launcher('j-1')}/environ")
    assert as_user(PEOPLE[0], "cat", str(job / "attempt-1" / "log")) == "secret\n"
    assert not as_user(PEOPLE[0], "ls", str(shared.root / "jobs")).startswith("j-1"), "not even whose jobs there are"


async def test_notices_and_kills_reach_it(shared: Workshop) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(75)); print('up'); time.sleep(60)"
    )
    await shared.run("j-1", PYTHON, "-u", "-c", script, owner=PEOPLE[0])
    await shared.run("j-2", "sh", "-c", "(setsid sleep 61 &) ; echo up; sleep 62", owner=PEOPLE[1])
    for job in ("j-1", "j-2"):
        await shared.running(job, says="up")
    await shared.again()
    await shared.ask("j-1")
    await shared.backend.kill("j-2", 1)
    assert (await shared.over("j-1")).acknowledged
    assert shared.path("j-1", "attempt-1", "notice.json").stat().st_uid == pwd.getpwnam(PEOPLE[0]).pw_uid
    assert (await shared.over("j-2")).killed
    assert shared.processes("j-1") + shared.processes("j-2") == []


async def test_unknown_accounts_and_root_are_refused(shared: Workshop) -> None:
    with pytest.raises(BackendError, match=r"no account 'no-such-user' on .*; ask the administrator"):
        await shared.run("j-1", "true", owner="no-such-user")
    with pytest.raises(BackendError, match="never run as root"):
        await shared.run("j-1", "true", owner="root")
    with pytest.raises(BackendError, match="no account"):
        await shared.run("j-1", "true", owner="a\0b")
    assert not shared.path("j-1").exists()


async def test_a_job_folder_stays_its_first_owners(shared: Workshop) -> None:
    await shared.run("j-1", "true", owner=PEOPLE[0])
    await shared.over("j-1")
    with pytest.raises(BackendError, match="belongs to another account"):
        await shared.run("j-1", "true", owner=PEOPLE[1], attempt=2)


async def test_the_service_follows_no_links_of_a_job(shared: Workshop) -> None:
    script = """
ln -s /etc/shadow "$MAKEWAY_RESULT_FILE"
ln -s /etc/shadow "$MAKEWAY_ERROR_FILE"
echo up
mv ../attempt-1/log ../attempt-1/kept; ln -s /etc/shadow ../attempt-1/log
sleep 0.1
"""
    await shared.run("j-1", "sh", "-c", script, owner=PEOPLE[0])
    await shared.over("j-1")
    assert await shared.backend.result("j-1", 1) is None
    assert await shared.backend.error("j-1", 1) is None
    assert (await shared.backend.log("j-1", 1, 0, 1000))[0] == b""
    await shared.run(
        "j-2", "sh", "-c", "mv ../attempt-1 ../old; ln -s /etc ../attempt-1; echo up; sleep 60", owner=PEOPLE[0]
    )
    await shared.until("j-2", lambda seen: shared.path("j-2", "old").exists())
    await shared.ask("j-2")
    assert not Path("/etc/notice.json").exists()
    await shared.backend.kill("j-2", 1)
    await shared.over("j-2")
    await shared.backend.purge("j-2")
    assert Path("/etc/passwd").exists()


def sleeper(uid: int) -> subprocess.Popen[bytes]:
    """Start a process of another account."""
    return subprocess.Popen(["sleep", "600"], user=uid)


async def test_a_forged_claim_kills_no_other_process(shared: Workshop, people: dict[str, pwd.struct_passwd]) -> None:
    victim = sleeper(people[PEOPLE[1]].pw_uid)
    start = int(Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[19])
    await shared.run("j-1", "sleep", "60", owner=PEOPLE[0])
    await shared.running("j-1")
    claim = shared.read("j-1", "launcher.json") | {"pid": victim.pid, "start_time": start}
    launcher = shared.launcher("j-1")
    await shared.backend.close(stop_jobs=False)
    shared.path("j-1", "attempt-1", "launcher.json").write_text(json.dumps(claim))
    await shared.again()
    await shared.over("j-1")
    await shared.backend.kill("j-1", 1)
    assert victim.poll() is None
    assert not Path(f"/proc/{launcher}").exists() or "Z" in Path(f"/proc/{launcher}/stat").read_text()
    victim.kill()
    victim.wait()


def test_folders_that_are_closed_to_others_are_named(tmp_path: Path) -> None:
    from makeway_quota.backends.local.jobdir import Layout

    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(BackendError, match=r"which other accounts may not enter.*chmod o\+x"):
        check_shared(Layout(closed / "state", shared=True), PYTHON)
    assert os.geteuid() == 0
