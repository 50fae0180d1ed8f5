"""What the portal asked of the API server until its end, and what it leaves; the last tests of their folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from charts import JOBS, NAMESPACE
from makeway_api.models import JobRequest
from pods import wait_until
from portals import CHECKPOINTS, HOMES, OWN_CLAIMS, PODS, WORKERS, Portal
from releases import CLUSTER_WIDE, PRIORITIES, left_in, rights_used
from replicated import DATABASE
from walk import blocks, file_of, section

from kube_cluster.api import Api

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

POLICIES = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
OF_THE_TESTS = {("secrets", DATABASE), ("networkpolicies", "tested")}
"""What the tests with two replicas added to the namespace."""


def test_the_hub_has_used_its_rights_and_no_others(portal: Portal) -> None:
    ana = portal.person("ana")
    ana.started({"profile": "gpu1", "team": "rnd"})
    ana.stop()
    portal.told.close()
    for account, seen in portal.asked.items():
        assert not [one for one in seen if one["responseStatus"]["code"] == 403], account
    pods = {(verb, "pods", NAMESPACE) for verb in ("get", "list", "watch", "create", "delete")}
    events = {(verb, "events", NAMESPACE) for verb in ("list", "watch")}
    # Claims are read where they are there already, and deleted with their user.
    claims = {("create", "persistentvolumeclaims", NAMESPACE)}
    read = {("get", "persistentvolumeclaims", NAMESPACE)}
    assert rights_used(portal.asked["makeway-hub"]) - read == pods | events | claims


def test_uninstalled_the_portal_leaves_the_data_and_ends_what_runs(portal: Portal) -> None:
    """A notebook, a job and a gang run until then; nothing of them goes on without network policies."""
    ana, api = portal.person("ana"), portal.api
    pair = {"name": "pair", "gpus": 0, "workers": 2, "cpu": 0.1, "memory": "128Mi", "pools": ["gpu"], "kinds": ["job"]}
    policy = yaml.safe_load(file_of(5, "policy.yaml"))
    policy["profiles"].append(pair)
    with portal.person("admin").client() as admin:
        admin.policy_apply(yaml.safe_dump(policy))
    ana.started({"profile": "gpu1", "team": "rnd"})
    with ana.client() as client:
        for profile in ("gpu1", "pair"):
            client.submit(JobRequest(command=["sleep", "3600"], profile=profile, team="rnd"))
    wait_until(lambda: [pod["status"]["phase"] for pod in api.items(WORKERS)] == ["Running"] * 3, "the jobs run")
    kinds = {kind for kind, _ in left_in(api, JOBS)}
    assert kinds >= {"pods", "secrets", "services", "networkpolicies"}

    *_, uninstall = blocks(section("Upgrade, roll back, uninstall"), "sh")[0].splitlines()
    with watched_policies(api) as unprotected:
        portal.walk.run(uninstall)
    assert not unprotected
    claims = {name for kind, name in left_in(api, NAMESPACE) if kind == "persistentvolumeclaims"}
    assert OWN_CLAIMS | {"home-ana"} <= claims <= OWN_CLAIMS | HOMES
    expected = {("persistentvolumeclaims", name) for name in claims | {CHECKPOINTS}} | OF_THE_TESTS
    wait_until(lambda: left_in(api, NAMESPACE, JOBS) <= expected, "nothing but the data is left")
    assert (portal.volume("makeway-hub") / "jupyterhub.sqlite").stat().st_size
    for path in (CLUSTER_WIDE.format("clusterroles"), CLUSTER_WIDE.format("clusterrolebindings"), PRIORITIES):
        assert not portal.release.names(path)


@contextmanager
def watched_policies(api: Api) -> Iterator[list[str]]:
    """Yield a list of the pods of the work that were there while their namespace's policy was not, during the block."""
    result, over = list[str](), threading.Event()

    def look() -> None:
        while not over.is_set():
            for path, pods, name in ((JOBS, WORKERS, "makeway-jobs"), (NAMESPACE, PODS, "makeway-notebook")):
                policies = {one["metadata"]["name"] for one in api.items(POLICIES.format(path))}
                work = api.items(pods, labelSelector="makeway/instance=makeway.makeway") if name not in policies else []
                result.extend(pod["metadata"]["name"] for pod in work)
            time.sleep(0.1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield result
    finally:
        over.set()
        looking.join()
