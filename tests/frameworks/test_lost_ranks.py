"""A rank that is lost while another waits for it in a collective of torch ends the attempt; its message says why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from training_jobs import TORCHRUN, Job, gang

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.covers("N12")]

WORDS = {
    "kill": "killed by SIGKILL (out of memory?)",
    "error": "rank 1: RuntimeError: a bad batch",
    "leave": "rank 1 had exited while others waited; rank 0: RuntimeError: ",
}


ALWAYS = ("torchrun", "notice", "kill")
"""In `make test`; the others only in `make test-frameworks`"""
CASES = [
    pytest.param(*case, marks=() if case == ALWAYS else pytest.mark.long)
    for case in product(("torchrun", "gang"), ("early", "notice", "save"), WORDS)
]


@pytest.mark.parametrize(("started", "when", "how"), CASES)
def test_a_lost_rank_is_named_and_after_a_notice_the_job_resumes(
    job: Callable[..., Job], port: str, started: str, when: str, how: str
) -> None:
    env = {"LOST": how, "WHEN": when, "NOTICED_RANK": "1"}
    if started == "torchrun":
        made = job("lost.py", *TORCHRUN, port, env=env)
    else:
        made = job("lost.py", env=env, workers=gang(port))
    first, *later = made.run([] if when == "early" else ["notice"]).attempts
    status = first.status
    assert not status["killed"], "it ends long before the deadline"
    assert (status["acknowledged"], status["completed"], status["step"]) == (False, False, 2), first.log[-3000:]
    assert "rank 1" in status["message"], first.log[-3000:]
    assert WORDS[how] in status["message"], first.log[-3000:]
    assert [attempt.code for attempt in later] == ([] if when == "early" else [0]), [one.log[-3000:] for one in later]
