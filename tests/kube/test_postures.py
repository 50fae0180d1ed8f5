"""The story on clusters with rules of their own: OpenShift's users and DNS, default-deny policies with sidecars.

Both are imitated on the real node (tests/platforms.py), in namespaces of restricted pods. Each portal is installed
first without the values that its cluster needs, which shows that the imitation bites. The story under restricted pods
and network policies alone is tests/kube/portal/test_story.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from charts import JOBS, NAMESPACE, Object
from makeway_api.models import JobRequest
from platforms import (
    OPENSHIFT,
    RANGES,
    SIDECAR,
    SIZE,
    dns_pods,
    mesh,
    ruled,
    wait_for_ranges,
    wait_for_sidecars,
    wait_for_users,
)
from pods import wait_until
from portals import PODS, STARTED, VALUES, WORKERS, Portal
from probing import output_in_pod
from releases import Installation, installation, left_in
from site_stories import GPU1, story, user_of
from walk import Walk, blocks, section, steps

from kube_cluster import image_build
from kube_cluster.cluster import Cluster
from kube_cluster.portal import wait_until_ready

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500), pytest.mark.usefixtures("images")]

RESOLVES = """
import socket
try:
    print(bool(socket.getaddrinfo("makeway-hub", 8081)))
except OSError:
    print(False)
"""
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
OTHER_PORT = {"networkPolicy": {"apiServer": {"ports": [16443]}}}
DENIED = {"metadata": {"name": "default-deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}


class Site:
    """A cluster whose administrator follows the page, with values that change on the way."""

    def __init__(self, cluster: Cluster, release: Installation, walk: Walk) -> None:
        self.cluster, self.api, self.release, self.walk = cluster, cluster.api, release, walk

    def install(self, values: Object) -> None:
        """Install the chart, without waiting for anything."""
        self.walk.write_values(values)
        self.walk.run(blocks(steps()[7], "sh")[0].splitlines()[0])

    def upgrade(self, values: Object) -> None:
        """Upgrade the chart, without waiting for anything."""
        self.walk.write_values(values)
        self.walk.step(10)

    def service_runs(self) -> str:
        """Return the name of the service's pod, once its program runs."""
        result: list[str] = []

        def runs() -> bool:
            for pod in self.api.items(PODS, labelSelector="app.kubernetes.io/component=service"):
                states = {one["name"]: one["state"] for one in pod["status"].get("containerStatuses", ())}
                if "running" in states.get("service", {}):
                    result.append(pod["metadata"]["name"])
            return bool(result)

        wait_until(runs, "the service's program runs", STARTED)
        return result[-1]

    def portal(self) -> Portal:
        """Return the portal, once all its pods are ready."""
        wait_until_ready(self.cluster)
        portal = Portal(self.cluster, self.release, self.walk)
        wait_until(portal.answers, "the Hub and the service answer through the proxy", STARTED, pause=0.5)
        return portal


@contextmanager
def site_of(cluster: Cluster, folder: Path) -> Iterator[Site]:
    """Yield a site whose namespace takes restricted pods only, and has no portal yet; afterwards all of it is gone."""
    walk = Walk(cluster, folder)
    with installation(cluster, folder, make_namespace=False) as release:
        walk.write()
        for number in (3, 4):
            walk.step(number)
        yield Site(cluster, release, walk)
        for pods in (WORKERS, PODS):
            cluster.api.delete(pods, gracePeriodSeconds="0")


def ends_whole(portal: Portal) -> None:
    """Test the release and uninstall it, with a notebook that runs, by the commands of the page."""
    portal.walk.run("helm test makeway --namespace makeway --logs")
    portal.person("ana").started(GPU1["ana"])
    *_, uninstall = blocks(section("Upgrade, roll back, uninstall"), "sh")[0].splitlines()
    portal.walk.run(uninstall)
    wait_until(lambda: "pods" not in {kind for kind, _ in left_in(portal.api, NAMESPACE, JOBS)}, "no pod is left")
    portal.close()


# -- OpenShift


@pytest.mark.covers("N21")
def test_the_story_where_the_platform_assigns_users_and_its_dns_has_a_place_of_its_own(
    control_plane: Cluster, tmp_path: Path
) -> None:
    api = control_plane.api
    with ruled(api, OPENSHIFT), dns_pods(api, "openshift-dns:5353"):
        wait_for_ranges(api)
        with site_of(control_plane, tmp_path) as site:
            wait_for_users(api)
            site.install(VALUES)
            words = "unable to validate against any security context constraint"
            wait_until(lambda: words in refusals(site), "the pods of the usual values are refused")
            assert not api.items(PODS, labelSelector="app.kubernetes.io/component in (hub,proxy,service)")

            site.upgrade(VALUES | {"podSecurity": {"users": "platform"}})
            service = site.service_runs()
            assert output_in_pod(control_plane, NAMESPACE, service, RESOLVES) == "False\n"

            (values,) = blocks(section("OpenShift"), "yaml")
            site.upgrade(VALUES | yaml.safe_load(values))
            portal = site.portal()
            for pod in story(portal, tmp_path):
                first = RANGES[pod["metadata"]["namespace"]]
                assert first <= user_of(pod) < first + SIZE
            ends_whole(portal)


def refusals(site: Site) -> str:
    """Return what ReplicaSets say of pods that they may not create."""
    result = site.api.items(EVENTS, fieldSelector="reason=FailedCreate")
    return " ".join(one["message"] for one in result)


# -- default-deny policies, and a mesh


def tells_why_all_waits(site: Site) -> None:
    """Read why everything waits where the portal is Available and the API server has another port than the values say.

    The service has never reached it: programs that were connected before stay so.
    """
    available, ready = blocks(steps()[7], "sh")[0].splitlines()[1], blocks(steps()[7], "sh")[1]
    site.walk.run(available)
    assert '"backend":"cannot be observed"' in site.walk.run(ready)
    portal = site.portal()
    ana = portal.person("ana")
    with ana.client() as client:
        job = client.submit(JobRequest(command=["true"], profile="gpu1", team="rnd"))
        ana.begin(GPU1["ana"])
        wait_until(lambda: len(client.sessions()) == 1, "her notebook waits")
        problem = client.usage().problem
        assert problem is not None
        assert "networkPolicy.apiServer.ports" in problem
        reasons = [one.reason for one in (client.job(job.id), *client.sessions())]
        assert [one and one.message for one in reasons] == [problem, problem]
        client.cancel(job.id)
        ana.stop()
    portal.close()


@pytest.mark.covers("N21")
def test_the_story_where_nothing_is_reached_by_default_and_every_pod_has_a_sidecar(
    control_plane: Cluster, tmp_path: Path
) -> None:
    api = control_plane.api
    with ruled(api, mesh(image_build.name_of("quota-service"))), site_of(control_plane, tmp_path) as site:
        wait_for_sidecars(api)
        api.create(POLICIES.format(NAMESPACE), DENIED)
        site.install(VALUES | {"networkPolicy": {"enabled": False}})
        api.create(POLICIES.format(JOBS), DENIED)
        service = site.service_runs()
        assert output_in_pod(control_plane, NAMESPACE, service, RESOLVES) == "False\n"

        site.upgrade(VALUES | OTHER_PORT)
        tells_why_all_waits(site)

        site.upgrade(VALUES)
        portal = site.portal()
        for pod in story(portal, tmp_path):
            assert pod["spec"]["containers"][0]["name"] == SIDECAR
        ends_whole(portal)
