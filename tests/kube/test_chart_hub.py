"""The Hub's configuration in the chart, read as JupyterHub reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import NAMESPACE, Object, hub_files, of_kind, pod_specs, rendered
from makeway_hub.cluster import SERVICE, SPAWNER
from traitlets.config.loader import PyFileConfigLoader
from walk import blocks, section

from kube_cluster.helm import Helm

pytestmark = pytest.mark.kube

OAUTH = {"JupyterHub": {"authenticator_class": "shared-password"}}


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a Helm without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture
def configuration(helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from the values of `hub` to the Hub's configuration."""

    def load(hub: Object, **environ: str) -> Any:
        manifests = rendered(helm, tmp_path, {"hub": hub})
        for name, text in hub_files(manifests).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        for one in pod_specs(manifests)["makeway-hub"]["containers"][0]["env"]:
            value = "secret\n" if one["name"] == "HUB_DB_URL" else "secret"
            monkeypatch.setenv(one["name"], environ.get(one["name"], value))
        return PyFileConfigLoader(str(tmp_path / "jupyterhub_config.py")).load_config()

    return load


def test_the_hub_reads_the_configuration_of_the_chart(configuration: Any) -> None:
    from makeway_spawner.kube import MakewayKubeSpawner

    c = configuration({"extraConfig": {"site": "c.JupyterHub.active_server_limit = 9"}})
    assert c.JupyterHub.spawner_class is MakewayKubeSpawner
    assert c.MakewayKubeSpawner.makeway_api_url == "http://makeway-service:8765/services/makeway"
    assert c.MakewayKubeSpawner.makeway_url == "http://makeway-proxy/services/makeway"
    names = set(MakewayKubeSpawner.class_trait_names(config=True))
    assert set(c.MakewayKubeSpawner) | set(c.KubeSpawner) <= names
    assert c.JupyterHub.active_server_limit == 9
    assert c.JupyterHub.authenticator_class.__name__ == "DummyAuthenticator"


def test_the_address_of_its_database_may_end_with_a_newline_as_files_do(configuration: Any) -> None:
    assert configuration({"database": {"existingSecret": "postgres"}}).JupyterHub.db_url == "secret"


@pytest.mark.parametrize(("address", "listens"), [("10.1.2.3", None), ("fd00:10::7", "::")])
def test_notebooks_listen_on_ipv6_where_pods_have_such_addresses(
    configuration: Any, address: str, listens: str | None
) -> None:
    assert configuration({}, POD_IP=address).KubeSpawner.get("ip") == listens
    assert configuration({"config": {"KubeSpawner": {"ip": "fd00::1"}}}, POD_IP=address).KubeSpawner.ip == "fd00::1"


def test_notebooks_have_as_much_shared_memory_as_memory(configuration: Any) -> None:
    c = configuration({})
    mounts = {one["mountPath"]: one["name"] for one in c.KubeSpawner.volume_mounts.values()}
    assert c.KubeSpawner.volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert set(mounts) == {"/home/jovyan", "/dev/shm"}


def test_no_home_is_deleted_with_its_server_or_user_unless_the_site_says_so(configuration: Any) -> None:
    assert configuration({}).KubeSpawner.delete_pvc is False
    assert configuration({"config": {"KubeSpawner": {"delete_pvc": True}}}).KubeSpawner.delete_pvc is True


@pytest.mark.parametrize("section", ["Spawner", "KubeSpawner"])
@pytest.mark.parametrize(
    ("trait", "more"),
    [("environment", {"SITE": "x"}), ("extra_labels", {"site": "x"}), ("extra_annotations", {"a": "x"})],
)
@pytest.mark.parametrize("code", ["c.{}.{}.update({!r})", "c.{}.{} = {!r}"])
def test_code_may_add_to_what_notebooks_get(
    configuration: Any, section: str, trait: str, more: dict[str, str], code: str
) -> None:
    plain = dict(configuration({}).KubeSpawner[trait])
    c = configuration({"extraConfig": {"site": code.format(section, trait, more)}})
    assert c.KubeSpawner[trait] == {**plain, **more}


def makeway_admins(c: Any) -> list[str]:
    """Return the users who administer Makeway."""
    (role,) = (one for one in c.JupyterHub.load_roles if one["name"] == "makeway-admin")
    result: list[str] = role["users"]
    return result


def test_an_authenticator_chosen_by_code_leaves_admin_no_administrator(configuration: Any) -> None:
    code = "c.JupyterHub.authenticator_class = 'shared-password'"
    c = configuration({"extraConfig": {"auth": code}})
    assert makeway_admins(c) == []
    assert c.Authenticator.admin_users == set()
    c = configuration({"extraConfig": {"auth": code}, "makewayAdmins": {"users": ["admin"]}})
    assert makeway_admins(c) == ["admin"]


def test_admin_is_an_administrator_for_a_first_look_only(configuration: Any) -> None:
    c = configuration({})
    assert (c.Authenticator.admin_users, makeway_admins(c)) == ({"admin"}, ["admin"])
    for hub in ({"config": OAUTH}, {"config": {"JupyterHub": {"authenticator_class": None}}}):
        c = configuration(hub)
        assert "admin_users" not in c.Authenticator
        assert makeway_admins(c) == []


def test_named_administrators_take_the_place_of_admin(configuration: Any) -> None:
    c = configuration({"config": {"Authenticator": {"admin_users": ["ana"]}}, "makewayAdmins": {"users": ["ana"]}})
    assert (c.Authenticator.admin_users, makeway_admins(c)) == (["ana"], ["ana"])
    c = configuration({"makewayAdmins": {"groups": ["operations"]}})
    assert makeway_admins(c) == []


def test_oauth_as_the_page_has_it(configuration: Any, helm: Helm, tmp_path: Path) -> None:
    (text,) = blocks(section("Logins with OAuth"), "yaml")
    hub = yaml.safe_load(text)["hub"]
    assert hub["config"].pop("JupyterHub") == {"authenticator_class": "generic-oauth"}
    c = configuration({**hub, "config": {**hub["config"], **OAUTH}})  # its package is not in this environment
    assert c.GenericOAuthenticator == hub["config"]["GenericOAuthenticator"]
    roles = {role["name"]: role for role in c.JupyterHub.load_roles}
    assert (roles["makeway-admin"]["users"], roles["makeway-admin"]["groups"]) == ([], ["gpu-admins"])
    assert "load_groups" not in c.JupyterHub, "the groups are the provider's"
    (command,) = blocks(section("Logins with OAuth"), "sh")
    name, _, key = command.partition("generic ")[2].partition(" --from-file=")
    (container,) = pod_specs(rendered(helm, tmp_path, {"hub": hub}))["makeway-hub"]["containers"]
    (secret,) = [one["valueFrom"] for one in container["env"] if one["name"] == "OAUTH_CLIENT_SECRET"]
    assert secret == {"secretKeyRef": {"name": name, "key": key.strip()}}


def test_services_and_roles_of_the_site_join_those_of_makeway(configuration: Any) -> None:
    of_values = {"name": "announcements", "url": "http://announcements"}
    of_python = {"name": "culler", "command": ["cull"]}
    c = configuration(
        {
            "config": {"JupyterHub": {"services": [of_values], "load_roles": [{"name": "readers", "scopes": []}]}},
            "extraConfig": {"culler": f"c.JupyterHub.services.append({of_python!r})"},
        }
    )
    assert [one["name"] for one in c.JupyterHub.services] == [SERVICE, SPAWNER, "announcements", "culler"]
    assert {"readers", "makeway-service"} <= {one["name"] for one in c.JupyterHub.load_roles}


def test_python_of_the_site_may_use_any_names(configuration: Any) -> None:
    first = "values, name, section, os = 'x', 'y', 'z', None\ndef limit(): return 7"
    c = configuration({"extraConfig": {"1": first, "2": "c.JupyterHub.active_server_limit = limit()"}})
    assert c.JupyterHub.active_server_limit == 7


def test_what_the_site_configures_is_in_a_secret(helm: Helm, tmp_path: Path) -> None:
    hub = {"config": {"OAuthenticator": {"client_secret": "hidden-1"}}, "extraConfig": {"a": "x = 'hidden-2'"}}
    manifests = rendered(helm, tmp_path, {"hub": hub})
    assert json.loads(hub_files(manifests)["values.json"])["config"]["OAuthenticator"] == {"client_secret": "hidden-1"}
    assert "hidden" not in json.dumps(manifests)
    assert not of_kind(manifests, "ConfigMap", "makeway-hub")


@pytest.mark.parametrize(("given", "base"), [("/", "/"), ("gpu", "/gpu/"), ("/gpu/lab/", "/gpu/lab/")])
def test_all_parts_know_the_base_address_of_the_hub(helm: Helm, tmp_path: Path, given: str, base: str) -> None:
    manifests = rendered(helm, tmp_path, {"hub": {"config": {"JupyterHub": {"base_url": given}}}})
    specs = pod_specs(manifests)
    env = {one["name"]: one.get("value") for one in specs["makeway-service"]["containers"][0]["env"]}
    assert env["JUPYTERHUB_BASE_URL"] == base
    assert env["JUPYTERHUB_API_URL"] == f"http://makeway-hub:8081{base}hub/api"
    assert env["JUPYTERHUB_SERVICE_PREFIX"] == f"{base}services/makeway/"
    assert env["MAKEWAY_URL"] == f"http://makeway-proxy{base}services/makeway"
    assert env["MAKEWAY_WORKER_URL"] == f"http://makeway-service.{NAMESPACE}.svc:8765{base}services/makeway"
    (hub,) = specs["makeway-hub"]["containers"]
    assert {hub[probe]["httpGet"]["path"] for probe in hub if probe.endswith("Probe")} == {f"{base}hub/health"}
    assert (
        f"--error-target=http://makeway-hub:8081{base}hub/error" in specs["makeway-proxy"]["containers"][0]["command"]
    )
