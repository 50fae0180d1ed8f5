"""Build the images of `helm/images/` with buildah, without a registry: `make images`.

Their base is a Debian made by debootstrap, or the image that is named. A finished image is an archive in the cache that
`ctr images import`, `docker load` and `podman load` read; it is built again when anything it is made of has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import programs
from .commands import missing_packages, succeeds
from .problems import KubeProblem, NotHere
from .progress import Progress

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILES = ROOT / "helm" / "images"
UNUSED_SECONDS = 3600
"""For how long an archive is kept that no checkout asks for."""
NPM_LOCK = ROOT / "package-lock.json"
UV = ROOT / ".venvs" / "uv" / "bin" / "uv"
EXTRAS = {
    "hub": ("hub", "kubespawner", "postgres"),
    "quota-service": ("service", "postgres", "s3"),
    "notebook": ("notebook", "local", "hub"),
    "device-plugin": ("device-plugin",),
    "proxy": (),
}
"""The images, each with the extras of our package that are installed in it."""
WITH_NODEJS = "proxy"
"""The image with Node.js and a package of npm, and without our package."""
NPM_PACKAGE = "configurable-http-proxy"
REPOSITORY = "makeway.test"
PACKAGES = {
    "buildah": ("buildah",),
    "debootstrap": ("debootstrap",),
    "debian-archive-keyring": ("/usr/share/keyrings/debian-archive-keyring.gpg",),
}
"""Debian's packages for building images, each with the files of which one must be there."""
SUITE = "bookworm"
PYTHON = "3.11"
"""That of the suite"""
INCLUDED = ("python3", "python3-venv", "ca-certificates")
LEFT_OUT = ("var/cache/apt/*", "var/lib/apt/lists/*", "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*")
PIP_SETTINGS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_CERT")


def check_machine() -> None:
    """Raise NotHere with one sentence when this machine cannot build images."""
    if os.geteuid() != 0:
        raise NotHere("Building images needs root: run the same command as root, for example with sudo.")
    if missing := missing_packages(PACKAGES):
        raise NotHere(f"Building images needs these packages, which `make images` installs: {', '.join(missing)}.")


def name_of(image: str) -> str:
    """Return the full name of an image, by which pods ask for it."""
    return f"{REPOSITORY}/{image}:1"


def build(images: Sequence[str], base: str = "") -> dict[str, Path]:
    """Return the archives of these images by name, built where they are not in the cache; `base` replaces Debian's."""
    if unknown := [image for image in images if image not in EXTRAS]:
        raise KubeProblem(f"There is no image {', '.join(unknown)}; there are: {', '.join(EXTRAS)}.")
    check_machine()
    with _locked() as place, tempfile.TemporaryDirectory(prefix="makeway-images-") as temporary:
        context = Path(temporary)
        wheel = _wheel(context)
        if WITH_NODEJS in images:
            _copy_npm(context)
        return {image: _archive(image, place, context, wheel, base) for image in images}


def _archive(image: str, place: Path, context: Path, wheel: Path, base: str) -> Path:
    dockerfile = DOCKERFILES / image / "Dockerfile"
    requirements = context / f"{image}.txt"
    requirements.write_text(_requirements(image), encoding="utf-8")
    os.utime(requirements, (0, 0))  # buildah takes a file of another time for another file
    added = NPM_LOCK if image == WITH_NODEJS else wheel
    parts = [dockerfile.read_bytes(), requirements.read_bytes(), added.read_bytes(), (base or _base_key()).encode()]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    archive = place / f"{image}-{key}.tar"
    if archive.exists():
        archive.touch()
        return archive
    buildah = Buildah(place)
    progress = Progress(f"Building the image {image}")
    if not base:
        base = _debian(place, buildah)
    buildah.build(name_of(image), dockerfile, context, {"BASE": base} | _pip_settings())
    fresh = archive.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    buildah.run("push", name_of(image), f"docker-archive:{fresh}:{name_of(image)}")
    remove_unused(place, image)
    fresh.replace(archive)
    buildah.run("rmi", "--prune")
    progress.end()
    return archive


def remove_unused(place: Path, image: str) -> None:
    """Remove the archives of an image that no checkout has asked for in the last hour."""
    for old in place.glob(f"{image}-*.tar"):
        if time.time() - old.stat().st_mtime > UNUSED_SECONDS:
            old.unlink()


def build_other(name: str, context: Path, arguments: Mapping[str, str]) -> Path:
    """Build the Dockerfile of a folder, with our wheel beside it, and return the image's archive in that folder.

    Its base is Debian's, as `BASE`, or an image that was built before.
    """
    check_machine()
    with _locked() as place:
        if not list(context.glob("makeway-*.whl")):
            _wheel(context)
        buildah = Buildah(place)
        given = {"BASE": _debian(place, buildah), **_pip_settings(), **arguments}
        return _pushed(buildah, name, context, given)


def build_upon(name: str, context: Path, base: Path, arguments: Mapping[str, str]) -> Path:
    """Build the Dockerfile of a folder upon an image's archive and return that of the new image, in that folder.

    buildah keeps nothing of it: such an image may be large.
    """
    check_machine()
    with _locked() as place:
        buildah = Buildah(place)
        try:
            return _pushed(buildah, name, context, {"BASE": f"docker-archive:{base}", **arguments})
        finally:
            if buildah.has(name):
                buildah.run("rmi", name)
            buildah.run("rmi", "--prune")


def _pushed(buildah: Buildah, name: str, context: Path, arguments: Mapping[str, str]) -> Path:
    buildah.build(name, context / "Dockerfile", context, arguments)
    archive = context / "image.tar"
    buildah.run("push", name, f"docker-archive:{archive}:{name}")
    return archive


def _pip_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in PIP_SETTINGS if os.environ.get(name)}


class Buildah:
    """The program, with images of its own that no other use of it sees, and without a trace in `/etc/cni`."""

    def __init__(self, place: Path) -> None:
        settings = place / "containers.conf"
        settings.write_text(f'[network]\nnetwork_config_dir = "{place / "networks"}"\n', encoding="utf-8")
        command = ["env", f"CONTAINERS_CONF={settings}", "buildah"]
        command += ["--root", str(place / "storage"), "--runroot", str(place / "run"), "--storage-driver"]
        # Copies of whole folders, where the cache lies on a file system that overlays cannot lie on.
        self._command = [*command, "overlay" if succeeds([*command, "overlay", "info"]) else "vfs"]
        self.run("rm", "--all")  # of a build that was killed: its images could not be removed

    def run(self, *words: str) -> str:
        """Run one of its commands and return what it printed; raise KubeProblem when it fails."""
        done = subprocess.run(
            [*self._command, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            message = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}".strip()
            raise KubeProblem(f"`buildah {words[0]}` failed:\n{message or 'it printed nothing'}")
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        """Whether there is an image of this name."""
        return bool(self.run("images", "--quiet", "--filter", f"reference={name}"))

    def build(self, name: str, dockerfile: Path, context: Path, arguments: Mapping[str, str]) -> None:
        """Build a Dockerfile in a changed root, where no container may run, with the network of this machine."""
        certificate = arguments.get("PIP_CERT", "")
        mounted = [f"--volume={certificate}:{certificate}:ro"] if certificate else []
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        words = ["--isolation=chroot", "--layers", "--format=oci", *mounted, *given]
        self.run("build", *words, "--tag", name, "--file", str(dockerfile), str(context))


def _debian(place: Path, buildah: Buildah) -> str:
    """Return the name of an image with Debian and its Python, made where it is missing."""
    name = f"{REPOSITORY}/base:{_base_key()}"
    if buildah.has(name):
        return name
    folder = place / "base.new"
    shutil.rmtree(folder, ignore_errors=True)
    debootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(INCLUDED)}", SUITE, str(folder)]
    environ = os.environ | {"container": "makeway"}  # no device files are made where that is not allowed
    done = subprocess.run(
        debootstrap, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise KubeProblem(f"debootstrap could not make the base of the images:\n{done.stdout[-1500:].strip()}")
    for pattern in LEFT_OUT:
        for file in folder.glob(pattern):
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    container = buildah.run("from", "scratch")
    buildah.run("copy", container, str(folder), "/")
    buildah.run("commit", "--rm", container, name)
    shutil.rmtree(folder)
    return name


def _base_key() -> str:
    return f"{SUITE}-{hashlib.sha256(' '.join((*INCLUDED, *LEFT_OUT, platform.machine())).encode()).hexdigest()[:8]}"


def _requirements(image: str) -> str:
    """Return what the lock file names for an image, with hashes."""
    words = [word for extra in EXTRAS[image] for word in ("--extra", extra)]
    if image == WITH_NODEJS:
        words = ["--only-group", "node"]
    return _output(
        [UV, "export", "--frozen", "--quiet", "--no-emit-project", "--no-header", "--no-annotate", *words],
        "The packages of an image could not be read from uv.lock",
    )


def _wheel(context: Path) -> Path:
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", context, ROOT]
    _output(command, "The wheel for the images could not be built")
    (wheel,) = context.glob("makeway-*.whl")
    os.utime(wheel, (0, 0))
    return wheel


def _copy_npm(context: Path) -> None:
    """Copy the proxy and what it depends on, as `make setup` installed them by the lock file."""
    packages = json.loads(NPM_LOCK.read_text(encoding="utf-8"))["packages"]
    wanted, result = [NPM_PACKAGE], set[str]()
    while wanted:
        if (name := wanted.pop()) not in result:
            result.add(name)
            wanted += packages[f"node_modules/{name}"].get("dependencies", {})
    for name in sorted(result):
        shutil.copytree(ROOT / "node_modules" / name, context / "node_modules" / name, dirs_exist_ok=True)
    for file in (context / "node_modules").rglob("*"):
        os.utime(file, (0, 0))


def _output(command: Sequence[str | Path], problem: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KubeProblem(f"{problem}:\n{(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout


@contextmanager
def _locked() -> Iterator[Path]:
    """Keep others from building at the same time, and yield the folder of archives and buildah's images."""
    place = programs.cache().parent / "images"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place
