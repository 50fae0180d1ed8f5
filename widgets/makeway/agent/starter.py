"""Become the launcher of one worker, once for each folder, however often it is started: `agent --start-worker FOLDER`.

The order comes by standard input, and with it the worker's token, which is in no file, argument or environment; a
launcher in a container reads it from a pipe in its folder. An
agent that is killed between two lines leaves no worker that runs twice, and none that is not known: the process writes
who it is before it becomes the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys

from ..launcher.attempt import boot_id, start_time
from ..launcher.files import read_json, write_json
from .environment import NO_GPUS, machine_environment
from .init_script import own_record
from .programs import FLAGS, LAUNCHER, source_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EARLIER_RECORD = "worker.json"
"""In the folder of the worker: the record as agents of earlier releases have left it"""
TERMINATION = "termination.json"
NOT_STARTED = 125
GIVEN_UP = 124
"""The exit code of a start that another try does not help"""


def agent_file_of(folder: str, name: str) -> str:
    """Return the path of a file of the agent about a worker: not in its folder, where a job may put anything."""
    return f"{folder}.{name}"


def read_record(folder: str) -> dict[str, Any]:
    """Return who the launcher of a folder is; empty where none is known."""
    path = agent_file_of(folder, "json")
    return read_json(path if os.path.lexists(path) else os.path.join(folder, EARLIER_RECORD))


def start_worker(folder: str) -> int:
    """Become the launcher of the worker of a folder; return only if another process has, or is, or nothing is known."""
    data = sys.stdin.buffer.read()
    if not data:
        return NOT_STARTED  # the agent was killed meanwhile: the next one starts it
    order = json.loads(data)
    record = agent_file_of(folder, "json")
    with open(agent_file_of(folder, "lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_record(folder):
            return 0
        write_json(record, {})  # from here on nothing in the folder is taken for it
        if order["image"]:
            return _start_container(folder, order, record)
        env, arguments = _environment(folder, order), [sys.executable, *FLAGS, launcher(), "--remote"]
        token_fd = _pipe_with(order["token"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        order_fields = {name: order[name] for name in ("devices", "job", "attempt", "worker")}
        write_json(record, {**own_record(), **order_fields})
        env["MAKEWAY_ATTEMPT_TOKEN_FD"] = str(token_fd)
        os.execve(sys.executable, arguments, env)


def _start_container(folder: str, order: dict[str, Any], record: str) -> int:
    """Start the launcher in a container. It gets its token when it is on record: before, it can do nothing."""
    from . import containers

    try:
        container = containers.container_of(folder, order)
        containers.pull(container, folder)
        env = containers.container_environment(_environment(folder, order), order)
        command = ["python3", *FLAGS, launcher(), "--remote"]
        pid = containers.start(container, folder, {**order, "programs": source_folder()}, env, command)
        order_fields = {name: order[name] for name in ("devices", "job", "attempt", "worker")}
        named = {"pid": pid, "ticks": start_time(pid), "boot": boot_id()}
        write_json(record, {**named, **order_fields, "container": container.name, "runtime": container.runtime})
    except containers.ContainerProblem as problem:
        print(problem, file=sys.stderr)
        return GIVEN_UP if problem.last else NOT_STARTED
    except ProcessLookupError:
        containers.remove(container.runtime, container.name)
        print(f"the launcher in {container.image} ended at once", file=sys.stderr)
        return NOT_STARTED
    return 0 if containers.pass_token(folder, order["token"], pid) else NOT_STARTED


def launcher() -> str:
    """Return the folder of the launcher that came with this agent."""
    return os.path.join(source_folder(), LAUNCHER)


def _pipe_with(token: str) -> int:
    reading, writing = os.pipe()
    os.write(writing, token.encode())
    os.close(writing)
    os.set_inheritable(reading, True)
    return reading


def _environment(folder: str, order: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the launcher; that of the worker is in it as JSON."""
    shown = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, order["devices"]))}
    worker = {**shown, **order["env"], **(NO_GPUS if order["cpu_only"] else {})}
    checkpoints = order["checkpoints"] or os.path.join(os.path.dirname(folder), "checkpoints")
    with contextlib.suppress(OSError):  # the launcher says what is wrong with it
        os.makedirs(checkpoints, exist_ok=True)
    return {
        **machine_environment(),
        "MAKEWAY_ATTEMPT_URL": order["url"],
        "MAKEWAY_JOB_DIR": folder,
        "MAKEWAY_CHECKPOINT_DIR": checkpoints,
        "MAKEWAY_WORKER_ENV": json.dumps(worker),
        "MAKEWAY_TERMINATION_FILE": os.path.join(folder, TERMINATION),
    }


def recorded_exit_code(folder: str) -> int | None:
    """Return the exit code that the launcher of a folder has left; None where it has left none."""
    end = read_json(os.path.join(folder, TERMINATION)).get("exit")
    code = end.get("exit_code") if isinstance(end, dict) else None
    return code if isinstance(code, int) and not isinstance(code, bool) else None
