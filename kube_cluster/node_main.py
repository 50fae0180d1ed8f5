"""The first process inside a real node: mounts what the node sees as its machine, and keeps its services running.

`node.py` starts it twice: `enter` moves into the cgroups and unshares the namespaces, `run` is then PID 1 of the
node. Standard library only, so that a node costs little memory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import cgroups

SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""The sysctls that the kubelet would set for the whole machine: files of the node are mounted over them."""
RESTART_SECONDS = 1.0
READY_SECONDS = 180.0


def enter(config_file: Path) -> None:
    """Become the first process of a node in cgroups and namespaces of its own."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    cgroups.enter([Path(group) for group in config["cgroups"]])
    namespaces = ["--mount", "--pid", "--ipc", "--uts", "--cgroup"]
    run = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "run", str(config_file)]
    command = ["nsenter", f"--net={config['netns']}", "unshare", *namespaces, "--fork", "--kill-child", *run]
    os.execvp(command[0], command)


def run(config_file: Path) -> None:
    """Mount, start and watch everything in a node; never returns."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    folder = Path(config["folder"])
    socket.sethostname(config["name"])
    mount_all(folder, config["hidden"])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="utf-8")
    os.chdir("/")
    services = Services(folder, config["services"])
    services.start("containerd")
    end = time.monotonic() + READY_SECONDS
    while subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode:
        if time.monotonic() > end:
            sys.exit(f"containerd did not answer within {READY_SECONDS:.0f} s; see {folder}/log/containerd.log")
        time.sleep(0.05)
    for image in config["images"]:
        subprocess.run(["ctr", "--namespace", "k8s.io", "images", "import", image], check=True)
    for name in services.commands:
        if name != "containerd":
            services.start(name)
    services.watch()


def mount_all(folder: Path, hidden: dict[str, str]) -> None:
    """Mount the node's own view of the machine: /proc, /sys, cgroups, and every folder that its services write."""
    groups = [line.split(":")[1] for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("-t", "tmpfs", "cgroup", "/sys/fs/cgroup")
    for controllers in groups:
        if controllers:  # version 2 beside version 1 has none
            place = Path("/sys/fs/cgroup", controllers.removeprefix("name="))
            place.mkdir()
            named = controllers.startswith("name=")
            mount("-t", "cgroup", "-o", f"none,{controllers}" if named else controllers, "cgroup", str(place))
            for one in controllers.split(","):
                if "," in controllers:
                    place.with_name(one).symlink_to(controllers)
    mount("-t", "tmpfs", "run", "/run")
    Path("/run/containerd").mkdir()
    for place_over, layers in (("/var/lib", "var-lib"), ("/var/log", "var-log")):  # writes stay in the node's folder
        upper, work = folder / layers / "upper", folder / layers / "work"
        options = f"lowerdir={place_over},upperdir={upper},workdir={work}"
        mount("-t", "overlay", "-o", options, "overlay", place_over)
    for target, source in hidden.items():
        Path(target).mkdir(parents=True, exist_ok=True)
        mount("--bind", source, target)
    for at, (name, value) in enumerate(SYSCTLS.items()):
        file = Path(f"/run/sysctl.{at}")
        file.write_text(f"{value}\n", encoding="utf-8")
        mount("--bind", str(file), f"/proc/sys/{name}")
    mount("--make-rshared", "/")  # the kubelet's mounts must reach containers; the machine is in another peer group


def mount(*words: str) -> None:
    """Run `mount`."""
    subprocess.run(["mount", *words], check=True)


class Services:
    """The services of a node; one that ends is started again, as a machine's service manager would."""

    def __init__(self, folder: Path, commands: dict[str, list[str]]) -> None:
        self.commands = commands
        self._logs = folder / "log"
        self._running: dict[int, str] = {}

    def start(self, name: str) -> None:
        """Start a service; what it prints goes to its log."""
        with (self._logs / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                self.commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        started.returncode = 0  # watch() waits for every child; Popen must not
        self._running[started.pid] = name

    def watch(self) -> Any:
        """Reap children, orphaned processes of containers included, and restart services; never returns."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if name := self._running.pop(pid, None):
                with (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                    log.write(f"{name} ended: {os.waitstatus_to_exitcode(status)}; starting it again\n")
                time.sleep(RESTART_SECONDS)
                self.start(name)


if __name__ == "__main__":
    {"enter": enter, "run": run}[sys.argv[1]](Path(sys.argv[2]))
