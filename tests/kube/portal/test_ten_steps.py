"""The page “On your cluster” is walked: its steps 3 to 7 install the portal of this folder; here are the others."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import httpx2
import pytest
import yaml
from charts import NAMESPACE
from pods import wait_until
from portals import USERS, Portal, log_in
from releases import namespaces
from walk import NOT_WALKED, PLACEHOLDERS, ROOT, STEPS, blocks, item, section, steps

from kube_cluster import image_build

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


@pytest.mark.covers("F80", "N21")
def test_there_are_ten_steps_each_with_a_command_or_a_file(portal: Portal) -> None:
    result = steps()
    assert list(result) == list(STEPS)
    for number, text in result.items():
        assert blocks(text, "sh") or blocks(text, "yaml"), number
    assert "podman push" in result[NOT_WALKED]
    for word in PLACEHOLDERS:
        assert f"`{word.strip().partition('/')[0]}`" in section("Ten steps"), "the page says what stands for yours"


def test_step_1_builds_the_images_and_prints_where_they_are(images: dict[str, Path]) -> None:
    (command,) = blocks(steps()[1], "sh")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for image, archive in images.items():
        assert f"{image_build.name_of(image)}: {archive}" in done.stdout
    assert set(images) == set(
        re.findall(r"[a-z-]+", steps()[NOT_WALKED].partition("for image in")[2].partition(";")[0])
    )


def test_step_3_prints_the_gpus_of_each_node(portal: Portal) -> None:
    printed = portal.walk.step(3)
    assert re.search(r"^node-0 +2$", printed, re.MULTILINE), printed


def test_step_8_leads_to_the_login(portal: Portal) -> None:
    password, forward = blocks(steps()[8], "sh")[0].splitlines()
    with socket.create_server(("127.0.0.1", 0)) as result:
        port = result.getsockname()[1]
    assert "8000:http" in forward
    with portal.walk.running(forward.replace("8000:", f"{port}:")):
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
            wait_until(lambda: answers(browser), "the port is forwarded")
            assert log_in(browser, USERS[0], portal.walk.run(password)).status_code == 200


def answers(browser: httpx2.Client) -> bool:
    """Whether the portal answers."""
    try:
        return browser.get("/hub/health").is_success
    except httpx2.TransportError:
        return False


def test_the_values_for_others_are_accepted_with_two_replicas(portal: Portal) -> None:
    text = item(section("Before others use it"), "Two replicas")
    (commands,), (more,) = blocks(text, "sh"), blocks(text, "yaml")
    for name in ("makeway", "hub"):
        (portal.walk.folder / f"{name}.url").write_text("postgresql+psycopg://user:password@host/makeway")
    portal.walk.run(commands)
    (portal.walk.folder / "more.yaml").write_text(more)
    (upgrade,) = blocks(steps()[10], "sh")
    rendered = portal.walk.run(f"{upgrade.strip()} --values more.yaml --dry-run=server --hide-notes")
    result = {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all(rendered.partition("MANIFEST:")[2])
        if one
    }
    assert result["Deployment", "makeway-service"]["spec"]["replicas"] == 2
    ingress = result["Ingress", "makeway"]
    assert ingress["spec"]["rules"][0]["host"] == "gpus.example.com"
    assert ingress["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/proxy-body-size": "100m"}
    for name in ("makeway-postgres", "hub-postgres"):
        portal.api.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")


def test_the_add_on_is_installed_beside_it(portal: Portal) -> None:
    text = section("Add it to a Zero to JupyterHub")
    (command,), (wanted,) = re.findall(r"`(helm install [^`]*)`", text), blocks(text, "yaml")
    (portal.walk.folder / "add-on.yaml").write_text(wanted)
    portal.walk.run("kubectl create namespace jupyterhub")
    portal.walk.run(command)
    deployment = portal.api.get("/apis/apps/v1/namespaces/jupyterhub/deployments/makeway-service")
    assert deployment["spec"]["replicas"] == 1
    portal.walk.run("helm uninstall makeway --namespace jupyterhub --wait")
    own = {"jupyterhub", "jupyterhub-jobs"}
    portal.walk.run(f"kubectl delete namespace {' '.join(sorted(own))}")
    assert not own & namespaces(portal.api)
