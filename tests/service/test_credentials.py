"""Credentials of jobs: sealed in the database, given to jobs of their team as files, and shown nowhere."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from makeway.cli import main
from makeway_api.errors import MakewayError
from makeway_quota import application
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.provider import Provider
from makeway_quota.autoscale.providers.choice import provider_of
from makeway_quota.services import Caller
from running import PEOPLE, READ, python
from service.test_machines import fleet

pytestmark = pytest.mark.slow

TOKEN = "hunter2-of-the-git-server"
STORAGE = "hunter3-of-the-storage"
SECRETS = (TOKEN, STORAGE, base64.b64encode(f"deploy:{TOKEN}".encode()).decode())
CLONES = """
import os, subprocess
print(sorted(os.environ.items()))
subprocess.run(["git", "clone", "-q", os.environ["REPOSITORY"], "copy"], check=True)
print(open("copy/file").read(), flush=True)
print(subprocess.run(["git", "-C", "copy", "remote", "-v"], capture_output=True, text=True).stdout)
"""
READS = """
import os, stat
folder = os.environ.get("MAKEWAY_CREDENTIALS", "")
for name in sorted(os.listdir(folder)) if folder else ["nothing"]:
    path = os.path.join(folder, name)
    print(name, oct(os.stat(path).st_mode & 0o777) if folder else "", len(open(path).read()) if folder else 0)
"""


class _Git(BaseHTTPRequestHandler):
    """Git's own server behind Basic authentication."""

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        if self.headers.get("Authorization") not in [f"Basic {one}" for one in self.server.accepted]:  # type: ignore[attr-defined]
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        env = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.root),  # type: ignore[attr-defined]
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def private_repository(folder: Path, accepted: Sequence[str] = SECRETS[2:]) -> Iterator[str]:
    """Serve a repository that only these credentials of HTTP open; yield the address of the server."""
    work = folder / "work"
    for words in (
        ["init", "-q", str(work)],
        ["-C", str(work), "add", "file"],
        ["-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"],
        ["clone", "-q", "--bare", str(work), str(folder / "private.git")],
    ):
        subprocess.run(["git", *words], check=True)
        (work / "file").write_text("content of the private repository")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Git) as server:
        server.root, server.accepted = folder, accepted  # type: ignore[attr-defined]
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def shown(folder: Path, *texts: object) -> list[str]:
    """Return where a secret can be read: in files below a folder, and in texts."""
    result = [f"text {number}" for number, text in enumerate(texts) if any(one in str(text) for one in SECRETS)]
    for file in folder.rglob("*"):
        if file.is_file() and any(one.encode() in file.read_bytes() for one in SECRETS):
            result.append(str(file))
    return result


@pytest.mark.covers("F76")
async def test_a_job_clones_a_private_repository_and_its_token_is_shown_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with private_repository(tmp_path / "git") as address:
        async with fleet(tmp_path / "site") as service:
            root = service.run.client("root")
            values = {"host": address, "user": "deploy", "token": TOKEN}
            saved = await root.credential_save("repositories", "git", values)
            agent = await service.machine("m-1")
            env = {"REPOSITORY": f"{address}/private.git", "GIT_TERMINAL_PROMPT": "0"}
            job = await service.run.submit("ana", "clones", python(CLONES), profile="gpu1", env=env)
            done = await service.run.job(job.id, "succeeded", "failed")
            log = await service.log(job.id)
            assert done.state.value == "succeeded", log
            assert "content of the private repository" in log
            assert "MAKEWAY_CREDENTIALS" in log
            await service.run.until(lambda: not agent.launchers, "the launcher has ended")
            answers = [await root.credentials(), await root.decisions(), done, saved, log]
            other = [agent.orders, await root.policy(), Path("/proc/self/environ").read_bytes()]
            assert shown(tmp_path / "site", *answers, *other, *capfd.readouterr()) == []
        assert shown(tmp_path / "site", *capfd.readouterr()) == []


@pytest.mark.covers("F77")
async def test_a_file_goes_to_jobs_of_its_team_alone_and_is_gone_with_the_attempt(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        root = service.run.client("root")
        await root.credential_save("storage", "file", {"content": STORAGE}, team="rnd")
        await service.machine("m-1")

        async def log_of(person: str) -> str:
            job = await service.run.submit(person, "reads", python(READS), profile="gpu1")
            await service.run.job(job.id, "succeeded", "failed")
            return await service.log(job.id)

        assert await log_of("ana") == f"storage 0o600 {len(STORAGE)}\n"
        assert await log_of("bo") == "nothing  0\n"
        await root.credential_save("storage", "file", {"content": "new"}, team="rnd")
        assert await log_of("ana") == "storage 0o600 3\n"
        assert not [path for path in tmp_path.rglob("storage") if path.is_file()]
        await root.credential_delete("storage")
        assert await log_of("ana") == "nothing  0\n"
        with pytest.raises(MakewayError, match="no credential storage"):
            await root.credential_delete("storage")


@pytest.mark.covers("F77")
async def test_two_teams_have_a_credential_of_one_name_and_each_gets_its_own_before_that_of_all(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        root = service.run.client("root")
        await root.credential_save("storage", "file", {"content": STORAGE}, team="rnd")
        with pytest.raises(MakewayError, match="a credential storage of rnd: name the team") as refused:
            await root.credential_save("storage", "file", {"content": "of all teams"})
        assert refused.value.status == 409
        await root.credential_save("storage", "file", {"content": "of all teams"}, team="")
        await service.machine("m-1")

        async def log_of(person: str) -> str:
            job = await service.run.submit(person, "reads", python(READS), profile="gpu1")
            await service.run.job(job.id, "succeeded", "failed")
            return await service.log(job.id)

        assert await log_of("ana") == f"storage 0o600 {len(STORAGE)}\n"
        assert await log_of("bo") == f"storage 0o600 {len('of all teams')}\n"
        await root.credential_save("storage", "file", {"content": "ok"}, team="devops")
        assert await log_of("bo") == "storage 0o600 2\n"
        assert await log_of("ana") == f"storage 0o600 {len(STORAGE)}\n"
        with pytest.raises(MakewayError, match="storage of all teams, devops and rnd each: name the team") as refused:
            await root.credential_delete("storage")
        assert refused.value.status == 409
        await root.credential_delete("storage", "devops")
        await root.credential_delete("storage", "rnd")
        await root.credential_delete("storage")
        assert await root.credentials() == []


async def test_a_lead_sees_and_changes_the_credentials_of_its_teams_and_learns_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manages = "custom:makeway:manage!group=rnd"
    lead = Caller("lead", groups=frozenset({"rnd"}), scopes=READ | {manages})
    monkeypatch.setitem(PEOPLE, "lead", lead)  # type: ignore[arg-type]
    async with fleet(tmp_path) as service:
        root, boss, ana, bo = (service.run.client(name) for name in ("root", "lead", "ana", "bo"))
        for name, team in (("gitlab", "devops"), ("only-devops", "devops"), ("site", "")):
            await root.credential_save(name, "file", {"content": STORAGE}, team=team)
        await root.credential_save("fleet-1", "cloud", {"access_key_id": "AKIA"})
        await boss.credential_save("gitlab", "file", {"content": "first"}, team="rnd")
        await boss.credential_save("gitlab", "file", {"content": "second"}, team="rnd")
        credentials = service.run.service.services.credentials
        assert (await credentials.files("rnd"))["gitlab"] == "second"
        assert (await credentials.files("devops"))["gitlab"] == STORAGE
        for person, expected in ((boss, ["gitlab"]), (ana, ["gitlab"]), (bo, ["gitlab", "only-devops"])):
            assert [one.name for one in await person.credentials()] == expected
            assert len({one.team for one in await person.credentials()}) == 1
        assert len(await root.credentials()) == 5

        for name in ("gitlab", "only-devops", "nowhere"):  # the same words, whether there is one or not
            for team, words in (("devops", "You do not lead the team devops"), ("", "name a team that you lead")):
                for call in (
                    boss.credential_save(name, "file", {"content": "x"}, team=team),
                    boss.credential_delete(name, team),
                ):
                    with pytest.raises(MakewayError, match=words) as refused:
                        await call
                    assert refused.value.status == 403
        with pytest.raises(MakewayError, match="name a team that you lead"):
            await boss.credential_save("gitlab", "file", {"content": "x"})
        for name in ("only-devops", "site", "fleet-1", "nowhere"):
            with pytest.raises(MakewayError, match=f"There is no credential {name}.$") as refused:
                await boss.credential_delete(name)
            assert refused.value.status == 404
        with pytest.raises(MakewayError, match="An administrator of the Hub grants it"):
            await ana.credential_save("gitlab", "file", {"content": "x"}, team="rnd")
        with pytest.raises(MakewayError, match="An administrator of the Hub grants it"):
            await ana.credential_delete("gitlab", "rnd")

        told = [line.message for line in await boss.decisions() if line.verb == "credential"]
        assert told == ["lead set the credential gitlab (file) of rnd."] * 2
        assert [line.message for line in await ana.decisions() if line.verb == "credential"] == told
        assert not [one for one in await ana.decisions() if "devops" in str(one)]
        await boss.credential_delete("gitlab")
        assert "gitlab" not in await credentials.files("rnd")
        assert (await credentials.files("devops"))["gitlab"] == STORAGE


async def test_keys_are_replaced_without_a_restart(tmp_path: Path) -> None:
    key = tmp_path / "keys"
    key.write_bytes(Fernet.generate_key() + b"\n")
    async with fleet(tmp_path / "site", MAKEWAY_CREDENTIALS_KEY_FILE=str(key)) as service:
        root, credentials = service.run.client("root"), service.run.service.services.credentials
        await root.credential_save("storage", "file", {"content": STORAGE})
        old, new = key.read_bytes(), Fernet.generate_key() + b"\n"
        key.write_bytes(new + old)
        assert await credentials.files("rnd") == {"storage": STORAGE}
        assert (await root.credentials_reseal()).credentials == 1
        told = "root sealed 1 credential anew with the first key of the service."
        assert next(line.message for line in await root.decisions() if line.verb == "credential") == told
        key.write_bytes(new)
        assert await credentials.files("rnd") == {"storage": STORAGE}
        key.write_bytes(old)
        with pytest.raises(MakewayError, match="No key of the file opens the credential storage"):
            await credentials.files("rnd")
        key.unlink()
        with pytest.raises(MakewayError, match="cannot be read from"):
            await root.credential_save("storage", "file", {"content": STORAGE})
        assert shown(tmp_path) == []


DEPLOYMENT = """
name: fleet-1
provider: local
machine_types: [{name: small, pool: cloud, instance: small, gpus: 2, price: 1, max_machines: 1}]
"""


@pytest.mark.covers("F73")
async def test_a_provider_logs_in_with_the_credential_of_its_deployment_which_is_replaced_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    used: list[tuple[str, dict[str, str]]] = []

    def recorded(deployment: Deployment, *rest: Any) -> Provider:
        used.append((deployment.name, dict(rest[-1])))
        return provider_of(deployment, *rest)

    monkeypatch.setattr(application, "provider_of", recorded)
    async with fleet(tmp_path) as service:
        root = service.run.client("root")
        first = {"access_key_id": "AKIA", "secret_access_key": TOKEN}
        saved = await root.credential_save("fleet-1", "cloud", first)
        await root.credential_save("other", "cloud", {"secret_access_key": "of another one"})
        await root.deployment_save(DEPLOYMENT)
        await service.run.until(lambda: ("fleet-1", first) in used, "the provider is made")
        second = {"access_key_id": "AKIB", "secret_access_key": STORAGE}
        await root.credential_save("fleet-1", "cloud", second)
        await service.run.until(lambda: ("fleet-1", second) in used, "the provider is made anew")
        assert {name for name, _ in used} == {"fleet-1"}
        assert await service.run.service.services.credentials.files("rnd") == {}
        await root.credential_delete("fleet-1")
        await service.run.until(lambda: used[-1] == ("fleet-1", {}), "the provider is made without it")
        answers = [saved, await root.credentials(), await root.deployment("fleet-1"), await root.deployments()]
        log = [await root.decisions(), await root.deployment_log("fleet-1"), Path("/proc/self/environ").read_bytes()]
        assert shown(tmp_path, *answers, *log, *capfd.readouterr()) == []
        with pytest.raises(MakewayError, match="of a deployment, not of a team"):
            await root.credential_save("fleet-1", "cloud", first, team="rnd")
        with pytest.raises(MakewayError, match="such as access_key_id"):
            await root.credential_save("fleet-1", "cloud", {})


async def test_refusals_name_what_is_wrong_and_repeat_no_value(tmp_path: Path) -> None:
    async with fleet(tmp_path) as service:
        root = service.run.client("root")
        host = "https://git.example.org"
        for name, kind, values, message in (
            ("a", "git", {"token": TOKEN}, "exactly host, token, user"),
            ("a", "git", {"host": f"{host}/{TOKEN}", "user": "u", "token": TOKEN}, "without a path"),
            ("a", "file", {"content": ""}, "exactly content"),
            ("a", "other", {"content": TOKEN}, "kind"),
            ("git-credentials", "file", {"content": TOKEN}, "of the kind git"),
            ("A", "file", {"content": TOKEN}, "name"),
        ):
            with pytest.raises(MakewayError, match=message) as refused:
                await root.credential_save(name, kind, values)
            assert shown(tmp_path, refused.value, vars(refused.value)) == []
        with pytest.raises(MakewayError, match="no team nowhere"):
            await root.credential_save("a", "file", {"content": TOKEN}, team="nowhere")
        for person in ("ana", "bo"):
            with pytest.raises(MakewayError) as refused:
                await service.run.client(person).credentials_reseal()
            assert refused.value.status == 403
        assert await root.credentials() == []


async def test_the_command_line_sets_lists_and_deletes_without_showing_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    (tmp_path / "value").write_text(TOKEN + "\n")
    async with fleet(tmp_path / "site") as service:
        monkeypatch.setenv("MAKEWAY_URL", f"{service.address}/services/makeway")
        monkeypatch.setenv("MAKEWAY_TOKEN", "root")

        async def run(*words: str) -> str:
            assert await asyncio.to_thread(main, ["autoscaler", "credentials", *words]) == 0
            return capsys.readouterr().out

        git = ["--kind", "git", "--host", "https://git.example.org", "--user", "deploy"]
        message = await run("set", "repositories", *git, "--file", str(tmp_path / "value"))
        assert message == "repositories is set: all jobs get it from their next attempt on.\n"
        message = await run("list")
        assert "repositories  git   all" in message
        key = {"type": "service_account", "private_key": f"-----BEGIN\n{TOKEN}\n", "client_x509_cert_url": "u"}
        (tmp_path / "key.json").write_text(json.dumps(key, indent=2))
        message += await run("set", "google", "--kind", "cloud", "--file", str(tmp_path / "key.json"))
        kept = service.run.service.services.credentials
        assert kept._context.store.secrets.cloud(kept._keys, "google") == key
        for text in ('{"private_key": {"nested": "value"}}', "{ not JSON"):
            (tmp_path / "key.json").write_text(text)
            command = [
                "autoscaler",
                "credentials",
                "set",
                "google",
                "--kind",
                "cloud",
                "--file",
                str(tmp_path / "key.json"),
            ]
            assert await asyncio.to_thread(main, command) == 1
            refused = capsys.readouterr().err
            assert "is a JSON object of texts" in refused
            assert "value" not in refused
        assert await run("delete", "google") == "google is deleted.\n"
        for team in ("rnd", "devops"):
            message += await run("set", "storage", "--team", team, "--file", str(tmp_path / "value"))
        for words in (["set", "storage", "--file", str(tmp_path / "value")], ["delete", "storage"]):
            assert await asyncio.to_thread(main, ["autoscaler", "credentials", *words]) == 1
            assert "of devops and rnd" in (refused := capsys.readouterr().err)
            assert "--all-teams" in refused
        message += await run("set", "storage", "--all-teams", "--file", str(tmp_path / "value"))
        message += await run("list")
        assert [line.split()[:3] for line in message.splitlines() if line.startswith("storage  ")] == [
            ["storage", "file", "all"],
            ["storage", "file", "devops"],
            ["storage", "file", "rnd"],
        ]
        for whose in (["--team", "rnd"], ["--all-teams"], []):
            assert await run("delete", "storage", *whose) == "storage is deleted.\n"
        message += await run("set", "storage", "--team", "rnd", "--file", str(tmp_path / "value"))
        service.run.service.components.store.secrets.disable_absent((), 1, "root", 1.0)
        message += (disabled := await run("list"))
        assert [line.split()[-1] for line in disabled.splitlines()[1:]] == ["enabled", "disabled"]
        told = await run("enable", "storage", "--team", "rnd")
        assert told == "storage is enabled: jobs of rnd get it from their next attempt on.\n"
        assert "disabled" not in await run("list")
        assert await run("delete", "storage", "--team", "rnd") == "storage is deleted.\n"
        assert await run("delete", "repositories") == "repositories is deleted.\n"
        assert await run("list") == "There are no credentials.\n"
        assert shown(tmp_path / "site", message) == []
