"""Ranks of one job without torch: they agree, save together, stop at one step, and do not strand each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from job_process import ask, progress, start

LOOP = """
import os, sys
from pathlib import Path
from makeway import checkpoint

rank, kept = int(os.environ["RANK"]), []

def save(folder):
    (folder / "state").write_text(f"{rank} {kept[-1:]}")

def load(folder):
    kept.append((folder / "state").read_text())

steps = int(os.environ.get("STEPS", "100")) + rank * int(os.environ.get("MORE", "0"))
for step in checkpoint.loop(steps, save, load, every=10):
    kept.append(step)
    if step == 33 and rank == int(os.environ.get("HEARS", "-1")):
        os.environ["MAKEWAY_STOP_FILE"] = os.environ["HEARD"]
print(json := [kept[0], kept[-1], len(kept)])
"""


def gang(tmp_path: Path, code: str, size: int = 2, **more: str) -> list[tuple[int, str, str]]:
    """Run the ranks to their end; return their exit codes and what they wrote."""
    started = [start(tmp_path, code, RANK=str(n), WORLD_SIZE=str(size), **more) for n in range(size)]
    try:
        ends = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("hears", [0, 1, 2])
def test_all_ranks_stop_at_one_step_whichever_hears_first_and_resume(tmp_path: Path, hears: int) -> None:
    ask(tmp_path)
    (tmp_path / "stop.json").rename(tmp_path / "heard.json")
    heard = str(tmp_path / "heard.json")
    first = gang(tmp_path, LOOP, size=3, HEARS=str(hears), HEARD=heard)
    assert [code for code, *_ in first] == [75, 75, 75], first
    [newest] = [
        name for name in os.listdir(tmp_path / "kept") if name.startswith("step-00003") and name > "step-000030"
    ]
    texts = {
        n: (tmp_path / "kept" / newest / part / "state").read_text() for n, part in enumerate(("", "rank-1", "rank-2"))
    }
    step = int(newest.removeprefix("step-")) - 1
    assert texts == {n: f"{n} [{step}]" for n in range(3)}
    second = gang(tmp_path, LOOP, size=3, MAKEWAY_ATTEMPT="2")
    assert [code for code, *_ in second] == [0, 0, 0], second
    assert [out for _, out, _ in second] == [f"['{n} [{step}]', 99, {100 - step}]\n" for n in range(3)]
    assert progress(tmp_path)["completed_at"]


@pytest.mark.slow
def test_a_rank_with_fewer_steps_waits_for_the_others(tmp_path: Path) -> None:
    ends = gang(tmp_path, LOOP, STEPS="5", MORE="20")
    assert [(code, out) for code, out, _ in ends] == [(0, "[0, 4, 5]\n"), (0, "[0, 24, 25]\n")], ends


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    assert [code for code, *_ in gang(tmp_path, LOOP, STEPS="12")] == [0, 0]
    (tmp_path / "kept" / ".complete.json").unlink()
    ends = gang(tmp_path, LOOP, size=3, STEPS="12", MAKEWAY_ATTEMPT="2")
    assert [code for code, *_ in ends] == [1, 1, 1]
    assert all("was saved by 2 ranks, and now there are 3" in error for *_, error in ends)


TOGETHER = """
import os
from makeway import checkpoint
rank = os.environ["RANK"]
try:
    with checkpoint.saving(5 + int(os.environ.get("OFF", "0")) * int(rank), together=True) as folder:
        (folder / f"part-{rank}").write_text(rank)
        if rank == os.environ.get("FAILS"):
            raise OSError(28, "No space left on device")
except Exception as error:
    print(type(error).__name__, error)
print(sorted(os.listdir(checkpoint.latest())) if checkpoint.latest() else None)
"""


OTHERWISE = """
import os
from pathlib import Path

if os.environ["RANK"] == "1":
    read = Path.read_text

    def read_otherwise(path, *args, **more):
        if ".sizes" not in str(path) or "step-000025" not in str(path):
            return read(path, *args, **more)
        if os.environ["HOW"] == "stale":
            raise OSError(116, "Stale file handle")
        return '{"state": 1000000}'

    Path.read_text = read_otherwise
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("stale", "RuntimeError: rank 1 cannot read the newest checkpoint", "step-000025 cannot be read, so that"),
        (
            "damaged",
            "one from step-000025 and another one from step-000020",
            "step-000025 in .* is damaged: its file",
        ),
    ],
)
def test_ranks_that_find_different_checkpoints_resume_from_none(
    tmp_path: Path, how: str, first: str, second: str
) -> None:
    assert [code for code, *_ in gang(tmp_path, LOOP, STEPS="25")] == [0, 0]
    ends = gang(tmp_path, OTHERWISE + LOOP, STEPS="30", HOW=how, MAKEWAY_ATTEMPT="2")
    assert [(code, out) for code, out, _ in ends] == [(1, ""), (1, "")], ends
    for (*_, error), expected in zip(ends, (first, second), strict=True):
        assert re.search(expected, error), error
    assert [code for code, *_ in gang(tmp_path, LOOP, STEPS="30", MAKEWAY_ATTEMPT="3")] == [0, 0], "nothing is lost"


@pytest.mark.slow
def test_ranks_save_into_one_folder(tmp_path: Path) -> None:
    ends = gang(tmp_path, TOGETHER, size=3)
    assert [out for _, out, _ in ends] == ["['part-0', 'part-1', 'part-2']\n"] * 3, ends
    assert [name for name in os.listdir(tmp_path / "kept") if name[0] != "."] == ["step-000005"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["0", "1"])
def test_a_rank_that_cannot_save_makes_none_save(tmp_path: Path, fails: str) -> None:
    ends = gang(tmp_path, TOGETHER, FAILS=fails)
    assert [code for code, *_ in ends] == [0, 0]
    own, other = ends[int(fails)][1], ends[1 - int(fails)][1]
    assert "OSError" in own
    assert "full: step 5 was not saved" in own
    assert other == f"RuntimeError rank {fails} could not save step 5, so no rank has saved it\nNone\n"
    assert not [name for name in os.listdir(tmp_path / "kept") if "5" in name and not name.startswith(".ranks")]


@pytest.mark.slow
def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    ends = gang(tmp_path, TOGETHER, OFF="2")
    assert all("ValueError the ranks save together at different steps, 5 to 7" in out for _, out, _ in ends), ends


AGREED = """
import os, signal, sys, time
from makeway import checkpoint
rank = int(os.environ["RANK"])
print(checkpoint.agreed(), flush=True)
if rank == 1 and os.environ["DIES"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and os.environ["DIES"] == "ended":
    sys.exit(0)
if rank == 1 and os.environ["DIES"] == "hangs":
    time.sleep(30)
checkpoint.agreed()
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["killed", "ended"])
def test_a_lost_rank_does_not_strand_the_others(tmp_path: Path, dies: str) -> None:
    ends = gang(tmp_path, AGREED, DIES=dies)
    code, out, error = ends[0]
    assert (code, out) == (1, "False\n")
    assert "rank 1 has ended while rank 0 waited for it" in error


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_until_half_of_the_grace_is_over(tmp_path: Path) -> None:
    import time

    ask(tmp_path, deadline=time.time() + 8)
    waiting = start(tmp_path, AGREED, RANK="0", WORLD_SIZE="2", DIES="hangs")
    try:
        _, error = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 1
    assert "rank 1 did not arrive within" in error
    assert "the grace period is running out" in error


@pytest.mark.slow
def test_files_of_an_earlier_start_are_not_taken_for_ranks(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "kept" / ".ranks").mkdir(parents=True, exist_ok=True)
        for rank in range(2):
            leftover = {
                "word": "old",
                "session": "old",
                "listed": ["old"],
                "calls": {"1": [1], "2": [1]},
                "ended": False,
            }
            (tmp_path / "kept" / ".ranks" / f"rank-{rank}.json").write_text(
                json.dumps({**leftover, "host": "?", "pid": 1})
            )
        ends = gang(tmp_path, AGREED, DIES="no")
        assert [(code, out) for code, out, _ in ends] == [(0, "False\n")] * 2, ends


@pytest.mark.slow
def test_ranks_that_see_different_folders_fail_with_the_reason(tmp_path: Path) -> None:
    quick = AGREED.replace(
        "rank = int", "from makeway.checkpointing import ranks; ranks.RENDEZVOUS_SECONDS = 0.5; rank = int"
    )
    started = [
        start(
            tmp_path, quick, RANK=str(n), WORLD_SIZE="2", DIES="no", MAKEWAY_CHECKPOINT_DIR=str(tmp_path / f"own-{n}")
        )
        for n in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1]
    assert all("all ranks need the same folder of checkpoints" in error for error in errors), errors


def test_without_ranks_agreed_is_requested(tmp_path: Path) -> None:
    ask(tmp_path)
    code = "from makeway import checkpoint; print(checkpoint.agreed())"
    process: subprocess.Popen[str] = start(tmp_path, code)
    assert process.communicate(timeout=60)[0] == "True\n"
