"""What a job and a list of jobs show: from memory, with the time at which it was true, and teams by their titles."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta

import pytest
from makeway import connection, submission, training
from makeway.submission import DryRunResult, Submission
from makeway.training import Job, Jobs
from makeway.words import full_clock
from makeway_api.client import Client
from makeway_api.models import DryRun, JobRequest, Offer, State, Victim
from samples import NOW, ago, job, noticed


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Connect this process with a service that answers nothing; yield what is asked of it."""
    asked: list[str] = []

    class Silent:
        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise AssertionError(f"{name} was asked")

    monkeypatch.setattr(training, "client", Silent)
    yield asked
    connection.disconnect()


def test_a_repr_asks_the_service_nothing(silent: list[str]) -> None:
    """A tooltip over a list of nine must not wait for a service that is silent."""
    jobs = Jobs(Job(job(id=f"j-{n}")) for n in range(9))
    for one in jobs:
        one._at -= 3600
        one._known_at -= timedelta(hours=1)
        assert "running" in repr(one)
        assert "running" in one._repr_html_()
    assert "running" in repr(jobs)
    assert "running" in repr({"jobs": jobs})
    assert jobs._repr_mimebundle_()["text/html"]
    assert silent == []


def test_what_is_shown_says_of_which_time_it_is(silent: list[str]) -> None:
    old = Job(job())
    old._known_at = ago(7200)
    assert f"As of    {full_clock(ago(7200))}" in repr(old)
    assert full_clock(ago(7200)) in old._repr_html_()
    assert full_clock(ago(7200)) in Jobs([old, Job(job(id="j-2"))])._repr_html_()


def test_sums_copies_and_slices_of_jobs_are_jobs() -> None:
    one, two = Job(job(id="j-1")), Job(job(id="j-2"))
    jobs, other = Jobs([one], owner=True), Jobs([two])
    for made in (
        jobs + other,
        jobs.copy(),
        copy.copy(jobs),
        jobs[:1],
        jobs * 2,
        2 * jobs,
        jobs.__radd__([two]),
    ):
        assert type(made) is Jobs
        assert made.owner
        assert "OWNER" in repr(made)
    assert (jobs + other)[1] is two
    assert list(jobs) == [one]


def test_jobs_of_the_service_name_their_teams_by_title(ana: Client) -> None:
    made = ana.submit(JobRequest(name="titled", command=["sleep", "60"], profile="gpu1"))
    assert made.titles == {"rnd": "R&D"}
    (listed,) = (job for job in ana.jobs(mine=True).jobs if job.id == made.id)
    assert listed.title("rnd") == "R&D"
    assert "team R&D" in repr(Job(made))
    answer = ana.dry_run(JobRequest(command=["true"], profile="gpu1"))
    assert answer.offer.team_title == "R&D"
    assert "gpu1 in R&D." in repr(DryRunResult(answer))


def test_a_service_of_before_names_them_by_id() -> None:
    assert job(titles={}).title("rnd") == "rnd"
    assert "team rnd" in repr(Job(job(titles={})))


def test_risk_and_notice_name_teams_by_title() -> None:
    over = job(over_quota=True, borrowed_from=["devops"])
    text = " ".join(submission.risk(Job(over), Submission(source="1")).split())
    assert "R&D's reservation does not cover" in text
    assert "It runs on GPUs of DevOps" in text
    assert "makes way for DevOps (bo)" in repr(Job(noticed()))
    offer = Offer(
        profile="gpu1", team="rnd", team_title="R&D", code="ready_after_reclaim", message="", seconds=30,
        victims=[Victim(id="", name="", team="devops", team_title="DevOps", owner="", gpus=2)],
    )  # fmt: skip
    shown = repr(DryRunResult(DryRun(offer=offer, command=["true"], files=0, bytes=0)))
    assert "work of DevOps (2 GPUs)" in shown


def test_a_job_that_waits_shows_its_end_everywhere() -> None:
    ended = Job(job())
    ended._keep(job(State.SUCCEEDED, ended_at=NOW, version=2))
    assert "succeeded" in repr(ended)
