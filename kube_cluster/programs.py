"""Find the programs of the cluster, or build them once from their Go modules into a cache outside of the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .problems import KubeProblem
from .progress import Progress

KUBERNETES = "1.37.2"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
LINKED = (*CONTROL_PLANE, "kubelet", "kube-proxy", "kubectl", "kwok")
"""The programs inside the one binary, each called by a symbolic link of its name."""

TITLES = {
    "kube": f"Compiling Kubernetes {KUBERNETES} (once; a quarter of an hour on two processors)",
    "pause": "Compiling the pause program of pods",
    "helm": "Compiling Helm (once; some minutes on two processors)",
    "karpenter": "Compiling Karpenter (once; some minutes on two processors)",
}
SOURCES = Path(__file__).parent / "binary"
GO_FROM_PYPI = Path(__file__).resolve().parent.parent / ".venvs" / "bin"
"""Where set-up links the Go that it took from PyPI."""
OLDEST_GO = (1, 26)
NEEDED_GIB = 6
VERSION = "k8s.io/component-base/version"
FLAGS = (
    "-trimpath",
    "-buildvcs=false",
    "-ldflags",
    f"-s -w -X {VERSION}.gitVersion=v{KUBERNETES} -X {VERSION}.gitMajor={KUBERNETES.split('.')[0]} "
    f"-X {VERSION}.gitMinor={KUBERNETES.split('.')[1]} -X {VERSION}.gitTreeState=clean",
)


def control_plane() -> Mapping[str, Path]:
    """Return the programs of the control plane: all from KUBEBUILDER_ASSETS, else all from PATH, else all built here.

    They are never mixed from two places, because their versions must fit together. Nodes, real and simulated, are
    always those that were built.
    """
    for path in (os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", os.defpath)):
        result = {name: shutil.which(name, path=path) for name in CONTROL_PLANE} if path else {}
        if result and all(result.values()):
            return {name: Path(program) for name, program in result.items() if program}
    place = built()
    return {name: place / name for name in CONTROL_PLANE}


def kubectl() -> Path:
    """Return the kubectl beside the API server, else the one that was built; another's version may not fit."""
    beside = control_plane()["kube-apiserver"].with_name("kubectl")
    return beside if beside.exists() else built() / "kubectl"


def cache() -> Path:
    """Return the folder that keeps built programs between checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "makeway" / "kube"


def key(sources: Path = SOURCES, flags: Sequence[str] | None = None) -> str:
    """Return the fingerprint of everything that the built programs depend on."""
    total = hashlib.sha256(" ".join((*(flags or FLAGS), platform.machine())).encode())
    for file in sorted(sources.rglob("*")):
        if file.suffix in {".go", ".mod", ".sum"}:
            total.update(file.read_bytes())
    return total.hexdigest()[:16]


def are_built() -> bool:
    """Whether the programs are in the cache."""
    return (cache() / key() / "pause").exists()


def built() -> Path:
    """Return the folder of the programs; build them first if they are not in the cache."""
    place = cache() / key()
    if not are_built():
        cache().mkdir(parents=True, exist_ok=True)
        with one_builder() as lock:
            if not are_built():  # the builder that held the lock may have built them
                _build(place, lock)
    return place


def _build(place: Path, lock: IO[str]) -> None:
    go = find_go()
    objects = cache() / "go-build"
    free = shutil.disk_usage(cache()).free // 2**30
    if free < NEEDED_GIB and not objects.exists():
        raise KubeProblem(
            f"The disk that holds {cache()} is too full to build Kubernetes: {free} GiB are free, {NEEDED_GIB} GiB are "
            "needed for a while. Make room, or set XDG_CACHE_HOME to another disk."
        )
    for leftover in cache().glob("*.new"):
        shutil.rmtree(leftover)
    fresh = place.with_suffix(".new")
    fresh.mkdir()
    download_modules(go, lock, SOURCES, "Kubernetes", "1.2 GB on disk")
    compile_package(go, ".", fresh / "kube", lock, SOURCES, FLAGS)
    compile_package(go, "./pause", fresh / "pause", lock, SOURCES, FLAGS)
    for name in LINKED:
        (fresh / name).symlink_to("kube")
    fresh.replace(place)
    shutil.rmtree(objects, ignore_errors=True)  # 4 GB that only the retry of an interrupted build needs


def tool(name: str, title: str, size: str, sources: Path, flags: Sequence[str], package: str = ".") -> Path:
    """Return a program that only some tests need; build it first if it is not in the cache.

    `size`: what its modules need on the disk. `package`: the one of its command.
    """
    place = tool_folder(name, sources, flags)
    program = place / name
    if not program.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with one_builder() as lock:
            if not program.exists():  # the builder that held the lock may have built it
                go = find_go()
                download_modules(go, lock, sources, title, size)
                place.mkdir(exist_ok=True)
                fresh = cache() / f"{name}.new" / name
                fresh.parent.mkdir(exist_ok=True)
                compile_package(go, package, fresh, lock, sources, flags)
                fresh.replace(program)
                fresh.parent.rmdir()
                if are_built():  # else the build of Kubernetes uses what was compiled
                    shutil.rmtree(cache() / "go-build", ignore_errors=True)
    return program


def tool_folder(name: str, sources: Path, flags: Sequence[str]) -> Path:
    """Return the folder in the cache of a program that only some tests need."""
    return cache() / f"{name}-{key(sources, flags)}"


def module_folder(module: str, sources: Path) -> Path:
    """Return where the files of a Go module lie that a go.mod names; download it where it is not there."""
    done = subprocess.run(
        [find_go(), "mod", "download", "-json", module],
        cwd=sources,
        env=_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KubeProblem(f"The Go module {module} could not be downloaded:\n{done.stdout}{done.stderr}"[-1500:])
    return Path(json.loads(done.stdout)["Dir"])


def download_modules(go: Path, lock: IO[str], sources: Path, name: str, size: str) -> None:
    """Download what a folder's go.mod names."""
    progress = Progress(f"Downloading the Go modules of {name} ({size})")
    sums = (sources / "go.sum").read_text(encoding="utf-8").splitlines()
    total = len([line for line in sums if "/go.mod " not in line])
    output: list[str] = []
    downloaded = 0
    progress.show(0, total)
    with subprocess.Popen(
        [go, "mod", "download", "-x"],
        cwd=sources,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[lock.fileno()],
    ) as download:
        assert download.stderr
        for line in download.stderr:
            downloaded += re.search(r"\.zip: 200\b", line) is not None
            if line.startswith("# get "):
                progress.show(downloaded, total)
            else:
                output.append(line)
    if download.returncode:
        progress.end("failed")
        raise KubeProblem(
            f"The Go modules of {name} could not be downloaded: connect this machine to the network, or name a "
            f"mirror of yours in GOPROXY, and run the same command again.\n{''.join(output).strip()[-1500:]}"
        )
    progress.end()


def compile_package(go: Path, package: str, target: Path, lock: IO[str], sources: Path, flags: Sequence[str]) -> None:
    """Compile a package into a program; an interrupted build goes on where it was."""
    progress = Progress(TITLES[target.name])
    environ = _environ() | {"GOCACHE": str(cache() / "go-build")}
    listed = subprocess.run(
        [go, "list", "-deps", package], cwd=sources, env=environ, capture_output=True, text=True, check=False
    )
    total = len(listed.stdout.splitlines()) or 1
    output: list[str] = []
    compiled = 0
    with subprocess.Popen(
        [go, "build", "-v", *flags, "-o", target, package],
        cwd=sources,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[lock.fileno()],  # a compiler that outlives a killed builder still keeps the next one waiting
    ) as compiler:
        assert compiler.stderr
        for line in compiler.stderr:
            if re.fullmatch(r"[\w./~-]+\n", line):
                compiled += 1
                progress.show(compiled, total)
            else:
                output.append(line)
    if compiler.returncode:
        progress.end("failed")
        raise KubeProblem(
            f"{target.name} could not be compiled:\n{''.join(output)[-1500:].strip() or 'no reason was given'}"
        )
    progress.end()


def find_go() -> Path:
    """Return a Go that is new enough: from PATH, else the one that set-up took from PyPI."""
    seen = []
    for folder in (*os.environ.get("PATH", os.defpath).split(os.pathsep), str(GO_FROM_PYPI)):
        program = Path(folder) / "go"
        if folder and os.access(program, os.X_OK) and (version := go_version(program)):
            if version >= OLDEST_GO:
                return program
            seen.append(f"{program} is {'.'.join(map(str, version))}")
    oldest = ".".join(map(str, OLDEST_GO))
    raise KubeProblem(
        f"Building Kubernetes needs Go {oldest} or newer ({', '.join(seen) or 'no Go was found'}): run `make kube`, "
        "which installs it from PyPI, or install it yourself."
    )


def go_version(program: Path) -> tuple[int, ...] | None:
    """Return the version that a `go` command reports; None when it does not answer like one."""
    try:
        answer = subprocess.run([program, "version"], env=_environ(), capture_output=True, text=True, check=False)
    except OSError:
        return None
    result = re.search(r"\bgo(\d+)\.(\d+)", answer.stdout)
    return (int(result[1]), int(result[2])) if result else None


def _environ() -> dict[str, str]:
    # The build depends on our files alone: not on the user's flags, workspace or toolchains.
    return os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}


@contextmanager
def one_builder() -> Iterator[IO[str]]:
    """Hold the lock of the cache, so that nothing is built twice at the same time."""
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = Progress("Waiting for another process that builds Kubernetes")
            fcntl.flock(lock, fcntl.LOCK_EX)
            waiting.end()
        yield lock
