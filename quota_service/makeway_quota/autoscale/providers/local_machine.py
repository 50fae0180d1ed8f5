"""Run one machine of the local provider: boot, init script, then nothing until it is ended. Standard library only.

A process of its own session, so that it outlives the service as a machine of a cloud does. Started by `local`, maybe
twice: the second one ends at once. What happens is in the files of its folder: `process.json`, `console.log`,
`init.json`, `spot-notice.json`. All of its processes have the folder in their environment, by which they are found.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CONSOLE_BYTES = 1_000_000
"""Of a console that are kept: more would fill the disk"""
PAUSE = 0.1
MARK = "LOCAL_MACHINE_FOLDER"
"""Environment variable of all processes of a machine: its folder"""
FULL_DISK = "ulimit -f 0; "
"""Every write to a file fails"""


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since the boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Return the id of this boot of the host: a pid of another one means nothing."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> Any:
    """Return the value of a file, None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def processes(folder: Path, process: dict[str, Any] | None) -> list[int]:
    """Return the pids of what runs on a machine: by its mark, also if it left the session, or by its session.

    `process`: the content of `process.json`. A session whose number belongs to a later process is another one.
    """
    mark = f"{MARK}=".encode() + os.fsencode(folder)
    session = None
    if process is not None and process["boot"] == boot_id() and start_ticks(process["pid"]) in (None, process["ticks"]):
        session = process["pid"]
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _belongs(int(name), mark, session):
            found.append(int(name))
    return found


def _belongs(pid: int, mark: bytes, session: int | None) -> bool:
    if start_ticks(pid) is None:
        return False
    with suppress(OSError):
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
    with suppress(OSError):
        return session is not None and os.getsid(pid) == session
    return False


def _over(folder: Path) -> bool:
    """Whether the machine was ended, or its spot deadline has come."""
    notice = read_json(folder / "spot-notice.json")
    return (folder / "ended.json").exists() or bool(notice and time.time() >= notice["deadline"])


def _wait(folder: Path, until: float | None) -> bool:
    """Wait until a time (None: for ever); False if the machine was ended before."""
    while not _over(folder):
        if until is not None and time.time() >= until:
            return True
        time.sleep(PAUSE)
    return False


def _initialise(folder: Path, request: dict[str, Any], facts: dict[str, Any]) -> None:
    """Run the init script, with its output on the console and its exit code in a file."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    script = request.get("init_script") or ":"
    limits = FULL_DISK if facts.get("full_disk") else ""
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(disk),
        "LANG": "C.UTF-8",
        MARK: str(folder),
    }
    if request.get("cpu_only"):
        environment |= {"CUDA_VISIBLE_DEVICES": "none", "NVIDIA_VISIBLE_DEVICES": "none"}
    with subprocess.Popen(
        ["/bin/sh", "-c", f'{limits}exec /bin/sh -c "$0"', script],
        cwd=disk,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        written = 0
        with (folder / "console.log").open("ab") as console:
            while process.stdout is not None and (data := os.read(process.stdout.fileno(), 65_536)):
                console.write(data[: max(0, CONSOLE_BYTES - written)])
                console.flush()
                written += len(data)
    code = 1 if facts.get("init_fails") else process.returncode
    write_json(folder / "init.json", {"exit_code": code, "at": time.time()})


def main(folder: Path) -> None:
    """Be the machine of a folder until it is ended; return at once if another process is."""
    with (folder / "machine.lock").open("a") as lock:  # closed in its children
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if (folder / "process.json").exists():
            return  # its process has died: a machine boots once
        with suppress(PermissionError):
            os.setsid()  # its processes are one group, which ends with it
        write_json(folder / "process.json", {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "boot": boot_id()})
        facts = read_json(folder / "instance.json")
        if _wait(folder, facts["launched_at"] + facts["boot_seconds"]):
            _initialise(folder, json.loads(facts["request"]), facts)
            _wait(folder, None)
        if not (folder / "ended.json").exists():
            write_json(folder / "ended.json", {"at": time.time()})
        os.killpg(0, signal.SIGKILL)  # what the init script left running; `local` ends what left the group


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
