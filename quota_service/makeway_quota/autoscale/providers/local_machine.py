"""Run one machine of the local provider: boot, then the agent, or the init script alone. Standard library only.

A process of its own session, so that it outlives the service as a machine of a cloud does. Started by `local`, maybe
twice: the second one ends at once. What happens is in the files of its folder: `process.json`, `console.log`,
`init.json`, `spot-notice.json`. All of its processes have the folder in their environment, by which they are found.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

CONSOLE_BYTES = 1_000_000
"""Of a console that are kept: more would fill the disk"""
PAUSE = 0.1
RESTART_SECONDS = 1.0
DOWNLOAD_SECONDS = 30.0
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
    part.touch(0o600)  # some have the token of a machine
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

    A launcher, whose environment only root can read, is known by its program, which is in the machine's folder.
    `process`: the content of `process.json`. A session whose number belongs to a later process is another one.
    """
    mark = f"{MARK}=".encode() + os.fsencode(folder)
    session = None
    if process is not None and process["boot"] == boot_id() and start_ticks(process["pid"]) in (None, process["ticks"]):
        session = process["pid"]
    result = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _belongs(int(name), mark, session):
            result.append(int(name))
    return result


def _belongs(pid: int, mark: bytes, session: int | None) -> bool:
    if start_ticks(pid) is None:
        return False
    with suppress(OSError):
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return True
        except PermissionError:
            program = mark.partition(b"=")[2] + b"/disk/"
            if any(word.startswith(program) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
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
    limits = FULL_DISK if facts.get("full_disk") else ""
    environment = _environment(folder)
    if request.get("cpu_only"):
        environment |= {"CUDA_VISIBLE_DEVICES": "none", "NVIDIA_VISIBLE_DEVICES": "none"}
    script = request.get("init_script") or ":"
    code = _run(folder, ["/bin/sh", "-c", f'{limits}exec /bin/sh -c "$0"', script], environment)
    if code is not None:
        write_json(folder / "init.json", {"exit_code": 1 if facts.get("init_fails") else code, "at": time.time()})


def _be_joined(folder: Path, request: dict[str, Any], facts: dict[str, Any]) -> None:
    """Run the agent until it says that the machine is not needed any more; one that fails is started again."""
    disk, join = folder / "disk", facts["join"]
    (disk / "join-token").touch(0o600)
    (disk / "join-token").write_text(join["token"], encoding="ascii")
    (disk / "failing-shell").write_text('#!/bin/sh\n/bin/sh "$@"\nexit 1\n', encoding="ascii")
    (disk / "failing-shell").chmod(0o700)
    if not _downloaded(folder, f"{join['url']}/api/v1/agents/agent.pyz", disk / "agent.pyz"):
        return
    command = [sys.executable, "-I", str(disk / "agent.pyz"), "--url", join["url"], "--machine", request["machine"]]
    command += ["--token-file", str(disk / "join-token"), "--state", str(disk / "agent")]
    command += ["--gpus", str(request.get("gpus") or 0), "--spot", f"file:{folder / 'spot-notice.json'}"]
    command += ["--orphan-after", str(request.get("orphan_after") or 3600)]
    command += ["--shell", str(disk / "failing-shell")] if facts.get("init_fails") else []
    limits = FULL_DISK if facts.get("full_disk") else ""
    while _run(folder, ["/bin/sh", "-c", f'{limits}exec "$@"', "sh", *command], _environment(folder)) not in (0, None):
        _wait(folder, time.time() + RESTART_SECONDS)


def _downloaded(folder: Path, url: str, target: Path) -> bool:
    """Download the agent from the service, as user data of a cloud does; False if the machine is ended before."""
    while not _over(folder):
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as answer:
                content = answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            _write_console(folder, f"cannot download {url}: {error}\n".encode())
            _wait(folder, time.time() + RESTART_SECONDS)
        else:
            target.write_bytes(content)
            return True
    return False


def _environment(folder: Path) -> dict[str, str]:
    home = str(folder / "disk")
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": home, "LANG": "C.UTF-8", MARK: str(folder)}


def _run(folder: Path, command: list[str], environment: dict[str, str]) -> int | None:
    """Run a program with its output on the console; return its exit code, None if the machine was ended before."""
    with subprocess.Popen(
        command,
        cwd=folder / "disk",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.fileno()
        while not _over(folder):
            ended = process.poll() is not None
            ready = select.select([output], [], [], 0 if ended else PAUSE)[0]
            data = os.read(output, 65_536) if ready else b""
            _write_console(folder, data)
            if ended and not data:
                return process.returncode
            if ready and not data:  # it has closed its output, and goes on
                time.sleep(PAUSE)
        process.kill()
        return None


def _write_console(folder: Path, data: bytes) -> None:
    with (folder / "console.log").open("ab") as console:
        console.write(data[: max(0, CONSOLE_BYTES - console.tell())])


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
            (folder / "disk").mkdir(exist_ok=True)
            if facts.get("join"):
                _be_joined(folder, json.loads(facts["request"]), facts)
            else:
                _initialise(folder, json.loads(facts["request"]), facts)
                _wait(folder, None)
        if not (folder / "ended.json").exists():
            write_json(folder / "ended.json", {"at": time.time()})
        os.killpg(0, signal.SIGKILL)  # what the init script left running; `local` ends what left the group


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
