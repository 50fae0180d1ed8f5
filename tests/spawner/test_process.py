"""Processes of a session are found by their environment, and killed with everything they fork."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import uuid4

from makeway_spawner.process import kill_marked, marked, start_ticks

FORKS = """
import os, time
for n in range(500):
    time.sleep(0.002)
    if n == 2:
        print("up", flush=True)
    if not os.fork():
        time.sleep(60)
        os._exit(0)
"""


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    mine = start_ticks(os.getpid())
    assert mine > 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert start_ticks(child.pid) >= mine
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) == 0, "a zombie is not running"
    assert start_ticks(2**22 + 1) == 0


def test_processes_are_found_by_their_environment() -> None:
    session = uuid4().hex
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "MAKEWAY_SESSION": session}) as child:
        assert list(marked("MAKEWAY_SESSION", session)) == [child.pid]
        assert list(marked("MAKEWAY_SESSION", session[:-1])) == []
        assert kill_marked("MAKEWAY_SESSION", session) == 1
        assert child.wait(10) == -9
    assert list(marked("MAKEWAY_SESSION", session)) == []


def test_what_a_process_forks_meanwhile_is_killed_too() -> None:
    session = uuid4().hex
    env = {**os.environ, "MAKEWAY_SESSION": session}
    with subprocess.Popen([sys.executable, "-c", FORKS], env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        assert first.stdout.readline() == "up\n"
        assert kill_marked("MAKEWAY_SESSION", session) > 1
        assert list(marked("MAKEWAY_SESSION", session)) == []
