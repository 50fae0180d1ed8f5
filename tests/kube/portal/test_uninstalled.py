"""What the portal asked of the API server until its end, and what it leaves; the last tests of their folder."""

from __future__ import annotations

import pytest
from charts import JOBS, NAMESPACE
from pods import wait_until
from portals import CHECKPOINTS, HOMES, OWN_CLAIMS, Portal
from releases import CLAIMS, DEPLOYMENTS, rights_used
from walk import blocks, section

from kube_cluster.portal import PARTS

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]


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


def test_uninstalled_the_portal_leaves_the_data(portal: Portal) -> None:
    portal.person("ana").stop()
    *_, uninstall = blocks(section("Upgrade, roll back, uninstall"), "sh")[0].splitlines()
    portal.walk.run(uninstall)
    wait_until(lambda: not any(portal.pods(part) for part in PARTS), "the pods of the portal are gone", pause=0.5)
    left = {one["metadata"]["name"] for one in portal.api.items(CLAIMS.format(NAMESPACE))}
    assert OWN_CLAIMS | {"home-ana"} <= left <= OWN_CLAIMS | HOMES
    assert portal.release.names(CLAIMS, JOBS) == {CHECKPOINTS}
    assert (portal.volume("makeway-hub") / "jupyterhub.sqlite").stat().st_size
    assert not portal.release.names(DEPLOYMENTS)
