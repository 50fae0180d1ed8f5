"""Provision volumes for the claims of the cluster: each is a folder of this machine, mounted by its path.

A thread of the cluster's process does what a storage provisioner does elsewhere, for claims of every storage class that
are not labelled `makeway.test/provisioned: "false"`. The folder is removed when its claim is deleted, and all of them
with the cluster.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from .api import Api, ApiProblem, Object

log = logging.getLogger("kube_cluster.provisioner")

CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
LABEL = "makeway.test/provisioned"
POLL_SECONDS = 0.5


@contextmanager
def running(folder: Path, kubeconfig: Path) -> Iterator[None]:
    """Provide volumes in this folder until the end of the block."""
    folder.mkdir(exist_ok=True)
    api, end = Api(kubeconfig), threading.Event()

    def work() -> None:
        while not end.wait(POLL_SECONDS):
            try:
                provision(api, folder)
            except (ApiProblem, httpx2.HTTPError):  # the API server is away, or a claim is new just now
                continue
            except Exception:  # claims would wait for ever
                log.exception("Volumes could not be looked after; it is tried again")

    thread = threading.Thread(target=work, name="volumes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        api.close()


def provision(api: Api, folder: Path) -> None:
    """Make the volumes that claims wait for, and remove those whose claims are deleted."""
    there = {one["metadata"]["name"]: one for one in api.items(VOLUMES, labelSelector=LABEL)}
    for claim in api.items(CLAIMS, labelSelector=f"{LABEL}!=false"):
        waits = claim["status"].get("phase") == "Pending" and not claim["spec"].get("volumeName")
        if waits and name_of(claim) not in there:
            try:
                _provide(api, claim, folder / name_of(claim))
            except (OSError, KeyError) as error:  # others get theirs all the same
                log.warning("The claim %s gets no volume yet: %r", claim["metadata"]["name"], error)
    for name, one in there.items():
        if one["status"].get("phase") == "Released" and "deletionTimestamp" not in one["metadata"]:
            api.delete(f"{VOLUMES}/{name}")
            shutil.rmtree(folder / name, ignore_errors=True)


def _provide(api: Api, claim: Object, place: Path) -> None:
    described = volume(claim, place)
    place.mkdir(exist_ok=True)
    place.chmod(0o777)  # pods run as users of their own, and the kubelet changes no owner here
    api.create(VOLUMES, described)


def name_of(claim: Object) -> str:
    """Return the name of a claim's volume and of its folder."""
    return f"pvc-{claim['metadata']['uid']}"


def volume(claim: Object, place: Path) -> Object:
    """Return a volume for this claim alone."""
    kept = {key: claim["metadata"][key] for key in ("namespace", "name", "uid")}
    return {
        "metadata": {"name": name_of(claim), "labels": {LABEL: "true"}},
        "spec": {
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "storageClassName": claim["spec"].get("storageClassName") or "",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(place)},
            "claimRef": kept,
        },
    }
