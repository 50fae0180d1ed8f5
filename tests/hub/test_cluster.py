"""A JupyterHub on a cluster gets what Makeway needs, and keeps what the site has set."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import CHART, ROOT
from jupyterhub.app import JupyterHub
from makeway_hub.access import SCOPES
from makeway_hub.address import CannotStart
from makeway_hub.cluster import ClusterSettings, configure_cluster
from makeway_hub.pages import WithPages
from makeway_quota.settings import load
from makeway_spawner.kube import MakewayKubeSpawner
from traitlets.config import Config

SETTINGS = ClusterSettings("http://makeway-service:8765", "http://proxy-public/services/makeway", admin_users=["ana"])


def zero_to_jupyterhub() -> Any:
    """Return the configuration as Zero to JupyterHub has set it when `hub.extraConfig` runs."""
    c = Config()
    c.JupyterHub.services = [
        {"name": "jupyterhub-idle-culler", "command": ["cull"]},
        {"name": "makeway", "url": "http://makeway-service:8765", "api_token": "one"},
        {"name": "makeway-spawner", "api_token": "two"},
    ]
    c.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "read:users:name"]}, {"name": "site"}]
    c.JupyterHub.authenticator_class = "dummy"
    c.JupyterHub.concurrent_spawn_limit = 64
    c.Spawner.consecutive_failure_limit = 5
    c.KubeSpawner.namespace = "jupyterhub"
    return c


def extra_config() -> str:
    values = yaml.safe_load((CHART / "z2jh-values.yaml").read_text(encoding="utf-8"))
    return str(values["hub"]["extraConfig"]["zz-makeway"])


def test_the_values_for_zero_to_jupyterhub_configure_its_hub() -> None:
    c = zero_to_jupyterhub()
    exec(extra_config(), {"c": c})
    assert c.JupyterHub.spawner_class is MakewayKubeSpawner
    assert c.MakewayKubeSpawner.makeway_token == "two"
    assert c.MakewayKubeSpawner.renew_seconds == load(environ={}).lease_seconds / 3
    assert c.MakewayKubeSpawner.instance == "jupyterhub.makeway"
    assert c.MakewayKubeSpawner.makeway_api_url == "http://makeway-service:8765/services/makeway"
    assert c.MakewayKubeSpawner.makeway_url == "http://proxy-public/services/makeway"
    assert issubclass(c.JupyterHub.authenticator_class, WithPages)
    assert c.JupyterHub.authenticator_class.__name__ == "DummyAuthenticator"
    assert (c.JupyterHub.concurrent_spawn_limit, c.Spawner.consecutive_failure_limit) == (0, 0)
    assert c.MakewayKubeSpawner.renew_seconds == 5
    known = set(MakewayKubeSpawner.class_trait_names(config=True))
    assert set(c.MakewayKubeSpawner) <= known
    assert set(c.JupyterHub) <= set(JupyterHub.class_trait_names(config=True))


def test_the_values_for_zero_to_jupyterhub_serve_a_hub_below_a_path() -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.base_url = "/jupyter/"
    exec(extra_config(), {"c": c})
    assert c.MakewayKubeSpawner.makeway_url == "http://proxy-public/jupyter/services/makeway"
    assert c.MakewayKubeSpawner.makeway_api_url == "http://makeway-service:8765/jupyter/services/makeway"


def test_the_lines_for_a_hub_without_the_chart_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/how-to/run-notebooks-as-pods.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("SERVICE_TOKEN", "one")
    monkeypatch.setenv("SPAWNER_TOKEN", "two")
    c = Config()
    exec(lines, {"c": c})
    assert c.JupyterHub.spawner_class is MakewayKubeSpawner
    assert c.MakewayKubeSpawner.makeway_token == "two"
    assert c.MakewayKubeSpawner.makeway_api_url == "http://makeway:8765/services/makeway"
    roles = {role["name"]: role for role in c.JupyterHub.load_roles}
    assert roles["makeway-service"]["services"] == [c.JupyterHub.services[0]["name"]]
    assert roles["makeway-spawner"]["services"] == [c.JupyterHub.services[1]["name"]]
    assert roles["makeway-admin"]["users"] == ["admin"]
    table = set(re.findall(r"^\| `(\w+)` \| [\d.]+ \|", page, re.MULTILINE))
    assert table
    assert table <= set(MakewayKubeSpawner.class_trait_names(config=True))


def test_the_values_for_the_removal_keep_every_scope_and_those_of_the_site() -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.custom_scopes = {"custom:site:read": {"description": "Read"}}
    values = yaml.safe_load((CHART / "z2jh-removal-values.yaml").read_text(encoding="utf-8"))
    exec(values["hub"]["extraConfig"]["zz-makeway"], {"c": c})
    assert set(c.JupyterHub.custom_scopes) == {*SCOPES, "custom:site:read"}
    assert "spawner_class" not in c.JupyterHub


def test_what_the_site_has_set_stays() -> None:
    c = zero_to_jupyterhub()
    configure_cluster(c, SETTINGS)
    roles = {role["name"]: role for role in c.JupyterHub.load_roles}
    assert {"self", "read:users:name", "custom:makeway:submit"} <= set(roles["user"]["scopes"])
    assert "site" in roles
    assert roles["makeway-admin"]["users"] == ["ana"]
    assert c.JupyterHub.services[0] == {"name": "jupyterhub-idle-culler", "command": ["cull"]}
    assert "custom:makeway:reserve" not in c.JupyterHub.services[1]["oauth_client_allowed_scopes"]


def test_what_the_site_has_appended_stays() -> None:
    c = Config()
    for name in ("makeway", "makeway-spawner"):
        c.JupyterHub.services.append({"name": name, "api_token": name})
    c.JupyterHub.load_roles.append({"name": "site"})
    c.JupyterHub.template_paths.prepend(["/site"])
    c.JupyterHub.tornado_settings.update({"headers": {}})
    c.JupyterHub.authenticator_class = "dummy"
    configure_cluster(c, SETTINGS)
    assert [service["name"] for service in c.JupyterHub.services] == ["makeway", "makeway-spawner"]
    assert "site" in [role["name"] for role in c.JupyterHub.load_roles]
    assert c.JupyterHub.template_paths[1:] == ["/site"]
    assert c.JupyterHub.tornado_settings["headers"] == {}


def test_the_hub_reaches_its_cluster_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.hub_connect_url = "http://hub:8081"
    c.ConfigurableHTTPProxy.api_url = "http://proxy-api:8001"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    configure_cluster(c, SETTINGS)
    wanted = {"intranet.example", "makeway-service", "proxy-public", "hub", "proxy-api", "10.96.0.1", "127.0.0.1"}
    assert wanted <= set(os.environ["NO_PROXY"].split(","))
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]


def test_a_hub_below_a_path_is_known_by_it() -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.base_url = "/jupyter/"
    configure_cluster(c, SETTINGS)
    assert c.MakewayKubeSpawner.makeway_public_path == "/jupyter/services/makeway/"
    assert c.MakewayKubeSpawner.makeway_api_url == "http://makeway-service:8765/jupyter/services/makeway"
    assert c.JupyterHub.template_vars == {"makeway_panel": "/jupyter/services/makeway/"}


@pytest.mark.parametrize("name", ["makeway", "makeway-spawner"])
def test_a_service_without_a_token_is_named(name: str) -> None:
    c = zero_to_jupyterhub()
    c.JupyterHub.services = [one for one in c.JupyterHub.services if one["name"] != name]
    with pytest.raises(ValueError, match=f"no service '{name}' with an API token"):
        configure_cluster(c, SETTINGS)


@pytest.mark.parametrize(
    ("section", "name", "found", "words"),
    [
        ("JupyterHub", "internal_ssl", True, "internal_ssl is not supported"),
        ("JupyterHub", "spawner_class", "simple", "SimpleLocalProcessSpawner cannot be used with Makeway"),
        ("KubeSpawner", "options_form", "<b>", "would replace Makeway's spawn page"),
    ],
)
def test_what_cannot_work_on_a_cluster_is_refused_in_words(section: str, name: str, found: Any, words: str) -> None:
    c = zero_to_jupyterhub()
    c[section][name] = found
    with pytest.raises(CannotStart, match=words):
        configure_cluster(c, SETTINGS)


@pytest.mark.parametrize("name", ["kubespawner.KubeSpawner", "own"])
def test_a_spawner_of_the_site_that_extends_makeways_stays(name: str) -> None:
    class Own(MakewayKubeSpawner):
        pass

    c = zero_to_jupyterhub()
    c.JupyterHub.spawner_class = Own if name == "own" else name
    configure_cluster(c, SETTINGS)
    assert c.JupyterHub.spawner_class is (Own if name == "own" else MakewayKubeSpawner)


def test_a_database_of_a_newer_hub_is_refused_on_a_cluster_too(tmp_path: Path) -> None:
    database = tmp_path / "jupyterhub.sqlite"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('0123456789ab')")
    c = zero_to_jupyterhub()
    c.JupyterHub.db_url = f"sqlite:///{database}"
    with pytest.raises(CannotStart, match="is of a newer JupyterHub"):
        configure_cluster(c, SETTINGS)
