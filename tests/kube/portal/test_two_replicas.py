"""Two replicas of the chart live through random kills, freezes and partitions while people work: nothing runs twice."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest
from charts import JOBS, Object
from pod_faults import PodProcesses
from pods import wait_until
from portals import PODS, VALUES, Portal
from releases import requests
from replica_pair import Follower, Pair, Submitter, claim, lines_of
from replicated import TWO, upgrade

from kube_cluster.api import ApiProblem

pytestmark = [pytest.mark.kube, pytest.mark.timeout(6000)]

SEED = int(os.environ.get("SEED", "20261123"))
FAULTS = int(os.environ.get("FAULTS", "2"))
ALL = 60
"""`FAULTS=60 make kube-test ARGS="-k live_through_faults"`."""
TAKEOVER = 15.0
"""Seconds; looked at with all faults only, as any single one may meet a machine that is busy with other tests."""


@contextmanager
def at_work(portal: Portal, longest: float, anas: int, bos: int) -> Iterator[list[Submitter]]:
    """Have ana keep so many jobs of so many seconds at most, and bo so many short ones, during the block."""
    ana, bo = Submitter(portal, "ana", SEED, anas, (1.0, longest)), Submitter(portal, "bo", SEED, bos, (0.5, 2.0))
    for one in (ana, bo):
        one.start()
    try:
        yield [ana, bo]
    finally:
        for one in (ana, bo):
            one.stop()


@pytest.mark.covers("N24", "N07", "F42", "F47")
@pytest.mark.no_repeat
def test_they_live_through_faults(replicated: Portal) -> None:
    portal = replicated
    pair = Pair(portal, SEED)
    with requests(portal.cluster, "makeway-service") as asked:
        with at_work(portal, 8.0, 3, 0) as people:
            for _ in range(FAULTS):
                claim(*people)
                pair.harm()
            close(pair.replicas())
        jobs = [job for person in people for job in person.ended()]
    took = sorted(seconds for seconds, _ in pair.takeovers)
    print(
        f"{FAULTS} faults, {len(jobs)} jobs, {sum(job.preemptions for job in jobs)} made way; takeover of "
        f"{len(took)} leaders: median {median(took):.1f} s, worst {max(pair.takeovers)}; "
        f"frozen ones got no requests any more after {[round(seconds, 1) for seconds in pair.withdrawn]} s; "
        f"requests that failed: {sum((person.failures for person in people), Counter[str]())}"
    )
    assert {job.id: job.name for job in jobs} == acknowledged(people)
    assert any(job.preemptions for job in jobs)
    for job in jobs:
        outcomes = [attempt.outcome for attempt in job.attempts]
        assert outcomes == ["preempted"] * job.preemptions + ["succeeded"], job
    # One that made way before it began has no line.
    lines = lines_of(portal, jobs)
    assert {line: count for line, count in lines.items() if count > 1 or line.endswith("meets-another")} == {}
    started, remaining, ended = (
        Counter(line.split()[0] for line in lines if line.endswith(what)) for what in ("begins", "makes-way", "ends")
    )
    assert ended == {job.name: 1 for job in jobs}
    assert {name: count - 1 for name, count in started.items() if count > 1} == remaining, "who made way had saved"
    anew = made_anew(asked)
    print(f"pods that were made anew: {anew}")
    # Their start broke off before their tokens were written (`backend._anew`): the first ones never ran.
    started_pods = uids_of_started_pods(portal)
    assert {name: uids for name in anew if len(uids := started_pods[name]) > 1} == {}
    assert {name: told for name, told in anew.items() if "create create" in " ".join(told)} == {}
    assert FAULTS < ALL or took[-1] < TAKEOVER


@pytest.mark.covers("F80", "N06", "N07", "N21", "N24")
def test_a_drain_and_an_upgrade_lose_no_request_and_no_work(replicated: Portal) -> None:
    portal = replicated
    ana = portal.person("ana")
    notebook = ana.started({"profile": "gpu1", "team": "rnd"})["metadata"]["uid"]
    session = ana.session()
    pair = Pair(portal, SEED)
    widget = Follower(ana)
    widget.start()
    with at_work(portal, 3.0, 1, 1) as people:
        first, second = close(pair.replicas())
        wait_until(lambda: evicted(portal, first.name), "the budget allows to evict one")
        assert not evicted(portal, second.name), "only one at a time"
        old = {first.name} | {pod["metadata"]["name"] for pod in portal.pods("service")}
        upgrade(portal, VALUES | TWO | {"service": {"podAnnotations": {"example.com/at": "now"}}})
        wait_until(lambda: not old & {pod["metadata"]["name"] for pod in portal.pods("service")}, "all pods are new")
        close(pair.replicas())
    jobs = [job for person in people for job in person.ended()]
    assert [person.failures for person in people] == [Counter(), Counter()]
    assert {job.id: job.name for job in jobs} == acknowledged(people)
    for job in jobs:
        assert [attempt.outcome for attempt in job.attempts] == ["preempted"] * job.preemptions + ["succeeded"], job
    wait_until(lambda: widget.jobs >= people[0].acknowledged.keys(), "the widget has heard of all of ana's jobs")
    wait_until(lambda: widget.streams > 1, "a replica that ends closes its streams")
    widget.stop()
    assert not widget.missed
    assert ana.notebook()["metadata"]["uid"] == notebook
    assert "jupyter-config-data" in ana.browser.get("/user/ana/lab").text
    assert (ana.session().id, ana.session().state) == (session.id, session.state)


def acknowledged(people: list[Submitter]) -> dict[str, str]:
    """Return the names of all jobs whose submission was answered, by id."""
    return {id: name for person in people for id, name in person.acknowledged.items()}


def close(replicas: list[PodProcesses]) -> list[PodProcesses]:
    """Close the network namespaces of replicas, and return them."""
    for replica in replicas:
        replica.close()
    return replicas


def evicted(portal: Portal, pod: str) -> bool:
    """Evict a pod as the drain of a node does; return whether the budget allowed that."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        portal.api.create(f"{PODS}/{pod}/eviction", eviction)
    except ApiProblem as problem:
        if problem.status == 429:
            return False
        raise
    return True


def made_anew(asked: list[Object]) -> dict[str, list[str]]:
    """Return what the service did to each name under which it created more than one pod, as `create` and `delete`."""
    told = defaultdict[str, list[str]](list)
    for one in sorted(asked, key=lambda one: str(one["requestReceivedTimestamp"])):
        of, code = one.get("objectRef", {}), one["responseStatus"]["code"]
        if one["verb"] in ("create", "delete") and of.get("resource") == "pods" and code in (200, 201, 202):
            told[of["name"]].append(one["verb"])
    return {name: verbs for name, verbs in told.items() if verbs.count("create") > 1}


def uids_of_started_pods(portal: Portal) -> dict[str, set[str]]:
    """Return, by name, the UIDs of the pods of jobs of which the kubelet started a container."""
    result = defaultdict[str, set[str]](set)
    for event in portal.api.items(f"/api/v1/namespaces/{JOBS}/events", fieldSelector="reason=Started"):
        result[event["involvedObject"]["name"]].add(event["involvedObject"]["uid"])
    return result
