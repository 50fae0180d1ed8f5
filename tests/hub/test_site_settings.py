"""What a site sets before or after `configure(c)` is kept and merged, or refused in words before anything listens."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from jupyterhub.app import JupyterHub
from makeway_hub.address import Address
from makeway_hub.pages import TEMPLATES, WithPages
from makeway_hub.state_directory import StateDirectory, free_port
from makeway_spawner.local import MakewayLocalSpawner

BETWEEN = "from makeway_hub.configure import configure\nconfigure(c)\n"
READ = Callable[..., JupyterHub]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[READ]:
    """Have JupyterHub read a configuration with lines of the site before and after the call, as when it starts."""
    monkeypatch.chdir(tmp_path)

    def read(before: str = "", after: str = "", **env: str) -> JupyterHub:
        JupyterHub.clear_instance()
        for name, text in {"MAKEWAY_STATE_DIR": str(tmp_path / "var"), **env}.items():
            monkeypatch.setenv(name, text)
        (tmp_path / "hub.py").write_text(f"c = get_config()\n{before}\n{BETWEEN}{after}\n")
        app = JupyterHub.instance()
        app.load_config_file(str(tmp_path / "hub.py"))
        return app

    yield read
    JupyterHub.clear_instance()


def address(tmp_path: Path) -> Address | None:
    return Address.read(StateDirectory(tmp_path / "var").address_file)


def refusal(read: READ, tmp_path: Path, *lines: str, **env: str) -> str:
    with pytest.raises(SystemExit):
        read(*lines, **env)
    assert address(tmp_path) is None, "nothing listens"
    return StateDirectory(tmp_path / "var").problem_file.read_text()


BOTH = pytest.mark.parametrize("where", ["before", "after"])


@pytest.mark.covers("N22")
@BOTH
@pytest.mark.parametrize(
    ("lines", "bind_url", "base"),
    [
        ("", "http://127.0.0.1:8000/", "/"),
        ("c.JupyterHub.base_url = '/gpus/'", "http://127.0.0.1:8000/gpus/", "/gpus/"),
        ("c.JupyterHub.base_url = 'a/b'", "http://127.0.0.1:8000/a/b/", "/a/b/"),
        ("c.JupyterHub.port = 9123", "http://127.0.0.1:9123/", "/"),
        ("c.JupyterHub.ip = '127.0.0.2'", "http://127.0.0.2:8000/", "/"),
        ("c.JupyterHub.ip = '::1'", "http://[::1]:8000/", "/"),
        ("c.JupyterHub.bind_url = 'http://127.0.0.1:9123/gpus/'", "http://127.0.0.1:9123/gpus/", "/gpus/"),
        ("c.JupyterHub.bind_url = 'http://127.0.0.1:9123'", "http://127.0.0.1:9123/", "/"),
        (
            "c.JupyterHub.bind_url = 'http://127.0.0.1:9123/x'\nc.JupyterHub.base_url = '/gpus/'",
            "http://127.0.0.1:9123/gpus/",
            "/gpus/",
        ),
        ("c.JupyterHub.port = 9123\nc.JupyterHub.base_url = '/gpus/'", "http://127.0.0.1:9123/gpus/", "/gpus/"),
    ],
)
def test_a_site_chooses_port_address_and_prefix(
    read: READ, tmp_path: Path, where: str, lines: str, bind_url: str, base: str
) -> None:
    app = read(**{where: lines})
    assert (app.bind_url, app.base_url) == (bind_url, base)
    result = address(tmp_path)
    assert result is not None
    assert result.bind_url == bind_url, "`make run` waits for it there"
    spawner = app.config.MakewayLocalSpawner
    assert spawner.makeway_public_path == f"{base}services/makeway/"
    assert spawner.makeway_url == f"{bind_url}services/makeway"
    assert spawner.makeway_api_url.endswith(f"{base}services/makeway")
    assert app.template_vars["makeway_panel"] == f"{base}services/makeway/"
    service = next(one for one in app.services if one["name"] == "makeway")
    assert service["environment"]["MAKEWAY_URL"] == f"{bind_url}services/makeway"


@BOTH
def test_the_port_of_the_environment_counts_where_the_site_says_nothing(read: READ, where: str) -> None:
    app = read(**{where: "c.JupyterHub.base_url = '/x/'"}, PORT="8456")
    assert app.bind_url == "http://127.0.0.1:8456/x/"


@pytest.mark.covers("N22")
@BOTH
@pytest.mark.parametrize(
    "line",
    [
        "c.JupyterHub.ip = '0.0.0.0'",
        "c.JupyterHub.ip = ''",
        "c.JupyterHub.ip = '::'",
        "c.JupyterHub.ip = '192.0.2.7'",
        "c.JupyterHub.bind_url = 'http://:8000'",
        "c.JupyterHub.bind_url = 'http://0.0.0.0:8000/gpus/'",
        "c.JupyterHub.bind_url = 'http://portal.example:8000'",
    ],
)
def test_the_demo_never_opens_itself_to_the_network(read: READ, tmp_path: Path, where: str, line: str) -> None:
    lines = (line, "") if where == "before" else ("", line)
    assert "opens the demo to the network" in refusal(read, tmp_path, *lines)
    app = read(*lines, MAKEWAY_OPEN="1")
    assert "127.0.0.1" not in app.bind_url


@pytest.mark.parametrize(
    "line",
    [
        "c.JupyterHub.hub_ip = '0.0.0.0'",
        "c.JupyterHub.hub_ip = ''",
        "c.JupyterHub.hub_bind_url = 'http://:8081'",
        "c.JupyterHub.hub_connect_ip = '192.0.2.7'",
        "c.JupyterHub.hub_connect_url = 'http://hub.example:8081'",
        "c.JupyterHub.proxy_api_ip = '0.0.0.0'",
        "c.ConfigurableHTTPProxy.api_url = 'http://0.0.0.0:8001'",
        "c.Spawner.ip = '0.0.0.0'",
        "c.LocalProcessSpawner.ip = ''",
        "c.MakewayLocalSpawner.ip = '192.0.2.7'",
        "c.JupyterHub.bind_url = 'http+unix://%2Fsrv%2Fproxy.sock'",
        "c.JupyterHub.hub_bind_url = 'http+unix://%2Fsrv%2Fhub.sock'",
    ],
)
@BOTH
def test_no_inner_part_listens_for_others(read: READ, tmp_path: Path, where: str, line: str) -> None:
    message = refusal(read, tmp_path, *((line, "") if where == "before" else ("", line)))
    assert line.split(" ")[0] in message, "the trait is named"
    assert "127.0.0.1" in message


@BOTH
def test_an_inner_port_of_the_site_is_taken(read: READ, where: str) -> None:
    port = free_port()
    app = read(**{where: f"c.JupyterHub.hub_port = {port}"})
    assert app.hub_bind_url == f"http://127.0.0.1:{port}"
    app = read(**{where: f"c.JupyterHub.hub_bind_url = 'http://127.0.0.1:{port}'"})
    assert app.hub_bind_url == f"http://127.0.0.1:{port}"


@BOTH
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("c.JupyterHub.base_url = '/a b/'", "is no path that every part of the portal can serve"),
        ("c.JupyterHub.port = 70000", "from 1 to 65535"),
        ("c.JupyterHub.port = 0", "from 1 to 65535"),
        ("c.JupyterHub.bind_url = 'portal:80:80'", "use http://127.0.0.1:PORT/PREFIX/"),
        ("c.JupyterHub.internal_ssl = True", "internal_ssl is not supported"),
        ("c.ConfigurableHTTPProxy.should_start = False", "starts its own proxy"),
        ("c.JupyterHub.spawner_class = 'simple'", "SimpleLocalProcessSpawner cannot be used with Makeway"),
        ("c.Spawner.options_form = '<b>'", "would replace Makeway's spawn page"),
        ("c.Spawner.options_from_form = lambda form: {}", "would replace Makeway's spawn page"),
        ("c.Authenticator.manage_groups = True", "set c.Authenticator.manage_groups = False"),
        ("c.JupyterHub.ssl_key = '/nowhere/key.pem'", "ssl_key is set without ssl_cert"),
        ("c.JupyterHub.ssl_cert = '/nowhere/c.pem'\nc.JupyterHub.ssl_key = '/nowhere/k.pem'", "No such file"),
    ],
)
def test_what_cannot_work_is_refused_in_words(read: READ, tmp_path: Path, where: str, line: str, words: str) -> None:
    assert words in refusal(read, tmp_path, *((line, "") if where == "before" else ("", line)))


def test_a_taken_port_is_named_also_where_the_site_chose_it(read: READ, tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        line = f"c.JupyterHub.port = {other.getsockname()[1]}"
        message = refusal(read, tmp_path, "", line, MAKEWAY_LAUNCHED="1")
    assert f"is taken by {os.path.basename(os.readlink('/proc/self/exe'))[:4]}" in message


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and its own certificate for 127.0.0.1 and localhost; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "portal.example")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder / "key.pem", folder / "cert.pem"


@BOTH
def test_a_certificate_of_the_site_makes_the_portal_speak_tls(read: READ, tmp_path: Path, where: str) -> None:
    key, cert = certificate(tmp_path)
    app = read(**{where: f"c.JupyterHub.ssl_key = '{key}'\nc.JupyterHub.ssl_cert = '{cert}'"})
    assert app.bind_url == "https://127.0.0.1:8000/"
    result = address(tmp_path)
    assert result is not None
    assert result.loopback_url == "https://127.0.0.1:8000"
    inside = app.config.MakewayLocalSpawner.makeway_url
    assert inside == app.config.MakewayLocalSpawner.makeway_api_url, "no notebook has to trust the certificate"
    assert inside.startswith("http://127.0.0.1:")


def test_system_mode_opens_itself_with_a_certificate_only(read: READ, tmp_path: Path) -> None:
    line = "c.JupyterHub.ip = '0.0.0.0'"
    assert "passwords cross the network in clear" in refusal(read, tmp_path, "", line, MAKEWAY_MODE="system")
    key, cert = certificate(tmp_path)
    tls = f"{line}\nc.JupyterHub.ssl_key = '{key}'\nc.JupyterHub.ssl_cert = '{cert}'"
    assert read("", tls, MAKEWAY_MODE="system").bind_url == "https://0.0.0.0:8000/"


def test_a_public_address_of_the_site_is_what_people_read(read: READ, tmp_path: Path) -> None:
    read("", "c.JupyterHub.public_url = 'https://gpus.example/x/'\nc.JupyterHub.base_url = '/x/'")
    result = address(tmp_path)
    assert result is not None
    assert result.browser_url == "https://gpus.example/x"
    assert result.loopback_url == "http://127.0.0.1:8000/x"


CONTAINERS = """
c.JupyterHub.load_roles {add} [
    {{"name": "site", "scopes": ["list:users"], "users": ["ana"]}},
    {{"name": "user", "scopes": ["self", "read:users:name"]}},
    {{"name": "makeway-admin", "scopes": ["custom:site:x"], "users": ["lea"]}},
]
c.JupyterHub.services {add} [{{"name": "culler", "api_token": "t" * 32}}]
c.JupyterHub.template_paths {add} ["/site/templates"]
c.JupyterHub.extra_handlers {add} [(r"/site", object)]
"""
MAPPINGS = {
    "c.JupyterHub.template_vars": {"announcement": "Maintenance on Friday"},
    "c.JupyterHub.tornado_settings": {"headers": {"X-Site": "1"}, "slow_spawn_timeout": 5},
    "c.JupyterHub.custom_scopes": {"custom:site:x": {"description": "X"}},
    "c.Spawner.environment": {"SITE": "1"},
}
HOOKS = """
c.Spawner.pre_spawn_hook = c.Spawner.post_stop_hook = c.Spawner.auth_state_hook = print
c.Spawner.server_token_scopes = ["users:activity!user", "access:servers!server", "read:users:name!user"]
c.Spawner.http_timeout = 33
c.JupyterHub.named_server_limit_per_user = 7
c.JupyterHub.db_url = "sqlite:////tmp/site.sqlite"
"""


def check_containers(app: JupyterHub) -> None:
    roles = {role["name"]: role for role in app.load_roles}
    assert len(roles) == len(app.load_roles), "JupyterHub refuses a name that comes twice"
    assert roles["site"]["users"] == ["ana"]
    assert {"self", "read:users:name", "custom:makeway:submit"} <= set(roles["user"]["scopes"])
    assert {"admin", "lea"} <= set(roles["makeway-admin"]["users"])
    assert {"custom:makeway:admin", "custom:site:x"} <= set(roles["makeway-admin"]["scopes"])
    assert {"makeway-service", "makeway-spawner"} <= set(roles)
    assert {service["name"] for service in app.services} == {"culler", "makeway", "makeway-spawner"}
    assert app.template_paths[:2] == [str(TEMPLATES), "/site/templates"]
    assert (r"/site", object) in [tuple(one) for one in app.extra_handlers]


@pytest.mark.parametrize("add", ["=", "+="])
@BOTH
def test_lists_of_the_site_are_merged(read: READ, where: str, add: str) -> None:
    if (where, add) == ("before", "+="):
        lines = CONTAINERS.replace(" {add} [", ".extend([").replace("\n]\n", "\n])\n")
        lines = lines.replace('"t" * 32}}]', '"t" * 32}}])').replace('templates"]', 'templates"])')
        lines = lines.replace("object)]", "object)])").format()
    else:
        lines = CONTAINERS.format(add="=" if where == "before" else add)
        if add == "+=":
            lines = lines.replace("c.JupyterHub.extra_handlers +=", "c.JupyterHub.extra_handlers =")
    check_containers(read(**{where: lines}))


@pytest.mark.parametrize("update", [False, True])
@BOTH
def test_mappings_of_the_site_are_merged(read: READ, where: str, update: bool) -> None:
    lines = [f"{name}.update({value})" if update else f"{name} = {value}" for name, value in MAPPINGS.items()]
    app = read(**{where: "\n".join(lines)})
    assert app.template_vars == {"announcement": "Maintenance on Friday", "makeway_panel": "/services/makeway/"}
    assert app.tornado_settings["headers"] == {"X-Site": "1"}
    assert app.tornado_settings["slow_spawn_timeout"] == 1
    assert {"custom:site:x", "custom:makeway:read"} <= set(app.custom_scopes)
    assert MakewayLocalSpawner(config=app.config).environment["SITE"] == "1"


@BOTH
def test_hooks_and_plain_traits_of_the_site_stay(read: READ, where: str) -> None:
    app = read(**{where: HOOKS})
    spawner = MakewayLocalSpawner(config=app.config)
    assert spawner.pre_spawn_hook is spawner.post_stop_hook is spawner.auth_state_hook is print
    assert spawner.http_timeout == 33
    assert {"read:users:name!user", "custom:makeway:submit"} <= set(spawner.server_token_scopes)
    assert app.named_server_limit_per_user == 7
    assert app.db_url == "sqlite:////tmp/site.sqlite"


@BOTH
def test_users_of_the_site_join_those_of_the_demo_or_replace_them(read: READ, where: str) -> None:
    lines = "c.Authenticator.allowed_users = {'eva'}\nc.JupyterHub.load_groups = {'rnd': {'users': ['eva']}}"
    app = read(**{where: lines})
    allowed = app.config.Authenticator.allowed_users
    assert "eva" in allowed
    assert ("ana" in allowed) == (where == "before"), "an assignment after the call replaces what it set"
    assert app.load_groups["rnd"] == {"users": ["eva"]}


@BOTH
def test_an_authenticator_and_a_spawner_of_the_site_get_what_makeway_needs(read: READ, where: str) -> None:
    lines = """
from makeway_spawner.local import MakewayLocalSpawner
class Own(MakewayLocalSpawner):
    pass
c.JupyterHub.spawner_class = Own
c.JupyterHub.authenticator_class = "dummy"
"""
    app = read(**{where: lines})
    assert issubclass(app.authenticator_class, WithPages)
    assert app.authenticator_class.__name__ == "DummyAuthenticator"
    made: Any = app.spawner_class(config=app.config)
    assert made.makeway_public_path == "/services/makeway/"
    assert made.homes


def test_a_template_that_has_no_effect_is_named(read: READ, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.html").write_text("{% extends 'templates/page.html' %}")
    (tmp_path / "login.html").write_text("{% extends 'templates/login.html' %}")
    read("", f"c.JupyterHub.template_paths = ['{tmp_path}']")
    message = capfd.readouterr().err
    assert f"{tmp_path}/page.html has no effect" in message
    assert "login.html" not in message
