"""Start the launcher of an attempt: spool the order, then start a process that claims it.

However often it is started, the launcher that claims the attempt first runs it; every other one exits.
"""

from __future__ import annotations

import compileall
import importlib.util
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from makeway_api.open_files import soft_limit_of_jobs

from ..base import BackendError, NodeStatus, StartOrder
from .attempts import LocalAttempt
from .held_devices import places_of
from .jobdir import Layout, beside, check_files, write_order
from .processes import boot_id
from .users import UnixAccount, closed_folder

SPAWN_SECONDS = 120.0
LIBRARY = Path("library", "makeway")
LIBRARY_MODULES = ("checkpoint.py", "checkpointing", "frameworks")
"""What jobs can import of Makeway, as in `makeway.launcher.copying`"""


def launcher_source() -> Path:
    """Find the launcher in the installed distribution, without importing the notebook package."""
    spec = importlib.util.find_spec("makeway")
    if spec is None or not spec.submodule_search_locations:
        raise BackendError("The launcher is missing: the package `makeway` is not installed beside the service.")
    return Path(next(iter(spec.submodule_search_locations))) / "launcher"


def install_launcher(layout: Layout) -> Path:
    """Copy the launcher to where every account can read it; one that runs already keeps what it has loaded."""
    target = layout.programs / "launcher"
    target.mkdir(mode=0o755, exist_ok=True)
    for source, place in launcher_files(launcher_source()):
        copy = target / place
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            for folder in (target / parent for parent in reversed(place.parents[:-1])):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o755)
            temporary = beside(copy)
            temporary.write_bytes(source.read_bytes())
            temporary.chmod(0o644)
            temporary.replace(copy)
    compileall.compile_dir(target, quiet=2)
    return target


def launcher_files(launcher: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the modules of the launcher and of the library of jobs, each with its place below the launcher's folder."""
    for source in [*launcher.glob("*.py"), *(launcher / LIBRARY).glob("*.py")]:
        yield source, source.relative_to(launcher)
    package = launcher.parent
    for name in LIBRARY_MODULES:
        path = package / name
        for source in [path] if path.is_file() else path.rglob("*.py"):
            yield source, LIBRARY / source.relative_to(package)


def check_shared(layout: Layout, python: str) -> None:
    """Refuse folders that other accounts cannot pass through: their jobs would never start."""
    for what, path in (("The state directory", layout.jobs), ("The Python of the launcher", Path(python))):
        closed = closed_folder(path)
        if closed is not None:
            raise BackendError(
                f"{what} {path} lies below {closed}, which other accounts may not enter, but jobs run under their "
                f"owners' accounts. Put it elsewhere (for example /var/lib/makeway) or run: chmod o+x {closed}"
            )


def spool(layout: Layout, order: StartOrder, account: UnixAccount, nodes: Sequence[NodeStatus], log_limit: int) -> None:
    """Write down all that the launcher needs; BackendError when the order can never be carried out."""
    if not order.command or any("\0" in word for word in order.command):
        raise BackendError("There is no command to run.")
    files = tuple(order.files())
    check_files(files)
    known = {node.name: node for node in nodes}
    for place in order.workers:
        if place.node not in known:
            raise BackendError(f"There is no node {place.node!r} here; the nodes are {', '.join(sorted(known))}.")
    directory = layout.make_job(order.workload, account)
    header = {
        "workload": order.workload,
        "attempt": order.attempt,
        "name": order.name,
        "owner": order.owner,
        "uid": account.uid,
        "team": order.team,
        "profile": order.profile,
        "command": list(order.command),
        "env": {str(key): str(value) for key, value in order.env.items()},
        "workers": workers(order, known),
        "places": places_of(order),
        "directory": str(directory),
        "grace": order.grace,
        "signal": order.signal,
        "time_limit": order.time_limit,
        "log_limit": log_limit,
        "boot": boot_id(),
        "open_files": soft_limit_of_jobs(),
    }
    write_order(layout.order(order.workload, order.attempt), header, files)


def workers(order: StartOrder, nodes: Mapping[str, NodeStatus]) -> list[dict[str, Any]]:
    """Return each worker's own environment: its devices and, in a gang, its rank."""
    total = sum(sum(place.milli) for place in order.workers) / 1000
    port = str(_free_port()) if len(order.workers) > 1 else ""
    result = []
    for rank, place in enumerate(order.workers):
        env = {
            "MAKEWAY_GPUS": f"{total:g}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in place.devices),
        }
        if nodes[place.node].virtual:
            env["MAKEWAY_VIRTUAL_GPUS"] = "1"
        if port:
            size = str(len(order.workers))
            env |= {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        result.append({"env": env})
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(
    attempt: LocalAttempt, order: Path, launcher: Path, python: str, account_of: Callable[[str], UnixAccount]
) -> str | None:
    """Start a launcher and wait until it has started the job; return why it did not come up, if it did not.

    The launcher has a session of its own and outlives the service.
    """
    try:
        account = account_of(attempt.owner)
        marks = {
            "MAKEWAY_JOB_ID": attempt.workload,
            "MAKEWAY_ATTEMPT": str(attempt.number),
            "MAKEWAY_JOB_DIR": attempt.mark.job_dir,
        }
        switch: dict[str, Any] = {}
        if account.switch:
            switch = {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
        with order.open("rb") as stream:
            done = subprocess.run(
                [python, "-I", "-S", str(launcher), "-", "--detach"],
                stdin=stream,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**account.environment(python), **marks},
                cwd="/",
                start_new_session=True,
                timeout=SPAWN_SECONDS,
                check=False,
                **switch,
            )
    except (OSError, ValueError, BackendError, subprocess.SubprocessError) as error:
        return str(error)
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:500] if lines else None
