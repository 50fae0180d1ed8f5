"""The whole life of credentials: no byte that is stored, logged, served or of a process has a value of one."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote, quote_plus

import httpx2
import pytest
from makeway_api.errors import MakewayError
from makeway_quota import application
from makeway_quota.autoscale.deployment import Deployment
from makeway_quota.autoscale.provider import Provider
from makeway_quota.autoscale.providers.choice import provider_of
from makeway_quota.autoscale.providers.local import LocalFaults
from makeway_quota.services import Caller
from makeway_quota.web import api, pages
from running import PEOPLE, READ, python
from service.test_credentials import private_repository
from service.test_deployments_of_machines import DOCUMENT, Site, site

pytestmark = pytest.mark.slow

LEAD = Caller("lead", groups=frozenset({"rnd"}), scopes=READ | {"custom:makeway:manage!group=rnd"})
JOB = """
import os, subprocess, sys, time
print(sorted(os.environ.items()), open("/proc/self/environ").read(), open("/proc/self/cmdline").read(), flush=True)
subprocess.run(["git", "clone", "-q", os.environ["REPOSITORY"], "copy"], check=True)
print(open("copy/file").read(), subprocess.run(["git", "-C", "copy", "config", "--list"], capture_output=True).stdout)
print("storage has", len(open(os.environ["MAKEWAY_CREDENTIALS"] + "/storage").read()), flush=True)
while not os.path.exists(os.environ["UNTIL"]):
    time.sleep(.05)
if "FAILS" in os.environ:
    raise RuntimeError(f"fails with {sorted(os.environ)}")
"""
BROKEN = DOCUMENT.replace('"echo hello"', '"env; cat /proc/self/environ /proc/$PPID/environ; exit 3"')

UNREAD = {
    "api/v1/sessions/s-none",
    "api/v1/jobs/ID/result",
    "api/v1/jobs/ID/error",
    "api/v1/offers/live",
    f"api/v1/attempts/ID/1/0/files/{'0' * 64}",
}
"""Routes that answer nothing here: there is no notebook, no result as an object, no spawner's ticket, no large file"""
WITHOUT_MACHINE = {"nodes/ID", "live/nodes/ID", "api/v1/agents/ID/orders", "api/v1/attempts/ID/1/0/orders"}


def forms(secret: str) -> set[bytes]:
    """Return the bytes by which a secret can be recognized: plain, escaped, in hexadecimal, and in base64 anywhere."""
    plain = secret.encode()
    texts = {quote(secret, safe=""), quote(secret), quote_plus(secret), json.dumps(secret)[1:-1], plain.hex()}
    result = {plain, plain.hex().upper().encode(), repr(secret)[1:-1].encode()} | {text.encode() for text in texts}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            encoded = encode(b"\0" * before + plain).rstrip(b"=")
            result.add(encoded[-(-before * 8 // 6) : (before + len(plain)) * 8 // 6])
    return result


def test_a_secret_is_recognized_in_each_of_its_forms() -> None:
    secret = 'a/b+c=d&e "f"-0123456789'
    known = forms(secret)
    for before in ("", "x", "deploy:", "ab"):
        whole = f"{before}{secret}, and more"
        for text in (whole, quote(whole), quote_plus(whole), json.dumps({"k": whole}), whole.encode().hex()):
            assert any(one in text.encode() for one in known), text
        for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b16encode):
            assert any(one in encode(whole.encode()) for one in known), encode
    assert not any(one in b"a/b+c=d&e, and more" for one in known)


@dataclass
class Search:
    """The secrets of a story, and the places where one of their forms was."""

    secrets: dict[str, str] = field(default_factory=dict)
    known: dict[bytes, str] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    searched: int = 0

    def new(self, name: str, text: str) -> str:
        """Return a text as a secret, which is looked for from now on."""
        self.secrets[name] = text
        self.known |= dict.fromkeys(forms(text), name)
        return text

    def look(self, place: str, content: bytes | str) -> None:
        """Note which secrets are in a content."""
        content = content.encode(errors="replace") if isinstance(content, str) else content
        self.searched += 1
        self.places |= {f"{name} in {place}" for form, name in self.known.items() if form in content}

    def files(self, folder: Path) -> None:
        """Search each file below a folder, but those that jobs read, which only their account may open."""
        for file in folder.rglob("*"):
            with suppress(FileNotFoundError):
                if file.is_symlink() or not file.is_file():
                    continue
                if file.parent.name == "credentials" or file.name == "credentials.key":
                    assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
                    continue
                self.look(str(file.relative_to(folder)), file.read_bytes())

    def processes(self) -> list[bytes]:
        """Search the arguments and the environment of each process; return the environments of jobs."""
        result = []
        for folder in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                with suppress(OSError):
                    content = (folder / name).read_bytes()
                    self.look(f"{name} of a process", content)
                    if name == "environ" and b"MAKEWAY_CREDENTIALS=" in content:
                        result.append(content)
        return result


@dataclass
class Addresses:
    """What fills the parameters of routes."""

    jobs: list[str]
    machines: list[str]
    node: str
    worker: str

    def of(self, path: str) -> Iterator[str]:
        """Yield the addresses of a route; AssertionError where a parameter is of no known kind."""
        if path.startswith("api/v1/attempts/"):
            yield self.worker + path.partition("{worker}")[2].replace("{digest}", "0" * 64)
            return
        path = path.replace("{n}", "1").replace("{team}", "rnd").replace("{machine}", self.machines[0])
        path = path.replace("deployments/{name}", "deployments/demo").replace("nodes/{name}", f"nodes/{self.node}")
        ids = self.machines if "machines/{id}" in path else self.jobs if "jobs/{id}" in path else ["s-none"]
        for id in ids if "{id}" in path else [""]:
            address = path.replace("{id}", id)
            assert "{" not in address, f"{path}: say here what fills its parameters"
            yield address


def every_path() -> Iterator[tuple[str, bool]]:
    """Yield each path of the service that is read, below its prefix, and whether it is of a page."""
    for below, routers in (("api/v1", api.ROUTERS), ("", pages.ROUTERS)):
        for route in (route for router in routers for route in router.routes):
            if "GET" in route.methods:
                yield f"{below}{route.path}".lstrip("/"), not below
    yield from ((path, False) for path in ("healthz", "readyz", "metrics", "api/v1/openapi.json"))


async def read_all(
    address: str, search: Search, person: str, where: Addresses, tokens: Mapping[str, str]
) -> dict[str, int]:
    """Read everything as a person, and return the status of each address that was read."""
    result = {}
    async with httpx2.AsyncClient(base_url=address, timeout=30) as client:
        for path, is_page in every_path():
            for each in where.of(path):
                headers = {"Authorization": f"token {person}", "Accept": "text/html" if is_page else "*/*"}
                if path.startswith(("api/v1/attempts/", "api/v1/agents/{machine}")):
                    headers["Authorization"] = f"Bearer {tokens[path.split('/')[2]]}"
                params = {"after": "0"} if path.endswith("events") else {"ticket": "none"} if "live" in path else {}
                content = b""
                async with client.stream("GET", each, params=params, headers=headers) as answer:
                    result[each] = answer.status_code
                    with suppress(TimeoutError):
                        async with asyncio.timeout(1.0 if path.endswith("events") else 30):
                            async for chunk in answer.aiter_bytes():
                                content += chunk
                search.look(f"{each} for {person}", content + str(answer.headers).encode())
    return result


class Story:
    """A site with two generations of credentials, and the search for them."""

    def __init__(self, world: Site, search: Search, folder: Path, git: str, accepted: list[str]) -> None:
        self.world, self.search, self.folder, self.git, self.accepted = world, search, folder, git, accepted
        self.root, self.lead, self.ana = (world.run.client(name) for name in ("root", "lead", "ana"))
        self.jobs: list[str] = []
        self.nodes: list[str] = []

    async def set_all(self) -> dict[str, str]:
        """Set all credentials anew, those of the team by its lead; return what the provider logs in with then."""
        search, number = self.search, len(self.search.secrets)
        names = ("token", "all", "team", "key")
        token, of_all, of_team, key = (f'{name}/+={token_hex(8)} &%"{number}' for name in names)
        self.accepted[:] = [base64.b64encode(f"deploy:{token}".encode()).decode()]
        for name, value in (("token", token), ("of all", of_all), ("of the team", of_team), ("cloud", key)):
            search.new(f"{name} {number}", value)
        values = {"host": self.git, "user": "deploy", "token": token}
        answers = [
            await self.lead.credential_save("repositories", "git", values, team="rnd"),
            await self.root.credential_save("storage", "file", {"content": of_all}, team=""),
            await self.lead.credential_save("storage", "file", {"content": of_team}, team="rnd"),
            await self.root.credential_save("demo", "cloud", {"secret_access_key": key}),
        ]
        search.look("the answers", str(answers))
        return {"secret_access_key": key}

    async def job(self, **env: str) -> str:
        """Submit a job that uses all that its team has."""
        env |= {"REPOSITORY": f"{self.git}/private.git", "GIT_TERMINAL_PROMPT": "0"}
        job = await self.world.run.submit("ana", "uses", python(JOB), profile="gpu2", env=env)
        self.jobs.append(job.id)
        return job.id

    async def log(self, job: str) -> str:
        return str((await self.ana.logs(job, offset=0, limit=2**20)).text)

    async def until_log(self, job: str, words: str) -> None:
        async def there() -> bool:
            return words in await self.log(job)

        await self.world.run.until(there, f"{job} writes {words}", 60)
        self.nodes += self.world.nodes_of(job)

    async def refuse(self, secret: str) -> None:
        """Send values in requests that are refused, in each place that has one."""
        host = "https://git.example.org"
        for name, kind, values in (
            ("a", "git", {"host": f"{host}/{secret}", "user": "u", "token": secret}),
            ("a", "file", {"contents": secret}),
            ("a", secret[:30], {"content": secret}),
            ("storage", "cloud", {"content": secret}),
            ("git-credentials", "file", {"content": secret}),
            ("a", "file", {"content": secret + "x" * 70_000}),
        ):
            with pytest.raises(MakewayError) as refused:
                await self.root.credential_save(name, kind, values, team="rnd")
            self.search.look(f"the refusal of {name} {kind[:4]}", str(vars(refused.value)))
        with pytest.raises(MakewayError) as refused:
            await self.ana.credential_save("storage", "file", {"content": secret}, team="rnd")
        self.search.look("the refusal of a member", str(vars(refused.value)))

    async def read(self) -> None:
        """Read everything as an administrator, a lead and a user, and look into all files and processes."""
        channel, job = self.world.run.service.components.channel, self.jobs[-1]
        worker, token = channel.credentials(job, 1, 0)
        machines = [one.id for one in (await self.root.deployment_machines("demo")).machines]
        where = Addresses(self.jobs, machines, self.nodes[-1], worker)
        machine = self.world.store.machines.live()[:1]
        tokens = {"attempts": token, "agents": "none"}
        if machine:
            where.machines.sort(key=lambda id: id != machine[0].id)
            tokens["agents"] = self.world.run.service.components.machines.tokens.token(machine[0].id, machine[0].boot)
        for person in ("root", "lead", "ana"):
            statuses = await read_all(self.world.address, self.search, person, where, tokens)
            if person == "root":
                refused = {address for address, status in statuses.items() if status != 200}
                refused = {re.sub("|".join((*self.jobs, *machines)), "ID", address) for address in refused}
                assert refused <= (UNREAD if machine else UNREAD | WITHOUT_MACHINE)
                assert len(statuses) - len(refused) > 45
        self.search.files(self.folder)
        self.search.processes()


@asynccontextmanager
async def story(folder: Path, monkeypatch: pytest.MonkeyPatch, search: Search) -> AsyncIterator[Story]:
    """Start a site whose deployment logs in to its cloud as in the service, and a Git server behind a token."""
    monkeypatch.setitem(PEOPLE, "lead", LEAD)  # type: ignore[arg-type]
    accepted: list[str] = []
    with private_repository(folder / "git", accepted) as git:
        async with site(folder / "site", "") as world:
            service = world.run.service
            own = application.machine_loop(service.components, lambda: None)
            assert own is not None
            assert service.machine_loop is not None
            service.machine_loop._make_provider = own._make_provider
            yield Story(world, search, folder / "site", git, accepted)


@pytest.mark.covers("F73", "F76", "F77")
async def test_no_byte_that_is_stored_shown_logged_or_of_a_process_has_a_credential(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    used: list[dict[str, str]] = []

    def recorded(deployment: Deployment, *rest: Any) -> Provider:
        used.append(dict(rest[-1]))
        return provider_of(deployment, *rest)

    monkeypatch.setattr(application, "provider_of", recorded)
    for name in ("makeway", "makeway_quota", "uvicorn", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    search = Search()
    async with story(tmp_path, monkeypatch, search) as told:
        world, root = told.world, told.root
        key = await told.set_all()
        await root.deployment_save(DOCUMENT)
        await world.run.until(lambda: key in used, "the provider logs in with the first key")
        first = await told.job(UNTIL=str(tmp_path / "first"))
        await told.until_log(first, "storage has")
        environments = search.processes()
        assert any(str(tmp_path).encode() in one for one in environments), "the job that runs was looked into"
        await told.read()
        sealed = (tmp_path / "site" / "state" / "credentials.key").read_text().split()[0]
        search.new("the key of the file", sealed)

        key = await told.set_all()
        await world.run.until(lambda: used[-1] == key, "the provider logs in with the second key")
        (tmp_path / "first").touch()
        assert (await world.run.job(first, "succeeded", "failed")).state.value == "succeeded", await told.log(first)
        second = await told.job(UNTIL=str(tmp_path / "first"), FAILS="1")
        assert (await world.run.job(second, "succeeded", "failed")).state.value == "failed"
        assert "RuntimeError: fails with" in (log := await told.log(second))
        assert "storage has" in log, "the second token opens the repository, too"
        told.nodes += world.nodes_of(second)

        await told.refuse(search.new("what is refused", f"refused/+={token_hex(8)} &%"))
        await root.deployment_save(BROKEN)
        await world.run.until(lambda: not world.machines, "the machine idled")
        third = await told.job(UNTIL=str(tmp_path / "first"))
        await world.run.until(lambda: _failed(world), "the init script fails")
        await told.ana.cancel(third)
        world.cloud.set_faults(LocalFaults(boot_seconds=0.5, denied=True))
        await world.run.until(lambda: _problem(root), "the cloud refuses the credential")
        search.look("exports", str([await root.deployment_duplicate("demo"), await root.deployment("demo")]))
        await told.read()
        world.cloud.set_faults(LocalFaults(boot_seconds=0.5))
        await told.lead.credential_delete("repositories", "rnd")
        await root.credentials_reseal()
        await root.deployment_delete("demo")
        await world.run.until(lambda: not world.machines, "all machines have ended")
        search.files(tmp_path / "site")
    search.files(tmp_path / "site")
    search.look("what was logged", caplog.text)
    search.look("what was printed", "".join(capfd.readouterr()))
    assert search.searched > 500
    assert search.places == set()


async def _problem(root: Any) -> bool:
    step = (await root.deployment("demo")).step
    return step is not None and bool(step.problem)


def _failed(world: Site) -> bool:
    return any((one.state, one.reason) == ("gone", "init_failed") for one in world.store.machine_log.events())
