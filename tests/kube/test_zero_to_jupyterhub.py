"""The three steps of docs/how-to/on-your-cluster.md with Zero to JupyterHub's own chart, and the way back.

Run by hand with a checkout or a copy of that chart: make kube-test ARGS='--z2jh FOLDER -k zero_to_jupyterhub'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import JOBS, NAMESPACE, Object, written
from makeway_api.models import JobRequest
from pods import wait_until
from portals import CHECKPOINTS, STARTED, WORKERS, Person, Site
from releases import CLAIMS, KINDS, Installation
from sites import ADD_ON, PASSWORD, SITE, dockerfile, in_pod, namespace_of_site, overlay, removal, wait_until_ready

from kube_cluster import image_build
from kube_cluster.api import GPU
from kube_cluster.cluster import Cluster
from kube_cluster.node import Node
from kube_cluster.portal import PARTS

pytestmark = [pytest.mark.kube, pytest.mark.z2jh, pytest.mark.timeout(3000)]

HUBS = ("makeway.test/site-hub:1", "makeway.test/site-hub:2")
"""The site's own image of its Hub, and the same with Makeway's package."""
HUB_IMAGE = """
ARG BASE
FROM ${BASE}
ARG JUPYTERHUB
RUN python3 -m venv /opt/hub && /opt/hub/bin/pip install --no-cache-dir --only-binary :all: \\
    jupyterhub==${JUPYTERHUB} "jupyterhub-kubespawner==7.*" jupyterhub-idle-culler pycurl
RUN useradd --uid 1000 --create-home jovyan && mkdir /srv/jupyterhub && chown jovyan /srv/jupyterhub
ENV PATH=/opt/hub/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /srv/jupyterhub
USER jovyan
"""
CORE = ("hub", "proxy")


def named(image: str) -> dict[str, str]:
    """Return an image as Zero to JupyterHub's values name it."""
    return dict(zip(("name", "tag"), image.split(":"), strict=True))


CONFIG: Object = {
    "hub": {**SITE, "image": named(HUBS[0])},
    "proxy": {"service": {"type": "ClusterIP"}, "chp": {"image": named(image_build.name_of("proxy"))}},
    "singleuser": {
        "image": named(image_build.name_of("notebook")),
        "memory": {"guarantee": "128M"},
        "cloudMetadata": {"blockWithIptables": False},  # its image is not here
        "profileList": [
            {"display_name": "Small", "default": True},
            {"display_name": "A GPU", "slug": "gpu", "kubespawner_override": {"extra_resource_limits": {GPU: "1"}}},
        ],
    },
    "scheduling": {"userScheduler": {"enabled": False}, "userPlaceholder": {"enabled": False}},
    "prePuller": {"hook": {"enabled": False}, "continuous": {"enabled": False}},
}
"""The values of the site, without the parts whose images are not here."""
TRAIN = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "makeway")
shell.run_cell('''%%train --profile gpu1
import os
print("trained on", os.uname().nodename)
''').raise_error()
"""
FOREVER = "import time\nprint('started', flush=True)\ntime.sleep(3600)"


@pytest.fixture(scope="module")
def chart(request: pytest.FixtureRequest) -> Path:
    """Return the folder of Zero to JupyterHub's chart."""
    result = Path(request.config.getoption("--z2jh")).resolve()
    assert (result / "Chart.yaml").exists(), f"{result} is no chart: name the folder with its Chart.yaml"
    return result


@pytest.fixture(scope="module")
def hub_images(chart: Path, real_node: Node, images: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the site's two images of its Hub and import them into the node."""
    context = tmp_path_factory.mktemp("context")
    version = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    pip = "".join(f"ARG {name}\n" for name in image_build.PIP_SETTINGS)  # where the index is another
    first, _, rest = dockerfile().partition("FROM ${HUB}\n")
    for image, text, arguments in (
        (HUBS[0], HUB_IMAGE.replace("ARG JUPYTERHUB\n", f"ARG JUPYTERHUB\n{pip}"), {"JUPYTERHUB": str(version)}),
        (HUBS[1], f"{first}FROM ${{HUB}}\n{pip}{rest}", {"HUB": HUBS[0]}),
    ):
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        archive = image_build.build_other(image, context, arguments)
        real_node.import_image(archive)
        archive.unlink()


class ZeroToJupyterHub(Site):
    """The site of the chart, which its administrator upgrades."""

    def __init__(self, makeway: Installation, chart: Path) -> None:
        super().__init__(makeway.api, PASSWORD)
        self.makeway, self.chart = makeway, chart
        self.parts: tuple[str, ...] = CORE

    def helm(self, verb: str, *values: Object) -> None:
        """Install or upgrade the chart with these values, and wait until all pods are ready."""
        before = {pod["metadata"]["uid"] for pod in self.pods("hub")}
        files = [word for one in values for word in ("--values", written(self.makeway.folder, one))]
        self.makeway.helm.run(verb, "jupyterhub", self.chart, "--namespace", NAMESPACE, *files)
        if before:
            wait_until(lambda: not before & {pod["metadata"]["uid"] for pod in self.pods("hub")}, "a new Hub", STARTED)
        wait_until_ready(self, self.parts)
        self.close()  # the next requests come from people who log in again, at the proxy that runs now

    def uid(self, name: str) -> str:
        """Return the UID of a person's notebook."""
        return str(self.person(name).notebook()["metadata"]["uid"])


@pytest.fixture(scope="module")
def site(
    control_plane: Cluster, chart: Path, hub_images: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ZeroToJupyterHub]:
    """Return the running site without Makeway."""
    with namespace_of_site(control_plane, tmp_path_factory.mktemp("helm")) as makeway:
        result = ZeroToJupyterHub(makeway, chart)
        result.helm("install", CONFIG)
        yield result
        result.close()


def made(site: ZeroToJupyterHub, path: str) -> set[str]:
    """Return the names in a list of what Makeway's chart made in the site's namespace."""
    return {name for name in site.makeway.names(path) if name.startswith("makeway")}


def holds_a_gpu(pod: Object) -> bool:
    """Whether a notebook's pod has a GPU."""
    limits: dict[str, Any] = pod["spec"]["containers"][0]["resources"].get("limits", {})
    return limits.get(GPU) == "1"


def works(person: Person) -> bool:
    """Whether the browser opens the person's notebook, by a login at the Hub."""
    return "jupyter-config-data" in person.browser.get(f"/user/{person.name}/lab").text


def test_the_three_steps_and_the_way_back(control_plane: Cluster, site: ZeroToJupyterHub) -> None:
    # The site runs: ana has a notebook with a GPU, and bo one without.
    assert holds_a_gpu(site.person("ana").started({"profile": "gpu"}))
    site.person("bo").started({})
    uids = {name: site.uid(name) for name in ("ana", "bo")}

    site.makeway.run("install", values=ADD_ON)
    assert made(site, KINDS[0]) == {"makeway-service"}
    site.parts = PARTS
    site.helm("upgrade", CONFIG, overlay(HUBS[1]))

    # The notebooks from before run, and ana's GPU is not given out a second time.
    assert {name: site.uid(name) for name in ("ana", "bo")} == uids
    assert works(site.person("ana"))
    assert works(site.person("bo"))
    with site.person("bo").client() as client:
        wait_until(lambda: [pool.free for pool in client.pools()] == [1], "one of two GPUs is free")

    # Bo's next notebook has a lease; from it he trains in another pod.
    bo = site.person("bo")
    bo.stop()
    assert "One GPU" in bo.browser.get("/hub/spawn").text
    pod = bo.started({"profile": "gpu1", "team": "devops"})
    assert holds_a_gpu(pod)
    assert pod["metadata"]["labels"]["makeway/instance"] == "makeway.makeway"
    assert pod["metadata"]["labels"]["component"] == "singleuser-server"
    assert 'href="/services/makeway/"' in bo.browser.get("/hub/home").text
    assert "One GPU" in bo.browser.get("/services/makeway/").text
    site.person("ana").stop()
    in_pod(control_plane, "jupyter-bo", "python3", "-c", TRAIN)
    with bo.client() as client:
        (job,) = client.jobs(mine=True).jobs
        wait_until(lambda: client.job(job.id).state.ended, "the job has ended", STARTED)
        assert client.logs(job.id).text == "trained on worker-0\n"

    # While bo is away, ana's second job takes what is reserved for his team, and makes way when he comes back.
    bo.stop()
    ana = site.person("ana")
    with ana.client() as client:
        jobs = [
            client.submit(JobRequest(name="fit", profile="gpu1", command=["python3", "-c", FOREVER])) for _ in range(2)
        ]
        wait_until(lambda: all(client.job(job.id).attempts for job in jobs), "both jobs run", STARTED)
        wait_until(lambda: all("started" in client.logs(job.id).text for job in jobs), "both jobs print", STARTED)
        bo.started({"profile": "gpu1", "team": "devops"})
        outcomes = [[attempt.outcome for attempt in client.job(job.id).attempts] for job in jobs]
        assert sorted(outcomes, key=str) == [["preempted"], [None]]

    # An upgrade of the site keeps his notebook and her job.
    uid = site.uid("bo")
    (worker,) = [pod["metadata"]["uid"] for pod in site.api.items(WORKERS)]
    site.helm("upgrade", {**CONFIG, "hub": {**CONFIG["hub"], "activeServerLimit": 50}}, overlay(HUBS[1]))
    assert site.uid("bo") == uid
    assert works(site.person("bo"))
    assert [pod["metadata"]["uid"] for pod in site.api.items(WORKERS)] == [worker]
    with site.person("bo").client() as client:
        assert [(session.user, session.phase) for session in client.sessions()] == [("bo", "running")]

    # Back: jobs are cancelled, the overlay is replaced, and Makeway's release is removed. Bo's notebook goes on.
    with site.person("ana").client() as client:
        for job in jobs:
            client.cancel(job.id)
    wait_until(lambda: not site.api.items(WORKERS), "no job has a pod", STARTED)
    site.helm("upgrade", CONFIG, removal())
    site.parts = CORE
    site.makeway.run("uninstall", "--wait")
    assert site.uid("bo") == uid
    assert works(site.person("bo"))
    assert site.person("bo").hub("GET", "/users/bo/tokens").status_code == 200
    assert site.person("bo").browser.get("/services/makeway/").status_code == 404
    site.person("bo").stop()

    # And the site is as it was.
    site.helm("upgrade", CONFIG)
    assert holds_a_gpu(site.person("ana").started({"profile": "gpu"}))
    assert works(site.person("ana"))
    assert "makeway" not in site.person("ana").browser.get("/hub/home").text
    assert made(site, CLAIMS) == {"makeway-service"}
    assert site.makeway.names(CLAIMS, JOBS) == {CHECKPOINTS}
    for kind in KINDS:
        assert not made(site, kind)
