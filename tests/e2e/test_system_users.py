"""Ten people on one server: each logs in with their own account, works under it, and reads no other user's files."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import websocket
from accounts import PASSWORD, accounts, as_user, shared_portal
from hub.portal import SERVICE, Portal, until
from kernels import execute
from makeway_api.errors import MakewayError
from makeway_api.models import JobRequest
from makeway_spawner.process import marked

pytestmark = [pytest.mark.root, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
ANA, BO, CY = "mkw-eana", "mkw-ebo", "mkw-ecy"
GROUPS = {"rnd": "mkw-ernd", "devops": "mkw-edevops"}
PEOPLE = {ANA: GROUPS["rnd"], BO: GROUPS["devops"], CY: GROUPS["rnd"]}
"""cy is in ana's team, which makes nothing of hers cy's."""
SECRET = "the-secret-of-ana"
WHO = """
import json, os, pwd
print(json.dumps({"uid": os.getuid(), "groups": sorted(set(os.getgroups()) | {os.getgid()}),
                  "home": os.path.expanduser("~"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                  "name": pwd.getpwuid(os.getuid()).pw_name}), flush=True)
"""
TRAIN = f"""%%train --profile gpu1 --name NAME
{WHO}
from makeway import checkpoint
print("{SECRET}", flush=True)
(checkpoint.dir / "mine").write_text("{SECRET}")
MORE
"""
LOOK = """
import json, os
def reads(path):
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        with open(path, "rb") as file:
            file.read(1)
            return True
    except OSError:
        return False
print(json.dumps([path for path in json.load(open("paths.json")) if reads(path)]))
"""
HARMLESS = {"address.json", "hub.pid", "proxy.pid", "ports.json", "run.lock", "service.lock"}


@dataclass
class Person:
    """A user who has logged in, with a notebook and its kernel."""

    name: str
    portal: Portal
    browser: httpx2.Client
    token: str = ""
    kernel: str = ""

    def start(self, choice: str) -> None:
        """Pick a profile and open a notebook with a kernel."""
        answer = self.portal.pick(self.browser, choice=choice)
        assert answer.status_code == 200, answer.text
        until(lambda: (self.portal.server(self.name) or {}).get("ready"), f"{self.name}'s notebook is up", 120)
        self.token = self.portal.user_token(self.name)
        answer = httpx2.post(f"{self.url}/api/kernels", headers=self.headers, json={"name": "python3"}, timeout=60)
        self.kernel = answer.raise_for_status().json()["id"]

    @property
    def url(self) -> str:
        """Their notebook."""
        return f"{self.portal.url}/user/{self.name}"

    @property
    def headers(self) -> dict[str, str]:
        """What shows who they are."""
        return {"Authorization": f"token {self.token}"}

    def run(self, cell: str) -> str:
        """Run a cell in the kernel of their notebook and give what it printed."""
        address = f"{self.url}/api/kernels/{self.kernel}/channels".replace("http", "ws", 1)
        socket = websocket.create_connection(address, header=self.headers, timeout=60)
        try:
            return execute(socket, cell)
        finally:
            socket.close()

    def reads(self, paths: list[Path]) -> set[str]:
        """Return the paths that the user can read from inside the notebook."""
        entry = pwd.getpwnam(self.name)
        file = Path(entry.pw_dir) / "paths.json"
        file.write_text(json.dumps([str(path) for path in paths]))
        os.chown(file, entry.pw_uid, entry.pw_gid)
        result: list[str] = json.loads(self.run(LOOK))
        return set(result)

    @property
    def pid(self) -> int:
        """Their notebook's process."""
        return int(self.portal.hub("GET", f"/users/{self.name}").json()["servers"][""]["state"]["pid"])


@pytest.fixture(scope="module")
def portal() -> Iterator[Portal]:
    with accounts(PEOPLE), shared_portal(GROUPS) as portal:
        yield portal


@pytest.fixture(scope="module")
def people(portal: Portal) -> dict[str, Person]:
    """ana and bo with notebooks, cy logged in only."""
    result = {name: Person(name, portal, portal.browser(name, PASSWORD)) for name in PEOPLE}
    result[ANA].start("rnd/gpu1")
    result[BO].start("devops/gpu1")
    result[CY].token = portal.user_token(CY)
    return result


@pytest.fixture(scope="module")
def jobs(portal: Portal, people: dict[str, Person]) -> dict[str, str]:
    """Two jobs of ana's: one that ended with a result, one that runs; submitted from her notebook."""
    ana = people[ANA]
    ana.run("%load_ext makeway")
    ana.run(TRAIN.replace("NAME", "ended").replace("MORE", f"result = '{SECRET}'"))
    ana.run(TRAIN.replace("NAME", "runs").replace("MORE", "import time; time.sleep(600)"))

    def submitted() -> dict[str, str]:
        with portal.client(ana.token) as client:
            result = {job.name: job for job in client.jobs(mine=True).jobs}
            there = {name: job.state.value for name, job in result.items()} == {"ended": "succeeded", "runs": "running"}
            if there and SECRET in client.logs(result["runs"].id).text:
                return {name: job.id for name, job in result.items()}
        return {}

    answer: dict[str, str] = until(submitted, "one job ended, one runs")
    return answer


def account(name: str) -> dict[str, Any]:
    """Return the output of WHO for a user."""
    entry = pwd.getpwnam(name)
    groups = sorted(set(os.getgrouplist(name, entry.pw_gid)))
    return {"uid": entry.pw_uid, "groups": groups, "home": entry.pw_dir, "name": name}


def identity(pid: int) -> tuple[set[int], set[int]]:
    """The account numbers and groups of a process, as the kernel knows them."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    groups = {int(word) for word in (*lines["Groups"].split(), *lines["Gid"].split())}
    return {int(word) for word in lines["Uid"].split()}, groups


@pytest.mark.covers("N22", "N01", "F24")
def test_notebooks_and_jobs_run_under_the_account_that_logged_in(
    portal: Portal, people: dict[str, Person], jobs: dict[str, str]
) -> None:
    for name in (ANA, BO):
        mine = account(name)
        message = json.loads(people[name].run(WHO))
        assert {key: message[key] for key in mine} == mine
        assert len(message["gpus"].split(",")) == 1
        assert identity(people[name].pid) == ({mine["uid"]}, set(mine["groups"]))
    with portal.client(people[ANA].token) as client:
        for id in jobs.values():
            message = json.loads(client.logs(id).text.splitlines()[0])
            assert {key: message[key] for key in account(ANA)} == account(ANA)
        assert client.job(jobs["runs"]).command, "she sees what she runs"
    processes = list(marked("MAKEWAY_JOB_ID", jobs["runs"]))
    assert len(processes) >= 2, "the launcher and what it started"
    for pid in processes:
        assert identity(pid) == ({account(ANA)["uid"]}, set(account(ANA)["groups"]))
    folder = portal.state.root / "jobs" / jobs["runs"]
    assert {path.lstat().st_uid for path in (folder, *folder.rglob("*"))} == {account(ANA)["uid"]}
    assert people[ANA].reads([folder / "attempt-1" / "log", folder / "checkpoints" / "mine"]) != set()


@pytest.mark.covers("N22")
def test_notebooks_cannot_read_other_users_files_or_the_portals(
    portal: Portal, people: dict[str, Person], jobs: dict[str, str]
) -> None:
    root = portal.state.root
    his = account(BO)["uid"]
    files = [path for path in (root, *root.rglob("*")) if path.lstat().st_uid != his and "bin" not in path.parts]
    result = {str(path.relative_to(root)) for path in files}
    for name in (
        "makeway.sqlite",
        "jupyterhub.sqlite",
        "secrets/service_token",
        "secrets/cookie_secret",
        "logs/hub.log",
    ):
        assert name in result
    assert [name for name in result if name.endswith(("/result.pkl", "/log", "checkpoints/mine"))]
    uid = account(ANA)["uid"]
    others = [pid for pid, known in identities().items() if uid in known] + [*marked("MAKEWAY_STATE_DIR", str(root))]
    assert len(others) >= 6, "notebook, kernel, launcher and job; Hub, proxy and service"
    private = [Path(f"/proc/{pid}/{what}") for pid in others for what in ("environ", "fd", "mem")]
    read = people[BO].reads([*files, *private])
    assert {Path(path).name for path in read} <= HARMLESS
    secrets = [path.read_text().strip() for path in portal.state.secrets.iterdir()]
    for path in read:
        assert not [secret for secret in secrets if secret in Path(path).read_text()]
    assert as_user(BO, "ls", str(root)).returncode != 0, "not even whose things there are"


def identities() -> dict[int, set[int]]:
    """Every process, with its account numbers; others may end while we look."""
    result = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError, KeyError):
            result[pid] = identity(pid)[0]
    return result


@pytest.mark.covers("N22")
def test_what_kernels_say_goes_through_private_sockets(portal: Portal, people: dict[str, Person]) -> None:
    """By default kernels print to TCP ports of 127.0.0.1, which every account may listen to."""
    folder = portal.state.root / "run" / str(account(ANA)["uid"])
    kernel = json.loads((folder / f"kernel-{people[ANA].kernel}.json").read_text())
    assert kernel["transport"] == "ipc"
    sockets = list(folder.glob(f"kernel-{people[ANA].kernel}-ipc-*"))
    assert len(sockets) == 5
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_uid for path in (folder, *sockets)} == {account(ANA)["uid"]}


@pytest.mark.covers("N22")
def test_a_notebook_lets_its_owner_in_only(portal: Portal, people: dict[str, Person]) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_files = {os.readlink(fd) for fd in Path(f"/proc/{people[ANA].pid}/fd").iterdir()}
    [port] = {int(w[1].partition(":")[2], 16) for w in listening if w[3] == "0A" and f"socket:[{w[9]}]" in open_files}
    for base in (f"http://127.0.0.1:{port}/user/{ANA}", people[ANA].url):
        assert httpx2.get(f"{base}/api/contents", headers=people[ANA].headers).status_code == 200
        assert httpx2.get(f"{base}/api/contents").status_code in (302, 403)
        for name in (BO, CY):
            assert httpx2.get(f"{base}/api/contents", headers=people[name].headers).status_code == 403


@pytest.mark.covers("N22")
@pytest.mark.parametrize(("who", "status"), [(BO, 404), (CY, 403)])
def test_users_cannot_read_another_users_job_through_the_api(
    portal: Portal, people: dict[str, Person], jobs: dict[str, str], who: str, status: int
) -> None:
    """bo is in another team and sees no job; cy is in the same one and sees that it runs, and no more."""
    with portal.client(people[who].token) as client:
        for call in (
            lambda: client.logs(jobs["runs"]),
            lambda: client.result(jobs["ended"]),
            lambda: client.error(jobs["ended"]),
            lambda: client.clone(jobs["ended"]),
            lambda: client.cancel(jobs["runs"]),
            lambda: client.resume(jobs["ended"]),
            lambda: client.preempt_test(jobs["runs"]),
        ):
            with pytest.raises(MakewayError) as refused:
                call()
            assert refused.value.status == status, str(refused.value)
        seen = client.jobs().model_dump_json() + "".join(d.model_dump_json() for d in client.decisions())
        assert SECRET not in seen
        if who == CY:
            job = client.job(jobs["runs"])
            assert (job.owner, job.private, job.command, job.source) == (ANA, True, [], "")
    page = people[who].browser.get(f"{SERVICE}/jobs/{jobs['runs']}")
    assert SECRET not in page.text
    for path in (f"/users/{ANA}", f"/users/{ANA}/tokens"):
        answer = httpx2.get(f"{portal.url}/hub/api{path}", headers=people[who].headers)
        assert answer.status_code in (403, 404)
    with portal.client(people[ANA].token) as client:
        assert SECRET.encode() in client.result(jobs["ended"])
        assert client.job(jobs["runs"]).state == "running", "no other user changed it"


@pytest.mark.covers("N02")
def test_a_login_without_an_account_or_with_a_wrong_password_is_refused(portal: Portal) -> None:
    for name, password in ((ANA, "wrong"), ("no-such-user", PASSWORD), ("root", PASSWORD), (f"{ANA}<b>", PASSWORD)):
        with httpx2.Client(base_url=portal.url, follow_redirects=True, timeout=60) as browser:
            browser.get("/hub/login")
            form = {"username": name, "password": password}
            answer = browser.post("/hub/login", params={"_xsrf": browser.cookies["_xsrf"]}, data=form)
        assert answer.status_code == 403
        assert "Invalid username or password" in answer.text
        assert "<b>" not in answer.text.replace("<body", "")
    names = {user["name"] for user in portal.hub("GET", "/users").json()}
    assert names == set(PEOPLE), "no other user was let in"


@pytest.mark.covers("N01", "F11")
def test_a_user_removed_from_a_group_loses_access_within_seconds(
    portal: Portal, people: dict[str, Person], jobs: dict[str, str]
) -> None:
    cy = people[CY]
    with portal.client(cy.token) as client:
        assert client.me().teams == ["rnd"]
        subprocess.run(["gpasswd", "--delete", CY, GROUPS["rnd"]], check=True, capture_output=True)
        until(lambda: client.me().teams == [], "cy is in no team", 60)
        with pytest.raises(MakewayError, match="team"):
            client.submit(JobRequest(name="late", team="rnd", profile="gpu1", command=["true"]))
        assert client.jobs().jobs == []
        with pytest.raises(MakewayError):
            client.job(jobs["runs"])
    assert 'value="rnd/gpu1"' not in cy.browser.get("/hub/spawn").text
    answer = portal.pick(cy.browser, choice="rnd/gpu1")
    assert answer.status_code == 403
    assert f"The profile gpu1 is not available to {CY}: you are in no team" in answer.text
    assert not portal.server(CY)
    subprocess.run(["userdel", "--force", "--remove", CY], check=True, capture_output=True)
    until(lambda: refused(portal, cy.token), "cy has no account any more", 60)
    assert "/hub/login" in str(cy.browser.get("/hub/home").url)


def refused(portal: Portal, token: str) -> bool:
    with portal.client(token) as client:
        try:
            client.me()
        except MakewayError as error:
            return error.status in (401, 403)
    return False
