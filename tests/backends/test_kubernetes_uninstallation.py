"""What the chart's hook deletes before an uninstallation, in which order, and what it does when it cannot."""

from __future__ import annotations

import pytest
from api_server import ApiServer
from makeway_quota.backends.kubernetes import uninstallation
from makeway_quota.backends.kubernetes.api.client import ApiStatusError, ApiUnreachable
from makeway_quota.backends.kubernetes.uninstallation import PodSelector, Uninstallation, pod_selector

PORTAL, JOBS = PodSelector("portal", "component in (service)"), PodSelector("jobs", "makeway/instance=a")
LEASE = "/apis/coordination.k8s.io/v1/namespaces/jobs/leases/a"
SERVICE = "/apis/apps/v1/namespaces/portal/deployments/makeway-service"


class Cluster(ApiServer):
    """A cluster whose pods of the service go with their deployment, and those of jobs when they are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.lists = {path.path: [{"metadata": {"name": path.namespace, "uid": "u"}}] for path in (PORTAL, JOBS)}
        self.stubborn = "none"
        self.answer = self._let_go

    def _let_go(self, method: str, path: str) -> None:
        if method == "DELETE" and self.stubborn not in path.split("/"):
            self.lists[PORTAL.path if path == SERVICE else path.rpartition("/")[0]] = []

    async def uninstall(self, seconds: float = 5.0) -> list[str]:
        """Run the hook and return what it changed."""
        await Uninstallation(self, self.said.append, seconds).end(["makeway-service"], PORTAL, [JOBS], ["jobs/a"])
        deleted = [path for method, path in (one.split(" ") for one in self.asked) if method == "DELETE"]
        assert deleted[:2] == [SERVICE, LEASE], "the service would renew the Lease"
        return [path for path in deleted if path != LEASE]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(uninstallation, "POLL_SECONDS", 0.0)
    return Cluster()


async def test_the_service_ends_before_its_jobs(cluster: Cluster) -> None:
    assert await cluster.uninstall() == [SERVICE, f"{JOBS.path}/jobs"]
    assert cluster.said[-1] == "No pod of jobs and notebooks is left."
    assert cluster.lists[PORTAL.path] == cluster.lists[JOBS.path] == []


async def test_pods_that_have_not_ended_in_time_are_named(cluster: Cluster) -> None:
    cluster.stubborn = "jobs"
    assert await cluster.uninstall(0.05) == [SERVICE, f"{JOBS.path}/jobs"], "each pod is deleted once"
    ends = "It ends after its grace, or when its node is back."
    assert cluster.said[-1] == f"1 pod of jobs and notebooks has not ended yet: jobs. {ends}"


async def test_the_portals_pods_are_waited_for_half_of_the_time_and_named(cluster: Cluster) -> None:
    cluster.answer = lambda method, path: None
    cluster.lists[PORTAL.path] += [{"metadata": {"name": "on-a-node-that-is-away", "uid": "v"}}]
    assert await cluster.uninstall(0.05) == [SERVICE, f"{JOBS.path}/jobs"], "jobs and notebooks are ended all the same"
    ends = "They end after their grace, or when their node is back."
    assert f"2 pods of the portal have not ended yet: portal, on-a-node-that-is-away. {ends}" in cluster.said


async def test_what_the_api_server_refuses_is_said_and_does_not_keep_the_rest(cluster: Cluster) -> None:
    def refuse(method: str, path: str) -> None:
        if path == SERVICE:
            cluster.lists[PORTAL.path] = []
            raise ApiStatusError(403, "Forbidden", "not yours")
        cluster._let_go(method, path)

    cluster.answer = refuse
    assert (await cluster.uninstall())[-1] == f"{JOBS.path}/jobs"
    assert "makeway-service is not deleted: " in cluster.said[0]
    assert "not yours" in cluster.said[0]


async def test_it_ends_in_time_where_the_api_server_does_not_answer(cluster: Cluster) -> None:
    def silent(method: str, path: str) -> None:
        raise ApiUnreachable("it does not answer")

    cluster.answer = silent
    await cluster.uninstall(0.05)
    assert cluster.said[-1] == "It is not known which pods are left in jobs: it does not answer"


@pytest.mark.parametrize("text", ["jobs", "jobs:", ":a=b"])
def test_all_pods_of_a_namespace_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAMESPACE:LABEL=VALUE"):
        pod_selector(text)


def test_a_selector_is_a_namespace_and_labels() -> None:
    assert pod_selector("jobs:makeway/instance=a,b in (c,d)") == PodSelector("jobs", "makeway/instance=a,b in (c,d)")
