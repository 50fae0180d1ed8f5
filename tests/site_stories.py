"""The story of a site without a browser: a guaranteed notebook, training over quota that makes way, and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

from charts import JOBS, NAMESPACE, Object
from makeway_api.models import Job
from pods import wait_until
from portals import CHECKPOINTS, STARTED, WORKERS, Portal
from probing import output_in_pod
from stories import STEPS, TRAIN, training_cell, uninterrupted, weights

GPU1 = {"ana": {"profile": "gpu1", "team": "rnd"}, "bo": {"profile": "gpu1", "team": "devops"}}
"""What each person chooses in the picker."""
HURRY = 'pathlib.Path(os.environ["MAKEWAY_CHECKPOINT_DIR"], "hurry")'
WHO = "import getpass, os; print('user', getpass.getuser(), os.getuid(), os.path.expanduser('~'))"
SUBMIT = f"""
import os
os.chdir(os.path.expanduser("~"))
import makeway
{WHO}
print(makeway.submit({WHO + chr(10) + training_cell("trial", HURRY).partition(chr(10))[2]!r}, files=["train.py"],
                     name="trial", profile="gpu1").id)
"""
"""Submits from inside a notebook's pod, as its kernel does; the last line is the id of the job."""


def story(portal: Portal, folder: Path) -> list[Object]:
    """Train over quota from a guaranteed notebook, make way, and resume; return the pods that took part.

    The pool of the profile `gpu1` has two GPUs, one of which is guaranteed to each team.
    """
    expected = uninterrupted(folder)
    ana, bo = portal.person("ana"), portal.person("bo")
    notebook = ana.started(GPU1["ana"])
    shutil.copy(TRAIN, portal.volume("home-ana"))
    message = output_in_pod(portal.cluster, NAMESPACE, notebook["metadata"]["name"], SUBMIT).splitlines()
    user_of_notebook, id = next(line for line in message if line.startswith("user ")).split(), message[-1]
    assert user_of_notebook[1:3] == ["jovyan", str(user_of(notebook))]
    with ana.client() as client:
        wait_until(lambda: step_of(client.job(id)), "the job trains", STARTED)
        assert client.job(id).over_quota
        worker = pod_of(portal, client.job(id))
        assert f"user jovyan {user_of(worker)}" in client.logs(id).text

        other = bo.started(GPU1["bo"])
        wait_until(lambda: client.job(id).state.value == "pending", "the job has made way")
        victim = client.job(id)
        assert (victim.preemptions, victim.attempts[0].outcome) == (1, "preempted")
        assert victim.checkpoint is not None
        assert 0 < victim.checkpoint.step < STEPS

        bo.stop()
        wait_until(lambda: client.job(id).attempt == 2 and step_of(client.job(id)), "it resumes", STARTED)
        (portal.volume(CHECKPOINTS, JOBS) / id / "hurry").touch()
        wait_until(lambda: client.job(id).state.ended, "the job ends", STARTED)
        done = client.job(id)
        assert [attempt.outcome for attempt in done.attempts] == ["preempted", "succeeded"]
        log = client.logs(id, attempt=2).text
        assert f"going on at step {victim.checkpoint.step} of {STEPS}" in log
        assert weights(log) == expected
    wait_until(lambda: not portal.api.items(WORKERS, labelSelector=f"makeway/job={id}"), "no pod of the job is left")
    return [notebook, worker, other]


def pod_of(portal: Portal, job: Job) -> Object:
    """Return the pod of a job's attempt."""
    (result,) = portal.api.items(WORKERS, labelSelector=f"makeway/job={job.id}")
    return result


def step_of(job: Job) -> int:
    """Return the step that a job has reported."""
    return job.progress.step or 0 if job.progress else 0


def user_of(pod: Object) -> int:
    """Return the user of a pod's program."""
    (container,) = [one for one in pod["spec"]["containers"] if one["name"] in ("notebook", "worker")]
    for context in (container.get("securityContext", {}), pod["spec"]["securityContext"]):
        if "runAsUser" in context:
            return int(context["runAsUser"])
    raise AssertionError("no user is named")
