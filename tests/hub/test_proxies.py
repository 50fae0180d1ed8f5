"""The operator's proxy variables: no request of the portal to itself reaches the proxy; users' processes get them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from aiohttp import web
from hub.portal import Portal, until
from kubernetes_asyncio.client import Configuration
from makeway_api.client import AsyncClient, Client
from makeway_api.errors import MakewayError
from makeway_api.models import JobRequest
from makeway_api.proxies import USERS_VARIABLES, without_proxy
from makeway_hub.configure import configure
from makeway_hub.embedded import answers
from makeway_hub.settings import read
from makeway_quota.backends.local.users import this_account
from makeway_quota.control.hub.client import HubApi, HubUnreachable
from makeway_spawner.local import MakewayLocalSpawner
from makeway_spawner.service import client_for
from recording_proxy import SPELLINGS, RecordingProxy
from traitlets.config import Config

ELSEWHERE = "http://portal.test:8000"
"""An address that only a proxy could know."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RecordingProxy]:
    with RecordingProxy() as proxy:
        for name, value in proxy.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield proxy


def test_the_proxy_records_what_does_not_avoid_it(proxy: RecordingProxy) -> None:
    assert httpx2.get(ELSEWHERE).status_code == 403
    assert len(proxy.got) == 1


def test_an_answer_of_the_proxy_is_not_taken_for_the_portal(proxy: RecordingProxy) -> None:
    assert not answers(f"{ELSEWHERE}/hub/health")
    assert not answers(f"{proxy.url}/hub/health"), "a 403 is never the portal's answer"
    assert len(proxy.got) == 1, "only the request to itself"


def test_the_token_of_a_notebook_is_never_sent_in_clear_to_the_proxy(proxy: RecordingProxy) -> None:
    with Client(ELSEWHERE, "secret") as client, pytest.raises(MakewayError, match="does not answer"):
        client.me()
    assert proxy.got == []


async def test_the_token_of_the_spawner_never_reaches_the_proxy(proxy: RecordingProxy) -> None:
    for url in (ELSEWHERE, "https://portal.test:8443"):
        with pytest.raises(MakewayError, match="does not answer"):
            await client_for(url, "secret").offers(user="ana")
        await client_for(url, "secret").close()
    async with AsyncClient(ELSEWHERE, "secret") as client:
        with pytest.raises(MakewayError, match="does not answer"):
            await client.me()
    assert proxy.got == []


async def test_a_client_outside_of_the_portal_reaches_it_by_tls_through_the_proxy(proxy: RecordingProxy) -> None:
    with Client("https://portal.test", "secret") as client, pytest.raises(MakewayError):
        client.me()
    assert [line for line in proxy.got if line.startswith("CONNECT portal.test:443")] == proxy.got != []
    assert "secret" not in "".join(proxy.got)


@pytest.mark.parametrize("value", ["socks5://127.0.0.1:1", "carrier-pigeon://x", "127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in SPELLINGS:
        monkeypatch.setenv(name, value)
    with pytest.raises(MakewayError, match="HTTPS_PROXY"):
        Client("https://portal.test", "secret")
    Client("http://portal.test", "secret").close()


async def test_the_service_reaches_the_hub_without_the_proxy(proxy: RecordingProxy) -> None:
    for url in (ELSEWHERE, "https://portal.test:8443"):
        hub = HubApi(f"{url}/hub/api", "secret")
        with pytest.raises(HubUnreachable):
            await hub.user("ana")
        await hub.close()
    assert proxy.got == []


async def test_the_hub_reaches_kubernetes_without_the_proxy_and_without_the_operators_password(
    proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from makeway_spawner.pod_spawner import direct_api

    sent: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Authorization", ""))
        return web.json_response({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    configuration = Configuration(host=f"http://127.0.0.1:{port}", api_key={"BearerToken": "Bearer of-the-hub"})
    monkeypatch.setattr(Configuration, "_default", configuration)
    from kubernetes_asyncio.client import CoreV1Api

    api = CoreV1Api()
    direct_api(api)
    assert (await api.read_namespaced_pod("p", "n")).metadata.name == "p"
    await api.api_client.close()
    await runner.cleanup()
    assert sent == ["Bearer of-the-hub"]
    assert proxy.got == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"HTTPS_PROXY": "http://p"}, {"127.0.0.1", "localhost", "::1", "hub"}),
        ({"all_proxy": "socks5://p", "NO_PROXY": "a.test, b.test"}, {"a.test", "b.test", "127.0.0.1", "hub"}),
        ({"http_proxy": "p", "no_proxy": "a.test", "NO_PROXY": "b.test"}, {"a.test", "b.test", "localhost", "hub"}),
        ({"HTTP_PROXY": "p", "NO_PROXY": "*"}, {"*"}),
        ({"HTTP_PROXY": "", "NO_PROXY": ""}, {}),
    ],
)
def test_internal_hosts_are_added_to_what_avoids_the_proxy(before: dict[str, str], after: set[str]) -> None:
    result = without_proxy(before, ["hub"])
    if not after:
        assert result == {}
    else:
        assert set(result) == {"NO_PROXY", "no_proxy"}, "programs read either"
        assert all(after <= set(value.split(",")) for value in result.values())
        assert result["NO_PROXY"] == result["no_proxy"]
        assert without_proxy(before | result, ["hub"]) == result, "once is enough"


def test_users_processes_get_what_the_documentation_says_and_nothing_else(
    proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leaks = {
        **dict.fromkeys(("LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT"), "/x"),
        **dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "CONFIGPROXY_AUTH_TOKEN", "OAUTH_CLIENT_SECRET", "PGPASSWORD"), "x"),
        **dict.fromkeys(("NODE_OPTIONS", "BASH_ENV", "ENV", "GIT_ASKPASS", "SSH_AUTH_SOCK", "KUBECONFIG"), "x"),
    }
    given = {**dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "LD_LIBRARY_PATH", "TZ", "LC_TIME"), "/y")}
    for name, value in (leaks | given).items():
        monkeypatch.setenv(name, value)
    c = Config()
    before = dict(os.environ)
    try:
        configure(c, read({"MAKEWAY_STATE_DIR": str(tmp_path / "var")}))
        spawner = MakewayLocalSpawner()
        notebook = {name: os.environ[name] for name in spawner.env_keep if name in os.environ}
        job = this_account().environment(sys.executable)
    finally:
        os.environ.clear()
        os.environ.update(before)
    for env in (notebook, job):
        assert not leaks.keys() & env.keys()
        assert "NETRC" not in env
        assert given.items() <= env.items() or env is notebook
        assert dict.fromkeys(SPELLINGS, proxy.url).items() <= env.items()
        assert {"127.0.0.1", "localhost"} <= set(env["NO_PROXY"].split(","))
        assert env["NO_PROXY"] == env["no_proxy"]
    assert set(notebook) <= {*USERS_VARIABLES, "LC_TIME", "JUPYTERHUB_SINGLEUSER_APP"}


def environment_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


@pytest.mark.e2e
@pytest.mark.covers("N22")
def test_a_portal_started_behind_a_proxy_works_and_tells_the_proxy_nothing(tmp_path: Path) -> None:
    with RecordingProxy() as proxy:
        portal = Portal(tmp_path, **proxy.environment(tmp_path))
        for name in ("NO_PROXY", "no_proxy"):
            portal.env.pop(name, None)
        try:
            portal.start()
            page = portal.pick(portal.browser("ana"), choice="rnd/gpu1")
            assert page.is_success, page.text
            until(lambda: (portal.server("ana") or {}).get("ready"), "ana's server is ready")
            pid = portal.hub("GET", "/users/ana").json()["servers"][""]["state"]["pid"]
            notebook = environment_of(pid)
            assert notebook["HTTPS_PROXY"] == notebook["http_proxy"] == proxy.url
            assert "127.0.0.1" in notebook["no_proxy"].split(",")
            ask = "from makeway_api.client import Client; print(Client().me().name)"
            answer = subprocess.run(
                [sys.executable, "-c", ask], env=notebook, capture_output=True, text=True, timeout=60, check=False
            )
            assert answer.stdout.strip() == "ana", answer.stderr
            with portal.client(portal.user_token("ana")) as client:
                job = client.submit(JobRequest(name="env", command=["env"], profile="gpu1", team="rnd"))
            log = until(lambda: portal_log(portal, job.id), "the job printed its environment")
            assert f"HTTPS_PROXY={proxy.url}" in log
            assert f"http_proxy={proxy.url}" in log
            assert "of-the-operator" not in log
            assert "NETRC" not in log
        finally:
            portal.stop()
        assert proxy.got == []


def portal_log(portal: Portal, job: str) -> str:
    logs = list((portal.state.root / "jobs" / job).glob("attempt-*/log"))
    text = logs[0].read_text() if logs else ""
    return text if "MAKEWAY_JOB_ID" in text else ""
