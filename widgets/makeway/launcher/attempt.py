"""Hold one attempt of a job in its launcher: the order, the folders, and the claim that makes the launcher unique."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex

from .files import create_file, read_json, write_json, write_whole
from .processes import stat
from .removal import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "library")
"""The folder from which jobs import `makeway.checkpoint` where their Python has no Makeway"""


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, which identifies it together with the pid."""
    if (process := stat(pid)) is None:
        raise ProcessLookupError(errno.ESRCH, "there is no such process", str(pid))
    return process.start


def boot_id() -> str:
    """Return the id of this boot of the machine: pids and start times of another boot mean nothing."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


CREDENTIALS = "credentials"
"""The folder of an attempt with the files of its credentials"""
GIT_CREDENTIALS = "git-credentials"


def _git_settings(path: str, env: dict[str, str]) -> dict[str, str]:
    """Return the variables by which Git reads its credentials from a file; none where there is no such file."""
    if not os.path.isfile(path):
        return {}
    given = env.get("GIT_CONFIG_COUNT", "")
    count = int(given) if given.isdecimal() else 0
    return {
        "GIT_CONFIG_COUNT": str(count + 1),
        f"GIT_CONFIG_KEY_{count}": "credential.helper",
        f"GIT_CONFIG_VALUE_{count}": "store --file=" + shlex.quote(path),
    }


class Attempt:
    """One attempt of a job: its order and its folders.

    JOB/work (the working directory), JOB/checkpoints or where the order has them (the same over all attempts),
    JOB/attempt-N (log, reports).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.number = int(order["attempt"])
        self.job = os.path.abspath(order.get("directory") or os.environ.get("MAKEWAY_JOB_DIR") or ".")
        self.work = os.path.join(self.job, "work")
        self.checkpoints = order.get("checkpoints") or os.path.join(self.job, "checkpoints")
        self.home = os.path.join(self.job, f"attempt-{self.number}")
        self.credentials = ""
        """The folder of the job's credentials, where it has any"""

    def path(self, name: str) -> str:
        """Return the path of a file of this attempt."""
        return os.path.join(self.home, name)

    def claim(self) -> bool:
        """Become the only launcher of this attempt; return False if there was one before."""
        for directory in (self.work, self.home):  # not that of the checkpoints, whose volume may hang
            os.makedirs(directory, mode=0o700, exist_ok=True)
        mine = self.path(f"launcher.json.{os.getpid()}")
        write_json(mine, {"pid": os.getpid(), "start_time": start_time(os.getpid()), "boot": boot_id()})
        try:
            os.link(mine, self.path("launcher.json"))
        except FileExistsError:
            return False
        finally:
            os.unlink(mine)
        return True

    def write_files(self, content: Callable[[dict[str, Any]], bytes]) -> None:
        """Write the order's files below the working directory; files of an earlier attempt stay."""
        for entry in self.order.get("files", ()):
            data = content(entry)
            path = os.path.normpath(os.path.join(self.work, entry["path"]))
            if os.path.commonpath([path, self.work]) != self.work or path == self.work:
                raise OSError(errno.EPERM, "a file outside of the working directory", entry["path"])
            if os.path.lexists(path):
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = create_file(f"{path}.part")
            try:
                write_whole(descriptor, data)
                os.fchmod(descriptor, 0o755 if entry.get("executable") else 0o644)
            finally:
                os.close(descriptor)
            os.replace(f"{path}.part", path)

    def write_credentials(self) -> None:
        """Write the order's credentials to files that only the job's account reads; the order keeps none of them."""
        files = self.order.pop("credentials", None)
        if not isinstance(files, dict) or not files:
            return
        folder = self.path(CREDENTIALS)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.credentials = folder
        for name, content in files.items():
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise OSError(errno.EPERM, "a credential whose name is no name of a file", name)
            descriptor = create_file(os.path.join(folder, name), 0o600)
            try:
                write_whole(descriptor, content.encode())
            finally:
                os.close(descriptor)

    def remove_credentials(self) -> None:
        """Remove the files of credentials once no process of the job is left."""
        if self.credentials:
            remove_tree(self.credentials)

    def inherit_progress(self) -> None:
        """Take over the progress of an earlier attempt, whose checkpoint is still there."""
        before = self.order.get("progress")
        if before is None:
            before = read_json(os.path.join(self.job, f"attempt-{self.number - 1}", "progress.json"))
        kept = {str(key): before[key] for key in ("step", "saved_at") if key in before}
        if kept and not os.path.lexists(self.path("progress.json")):
            write_json(self.path("progress.json"), kept)

    def listeners(self, worker: int) -> str:
        """Return the folder in which the processes of one worker register as listening; it is made."""
        folder = self.path(os.path.join("listeners", str(worker)))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    def environment(self, worker: dict[str, Any], listeners: str) -> dict[str, str]:
        """Return the environment of one worker, whose processes register in the folder `listeners`."""
        order = self.order
        own = {
            "MAKEWAY_JOB_ID": order["workload"],
            "MAKEWAY_JOB_NAME": order.get("name", ""),
            "MAKEWAY_ATTEMPT": str(self.number),
            "MAKEWAY_TEAM": order.get("team", ""),
            "MAKEWAY_PROFILE": order.get("profile", ""),
            "MAKEWAY_JOB_DIR": self.job,
            "MAKEWAY_CHECKPOINT_DIR": self.checkpoints,
            "MAKEWAY_STOP_FILE": self.path("stop.json"),
            "MAKEWAY_LISTENERS": listeners,
            "MAKEWAY_PROGRESS_FILE": self.path("progress.json"),
            "MAKEWAY_RESULT_FILE": self.path("result.pkl"),
            "MAKEWAY_ERROR_FILE": self.path("error.json"),
            "MAKEWAY_SIGNAL": order.get("signal", "SIGTERM"),
            "MAKEWAY_GRACE": str(order.get("grace", 30)),
        }
        shutdown = str(math.ceil(float(order.get("grace", 30))))  # torchrun reads whole seconds only
        preset = {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": shutdown}
        env = {**preset, **os.environ, **order.get("env", {}), **own, **worker.get("env", {})}
        if self.credentials:
            env["MAKEWAY_CREDENTIALS"] = self.credentials
            env.update(_git_settings(os.path.join(self.credentials, GIT_CREDENTIALS), env))
        if os.path.isdir(LIBRARY):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), LIBRARY]))
        return env
