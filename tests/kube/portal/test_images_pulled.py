"""Images come to a node before they are needed, and one that cannot be pulled keeps no other one back."""

from __future__ import annotations

import copy

import pytest
from charts import NAMESPACE, Object
from pods import wait_until
from portals import VALUES, Portal

from kube_cluster import image_build

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

MISSING, NOTEBOOK = "registry.test/missing:1", image_build.name_of("notebook")
SERVICE = image_build.name_of("quota-service")


def ready(portal: Portal) -> dict[str, bool]:
    """Return whether each image is on the only node, as its DaemonSet says."""
    sets = portal.api.items(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets")
    return {one["metadata"]["annotations"]["makeway/image"]: one["status"].get("numberReady") == 1 for one in sets}


def waiting(portal: Portal) -> set[str]:
    """Return why images are waited for."""
    states: list[Object] = [
        status["state"] for pod in portal.pods("images") for status in pod["status"].get("initContainerStatuses", ())
    ]
    return {state["waiting"]["reason"] for state in states if "waiting" in state}


def test_an_image_that_cannot_be_pulled_keeps_no_other_back(portal: Portal) -> None:
    changed = copy.deepcopy(VALUES)
    changed["prePuller"] = {"images": [MISSING, SERVICE]}
    try:
        portal.walk.write_values(changed)
        portal.walk.step(10)
        wait_until(lambda: ready(portal) == {NOTEBOOK: True, MISSING: False, SERVICE: True}, "the others are pulled")
        wait_until(lambda: waiting(portal) & {"ErrImagePull", "ImagePullBackOff"}, "the missing one is not")
    finally:
        portal.walk.write_values(VALUES)
        portal.walk.step(10)
    wait_until(lambda: ready(portal) == {NOTEBOOK: True}, "its DaemonSet is gone")
