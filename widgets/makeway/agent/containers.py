"""Run launchers in containers of podman or docker: pull the image, start, find again by label, and remove.

Used by the process that starts a worker, and by one that removes its container; the agent itself never waits for the
runtime. The folders of a worker have the same paths inside. The launcher is the container's first process, known to
the agent by its pid and start time as any other, so that signals, adoption and ends are those of bare workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import time
from typing import Any, NamedTuple

from ..launcher.files import read_json, write_json
from .environment import ALLOWED_PREFIXES, NO_GPUS
from .starter import agent_file_of, read_record

RUNTIMES = ("podman", "docker")
AGENT_LABEL, FOLDER_LABEL = "makeway.agent", "makeway.folder"
USED = "containers-used"
"""The file in an agent's folder that is there once it has started a container"""
IMAGES = "images"
"""The folder in an agent's folder with a note of each image that it has pulled, which is as old as its last use"""
FULL, ENOUGH = 0.85, 0.80
"""How full the disk of the images is when the first one is removed, and when no further one is"""
KEPT_IMAGES = 3
"""Images that were used last, which stay on a full disk, too"""
KEPT_SECONDS = 1800.0
"""Seconds from its last use for which an image stays: a start may be about to need it"""
PULL_SECONDS = 1500.0
COMMAND_SECONDS = 120.0
TOKEN_SECONDS = 60.0
"""Seconds for which a launcher may take to ask for its token"""
MAX_PROCESSES = 32_768
SHOWN_NAMES = frozenset(("TZ", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"))
"""Variables of the machine that mean the same in a container; its folders and programs are others"""
MARK = "LOCAL_MACHINE_FOLDER"
NOT_FOUND = ("manifest unknown", "not found", "denied", "unauthorized", "does not exist", "invalid reference")
TOKEN_PIPE = "token"


class ContainerProblem(Exception):
    """A container could not be started; the sentence is for the owner of the job. `last`: another try does not help."""

    def __init__(self, message: str, last: bool = False) -> None:
        super().__init__(message)
        self.last = last


class Container(NamedTuple):
    """The container of one worker."""

    runtime: str
    name: str
    image: str


def container_of(folder: str, order: dict[str, Any]) -> Container:
    """Return the container of the worker of a folder; ContainerProblem where the machine has no runtime."""
    import hashlib  # the agent keeps it out of its memory

    result = [name for name in RUNTIMES if shutil.which(name)]
    if not result:
        message = f"{order['image']} cannot run: neither podman nor docker is on the machine"
        raise ContainerProblem(f"{message}; install one in the init script of its deployment", last=True)
    digest = hashlib.sha256(folder.encode()).hexdigest()[:10]
    return Container(result[0], f"makeway-{order['job']}-{order['attempt']}-{order['worker']}-{digest}", order["image"])


def pull(container: Container, folder: str) -> None:
    """Make the image be on the machine; ContainerProblem with what the runtime says of it."""
    note = _image_note(container, _state_folder(folder))
    if _run(container.runtime, "image", "inspect", container.image).returncode == 0:
        with contextlib.suppress(OSError):  # one that was there before the agent has no note, and stays
            os.utime(note)
        return
    done = _run(container.runtime, "pull", "--quiet", container.image, seconds=PULL_SECONDS)
    if done.returncode:
        error = _last_error(done)
        known = any(word in error.lower() for word in NOT_FOUND) and "no such host" not in error.lower()
        why = "its registry has no such image, or wants a login" if known else "its registry could not be reached"
        raise ContainerProblem(f"the image {container.image} could not be pulled, as {why}: {error}", last=True)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(note), mode=0o700, exist_ok=True)
        write_json(note, {"runtime": container.runtime, "image": container.image})


def start(container: Container, folder: str, order: dict[str, Any], env: dict[str, str], command: list[str]) -> int:
    """Start the container, whose launcher waits for its token, and return the pid of that."""
    remove(container.runtime, container.name)  # one that was started, and whose launcher never got its token
    state = _state_folder(folder)
    with open(os.path.join(state, USED), "ab"):
        pass
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, TOKEN_PIPE))
    os.mkfifo(os.path.join(folder, TOKEN_PIPE), 0o600)
    checkpoints = env["MAKEWAY_CHECKPOINT_DIR"]
    if not os.path.isdir(checkpoints):  # in the container there would be one, and it would go with it
        raise ContainerProblem(f"the folder of checkpoints {checkpoints} cannot be made on the machine")
    user = _user(container.runtime, order, (folder, os.path.join(folder, TOKEN_PIPE), checkpoints))
    mounts = [f"{folder}:{folder}", f"{checkpoints}:{checkpoints}", f"{order['programs']}:{order['programs']}:ro"]
    if not user.startswith("0:"):
        env = {**env, "HOME": folder}
    words = [
        *("run", "--detach", "--pull=never", "--name", container.name, "--network=host", "--user", user),
        *("--label", f"{AGENT_LABEL}={state}", "--label", f"{FOLDER_LABEL}={folder}", "--workdir", folder),
        *("--security-opt=no-new-privileges", "--security-opt=label=disable", f"--pids-limit={MAX_PROCESSES}"),
        *(["--log-driver=k8s-file"] if container.runtime == "podman" else ["--log-driver=json-file"]),
        *("--log-opt", "max-size=1mb" if container.runtime == "podman" else "max-size=1m"),
        *(word for mount in mounts for word in ("--volume", mount)),
        *_limits(order),
        *gpu_flags(container.runtime, order),
        *(word for name, value in sorted(env.items()) for word in ("--env", f"{name}={value}")),
        *("--entrypoint", command[0], container.image, *command[1:]),
    ]
    done = _run(container.runtime, *words)
    pid = _pid(container)
    if done.returncode or not pid:
        error = _last_error(done)
        remove(container.runtime, container.name)
        raise _start_problem(container, error)
    return pid


def pass_token(folder: str, token: str, pid: int) -> bool:
    """Write the token into the pipe from which the launcher reads it; False where the launcher ends before."""
    ends = time.monotonic() + TOKEN_SECONDS
    while time.monotonic() < ends and os.path.exists(f"/proc/{pid}"):
        try:
            descriptor = os.open(os.path.join(folder, TOKEN_PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:  # the launcher does not read yet
            time.sleep(0.02)
            continue
        try:
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # what runs in the image has put it there
                return False
            os.write(descriptor, token.encode())
        finally:
            os.close(descriptor)
        return True
    return False


def container_environment(env: dict[str, str], order: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a launcher in a container, of that of a bare one.

    The GPUs of a container are numbered from 0, whichever they are on the machine.
    """
    shown = {name: value for name, value in env.items() if name in SHOWN_NAMES or name.startswith("MAKEWAY_")}
    shown.update({name: value for name, value in env.items() if name.startswith(ALLOWED_PREFIXES[2:])})
    worker = json.loads(env["MAKEWAY_WORKER_ENV"])
    if gpu_flags("podman", order):
        worker["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in range(len(order["devices"])))
    if MARK in os.environ:
        shown[MARK] = os.environ[MARK]
    shown["MAKEWAY_WORKER_ENV"] = json.dumps(worker)
    shown["MAKEWAY_ATTEMPT_TOKEN_FILE"] = os.path.join(env["MAKEWAY_JOB_DIR"], TOKEN_PIPE)
    return {**shown, **(NO_GPUS if order["cpu_only"] else {})}


def gpu_flags(runtime: str, order: dict[str, Any]) -> list[str]:
    """Return the words by which a container gets its GPUs, and no others: by CDI, or by docker's own option."""
    if order["cpu_only"] or order["virtual"] or not order["devices"]:
        return []
    if runtime == "docker":
        return ["--gpus", '"device={}"'.format(",".join(map(str, order["devices"])))]
    return [f"--device=nvidia.com/gpu={device}" for device in order["devices"]]


def remove_container(folder: str) -> int:
    """Remove the container of a worker that has ended; the end of what it wrote is kept beside the launcher's."""
    record = read_record(folder)
    runtime, name = record.get("runtime"), record.get("container")
    if runtime not in RUNTIMES or not isinstance(name, str):
        return 0
    with contextlib.suppress(ContainerProblem):
        inspected = _run(runtime, "inspect", "--format", "{{.State.ExitCode}} {{.State.OOMKilled}}", name)
        words = inspected.stdout.split()
        if inspected.returncode == 0 and len(words) == 2:
            _keep_end(folder, _run(runtime, "logs", "--tail", "20", name), words)
        remove(runtime, name)
    return 0


def remove_forgotten(state: str) -> int:
    """Remove the containers of this agent whose workers are forgotten, such as one that was made in vain."""
    for runtime in RUNTIMES:
        if shutil.which(runtime) is None:
            continue
        with contextlib.suppress(ContainerProblem):
            named = _run(runtime, "ps", "--all", "--filter", f"label={AGENT_LABEL}={state}", "--format", "{{.Names}}")
            names = named.stdout.split() if named.returncode == 0 else []
            form = f'{{{{index .Config.Labels "{FOLDER_LABEL}"}}}}'
            for name in names:
                folder = _run(runtime, "inspect", "--format", form, name).stdout.strip()
                if folder.startswith(state + os.sep) and not os.path.isdir(folder):
                    remove(runtime, name)
    with contextlib.suppress(ContainerProblem):
        remove_old_images(state)
    return 0


def remove_old_images(state: str) -> None:
    """Remove images that this agent has pulled while the disk is full, beginning with the one not used for longest.

    Those of containers stay, as the runtime removes none of them, and so do those that were used last.
    """
    most, now = FULL, time.time()
    for note, used_at in _image_notes(state)[:-KEPT_IMAGES]:
        record = read_json(note)
        runtime, image = record.get("runtime"), record.get("image")
        if runtime not in RUNTIMES or not isinstance(image, str) or shutil.which(runtime) is None:
            continue
        if 0 <= now - used_at < KEPT_SECONDS or _disk_used(runtime) < most:
            return
        most = ENOUGH
        _run(runtime, "rmi", image)
        if _run(runtime, "image", "inspect", image).returncode:
            with contextlib.suppress(OSError):
                os.unlink(note)


def _image_note(container: Container, state: str) -> str:
    import hashlib  # the agent keeps it out of its memory

    return os.path.join(state, IMAGES, hashlib.sha256(container.image.encode()).hexdigest()[:32] + ".json")


def _image_notes(state: str) -> list[tuple[str, float]]:
    """Return the notes of images with the times of their last use, oldest first."""
    result = []
    with contextlib.suppress(OSError), os.scandir(os.path.join(state, IMAGES)) as entries:
        result = [(entry.path, entry.stat().st_mtime) for entry in entries if entry.name.endswith(".json")]
    return sorted(result, key=lambda one: one[1])


def _disk_used(runtime: str) -> float:
    """Return how full the disk is where a runtime keeps its images; 0 where it cannot be known."""
    form = "{{.Store.GraphRoot}}" if runtime == "podman" else "{{.DockerRootDir}}"
    with contextlib.suppress(OSError):
        disk = os.statvfs(_run(runtime, "info", "--format", form).stdout.strip())
        return 1 - disk.f_bavail / disk.f_blocks if disk.f_blocks else 0.0
    return 0.0


def remove(runtime: str, name: str) -> None:
    """Remove a container with all that runs in it; a repetition does nothing."""
    at_once = ["--time=0"] if runtime == "podman" else []
    _run(runtime, "rm", "--force", "--volumes", *at_once, name)


def _keep_end(folder: str, logs: subprocess.CompletedProcess[str], words: list[str]) -> None:
    with contextlib.suppress(OSError), open(agent_file_of(folder, "err"), "a", encoding="utf-8") as file:
        file.write(logs.stderr[-4000:])
        if words[1] == "true":
            file.write("the container was out of memory\n")
        elif words[0] != "0":
            file.write(f"the container ended with exit code {words[0]}\n")


def _state_folder(folder: str) -> str:
    """Return the folder of the agent to which a worker's folder belongs: STATE/workers/JOB/ATTEMPT/WORKER."""
    return os.path.normpath(os.path.join(folder, *[os.pardir] * 4))


def _limits(order: dict[str, Any]) -> list[str]:
    """Return the words for CPU and memory; shared memory is half of that, as frameworks pass batches through it."""
    cpu, memory = int(order.get("cpu") or 0), int(order.get("memory") or 0)
    whole = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    words = [f"--shm-size={max(64, whole // 2)}m"]
    if cpu:
        words.append(f"--cpus={min(cpu, 1000 * (os.cpu_count() or 1)) / 1000:g}")
    if memory:
        words.append(f"--memory={memory}m")
    return words


def _user(runtime: str, order: dict[str, Any], paths: tuple[str, ...]) -> str:
    """Return who runs in the container; what it writes to is given to that account."""
    wanted = str(order.get("user") or "")
    if wanted and os.geteuid() == 0:
        uid, gid = (int(part) for part in wanted.split(":"))
        for path in paths:
            os.chown(path, uid, gid)
        return wanted
    # Root of a container of podman is the account of the agent, also where that is not root.
    return "0:0" if runtime == "podman" else f"{os.geteuid()}:{os.getegid()}"


def _pid(container: Container) -> int:
    done = _run(container.runtime, "inspect", "--format", "{{.State.Pid}}", container.name)
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdecimal() else 0


def _start_problem(container: Container, error: str) -> ContainerProblem:
    if "executable file not found" in error or ("no such file or directory" in error and "python3" in error):
        return ContainerProblem(f"the image {container.image} has no python3, which runs the job: {error}", last=True)
    if "CDI" in error or "could not select device driver" in error:
        message = (
            f"{container.runtime} of the machine knows no GPUs, set up the NVIDIA Container Toolkit there: {error}"
        )
        return ContainerProblem(message, last=True)
    return ContainerProblem(f"the container of {container.image} could not be started: {error}")


def _run(runtime: str, *words: str, seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command of the runtime; ContainerProblem if it does not answer."""
    try:
        return subprocess.run(
            [runtime, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        what = error.strerror if isinstance(error, OSError) else f"no answer within {seconds:g} s"
        raise ContainerProblem(f"{runtime} {words[0]} failed on the machine: {what}") from error


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command wrote about its failure."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][-600:] if lines else f"exit code {done.returncode}"
