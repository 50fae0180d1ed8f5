"""Notebooks of the chart's portal on the real node: what their starts tell, how they end, and who reads why.

Tests go on with the notebooks that those before them have left, where there are any.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime

import pytest
from charts import NAMESPACE
from makeway_api.models import Session
from pods import evict, kill, main_process, wait_until
from portals import IMAGES, OTHER_IMAGE, PODS, STARTED, Object, Person, Portal
from releases import CLAIMS

from kube_cluster.api import ApiProblem
from kube_cluster.node import Node
from kube_cluster.provisioner import VOLUMES, volume

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]

NAMED = {"name": "named", "title": "CPU only", "gpus": 0, "cpu": 0.1, "memory": "512Mi", "kinds": ["session"]}
HALF = {"name": "half", "title": "Half a GPU", "gpus": 0.5, "pools": ["gpu"], "policies": ["rnd"], "kinds": ["session"]}
LIMITS = f"/api/v1/namespaces/{NAMESPACE}/limitranges"
LIMIT = {
    "metadata": {"name": "disk"},
    "spec": {"limits": [{"type": "Container", "default": {"ephemeral-storage": "64Mi"}}]},
}
"""The site limits what a pod may write to the disk of its node."""
TEAMS = {"ana": "rnd", "bo": "devops"}
CLAIM = {
    "metadata": {"name": "home-bo--second"},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "volumeName": "by-hand",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}
"""The claim of bo's named server, for a volume that the site makes by hand."""
WAITS = "PersistentVolumeClaim"
GRACE = 30
"""Seconds that a notebook has to save: while they last, a pod on a node that does not answer may be saving."""
RECONCILED = 30.0
"""Seconds in which a lease ends once its pod has ended, or once the grace is over of a pod that no kubelet ends."""


@pytest.fixture(scope="module", autouse=True)
def site(portal: Portal) -> Iterator[None]:
    """Have more profiles, and a limit of the site; afterwards the portal is as it was."""
    portal.api.create(LIMITS, LIMIT)
    with portal.offering(NAMED | {"images": IMAGES}, HALF):
        yield
    for name in TEAMS:
        portal.person(name).stop("second")
        portal.api.delete(CLAIMS.format(NAMESPACE), fieldSelector=f"metadata.name=home-{name}--second")
    with suppress(ApiProblem):  # the test that makes it may not have run, as those of the claims above
        portal.api.delete(f"{VOLUMES}/by-hand")
    portal.api.delete(f"{LIMITS}/disk")


def options(person: Person, server: str = "") -> Object:
    """Return what a person chooses in the picker: one GPU of their team, and none for a named server."""
    return {"profile": "named", "image": "other"} if server else {"profile": "gpu1", "team": TEAMS[person.name]}


# -- what a start tells


@pytest.mark.covers("N06")
def test_a_part_of_a_gpu_is_refused_in_words_without_a_pod(portal: Portal) -> None:
    ana = portal.person("ana")
    answer = ana.hub("POST", "/users/ana/servers/half", json={"profile": "half", "team": "rnd"})
    assert answer.status_code == 409, answer.text
    assert "0.5 GPU" in answer.json()["message"]
    assert not portal.pods("notebook")


@pytest.mark.covers("F82", "N05")
def test_a_named_server_waits_for_its_volume_in_words_and_runs_the_image_that_was_chosen(portal: Portal) -> None:
    claim = portal.api.create(CLAIMS.format(NAMESPACE), CLAIM)
    bo = portal.person("bo")
    assert '<option value="other"' in bo.browser.get("/hub/spawn/bo/second").text
    bo.begin(options(bo, "second"), "second")
    with ThreadPoolExecutor(1) as reader:
        events = reader.submit(bo.progress, "second")
        wait_until(lambda: waits(portal, "FailedScheduling", WAITS), "the pod waits", STARTED)
        assert bo.server("second")["pending"] == "spawn"
        place = portal.cluster.volumes / "by-hand"
        made = volume(claim, place) | {"metadata": {"name": "by-hand"}}
        made["spec"]["hostPath"]["type"] = "Directory"  # its folder is not there yet
        portal.api.create(VOLUMES, made)
        wait_until(lambda: waits(portal, "FailedMount", "by-hand"), "the volume cannot be mounted", STARTED)
        place.mkdir()
        place.chmod(0o777)
        pod = bo.wait("second")
        message = [one["message"] for one in events.result()]
    assert pod["spec"]["containers"][0]["image"] == OTHER_IMAGE
    assert any("does not place the notebook yet" in one and WAITS in one for one in message)
    mounts = [
        number for number, one in enumerate(message) if one.startswith("A volume is not there yet") and "by-hand" in one
    ]
    assert mounts
    assert not any("has placed the notebook" in one for one in message[mounts[0] :]), (
        "the reason stays until it is over"
    )
    assert message[-1].startswith("Server ready at /user/bo/second")
    assert bo.session("second").profile == "named"


def waits(portal: Portal, reason: str, words: str) -> bool:
    """Whether Kubernetes has said for this reason, in these words, that a pod waits for its volume."""
    result = portal.api.items(f"/api/v1/namespaces/{NAMESPACE}/events", fieldSelector=f"reason={reason}")
    return any(words in one["message"] and "--second" in one["involvedObject"]["name"] for one in result)


# -- how notebooks end


@pytest.mark.covers("N07")
def test_a_notebook_on_a_node_that_does_not_answer_loses_its_lease_once(portal: Portal, real_node: Node) -> None:
    bo = portal.person("bo")
    pod, session = running(bo, "second"), bo.session("second")
    kubelet = real_node.service("kubelet")
    assert kubelet
    os.kill(kubelet, signal.SIGSTOP)
    try:
        # As by the taint of a node that does not answer, after the site's toleration; no kubelet confirms the end.
        portal.api.delete(f"{PODS}/{pod['metadata']['name']}")
        deleted = bo.notebook("second")["metadata"]
        assert deleted["deletionGracePeriodSeconds"] == GRACE
        ended_within(GRACE + RECONCILED, bo, session)
        over = datetime.fromisoformat(deleted["deletionTimestamp"])  # when its grace is over
        with bo.client() as client:
            ended = client.session(session.id).ended_at
        assert ended
        assert 0 <= (ended - over).total_seconds() < RECONCILED
        assert portal.runs(session), "it is not known to have ended"
        assert "Its node does not answer" in bo.told("second")
    finally:
        os.kill(kubelet, signal.SIGCONT)
    wait_until(lambda: not portal.runs(session), "its node has ended it", STARTED)


def running(person: Person, server: str) -> Object:
    """Return the pod of a server, which is started if it does not run."""
    if not person.server(server):
        person.begin(options(person, server), server)
    return person.wait(server)


def delete(person: Person, server: str) -> None:
    """Delete a person's pod by hand."""
    person.portal.api.delete(f"{PODS}/{person.notebook(server)['metadata']['name']}")


def drain(person: Person, server: str) -> None:
    """Evict a person's pod through the API."""
    evict(person.portal.api, person.notebook(server))


def crash(person: Person, server: str) -> None:
    """Kill a person's notebook server."""
    kill(person.notebook(server))


def fill_disk(person: Person, server: str) -> None:
    """Have the kubelet evict a person's pod, because it writes more than the site allows."""
    (main_process(person.notebook(server)) / "root" / "tmp" / "large").write_bytes(bytes(100_000_000))


ENDS = {
    ("ana", ""): (crash, "Its server ended by itself (Error: exit code 137)."),
    ("bo", ""): (fill_disk, "Its node evicted its pod (Evicted: Pod ephemeral local storage usage exceeds"),
    ("ana", "second"): (delete, "Its pod was deleted in Kubernetes, not by Makeway."),
    ("bo", "second"): (drain, "Its pod was evicted, as before maintenance of its node (EvictionByEvictionAPI"),
}


@pytest.mark.covers("N07", "F47")
def test_the_lease_of_a_notebook_that_ends_is_released_once_and_its_user_reads_why(portal: Portal) -> None:
    servers = {(name, server): portal.person(name) for name, server in ENDS}
    for (_, server), person in servers.items():
        if not person.server(server):
            person.begin(options(person, server), server)
    for (_, server), person in servers.items():
        person.wait(server)
    sessions = {key: person.session(key[1]) for key, person in servers.items()}
    for (name, server), (end, _) in ENDS.items():
        end(portal.person(name), server)
    for (name, server), (_, words) in ENDS.items():
        person = portal.person(name)
        session = sessions[name, server]
        wait_until(lambda session=session: not portal.runs(session), "the pod has ended", STARTED)
        ended_within(RECONCILED, person, session)
        assert words in person.told(server)
        assert "Files in /home/jovyan are kept; all other files were deleted." in person.page(server)


@pytest.mark.covers("N07")
def test_a_hub_that_is_drained_with_a_notebook_tells_why_it_ended_as_soon_as_it_has(portal: Portal) -> None:
    """The notebook's program hangs, so that its pod lives on while the new Hub looks at it, however long that takes."""
    ana = portal.person("ana")
    pod, session = running(ana, ""), ana.session()
    program = int(main_process(pod).name)
    os.kill(program, signal.SIGSTOP)
    with portal.renewed("hub"):
        evict(portal.api, pod, grace=STARTED)
        evict(portal.api, portal.pod("hub"))
    os.kill(program, signal.SIGKILL)
    wait_until(lambda: not portal.runs(session), "the pod has ended", STARTED)
    ended_within(RECONCILED, ana, session)
    assert "Its pod was evicted, as before maintenance of its node" in ana.told()


def ended_within(seconds: float, person: Person, session: Session) -> None:
    """Wait for the end of the lease of a session, which ended once."""
    with person.client() as client:
        wait_until(lambda: client.session(session.id).state.ended, "the lease has ended", seconds)
        verbs = [one.verb for one in client.decisions(workload=session.id)]
    assert verbs.count("start") == verbs.count("release") == 1, verbs
    assert "expire" not in verbs, verbs
