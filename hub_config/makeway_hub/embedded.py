"""Run the whole portal in the foreground of one terminal: `python -m makeway_hub.embedded`, or `make run`.

Checks the prerequisites, starts JupyterHub (which starts the proxy and the quota service), prints the address, and on
Ctrl-C stops everything that was started. With KEEP=1 notebooks and jobs keep running and the next start adopts them.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import httpx2

from . import checks, databases, leftovers
from .address import Address
from .sample import SAMPLE_USERS
from .settings import SERVICE_PATH, Settings, read

STOP_TIMEOUT = 75.0
"""Seconds that jobs and notebooks get to save and end after Ctrl-C."""
START_TIMEOUT = 90.0
"""Seconds after which a Hub or a service that does not answer yet is named; it is waited for all the same."""
RETRY_SECONDS = 3.0
"""Seconds that a quota service which could not start gets to retry, as when its predecessor was just ending."""
LOG_BYTES = 10_000_000
_FAILURE = re.compile(r"\[[CE] ")
"""How a line of the log begins that reports an error."""
_PR_SET_PDEATHSIG = 1
_CONFIG = '''"""The Hub's configuration: Makeway's own, then the settings of this site."""

from makeway_hub.configure import configure

c = get_config()  # noqa: F821
configure(c)
'''


def main() -> int:
    """Run until Ctrl-C; return 0 after an orderly stop, 1 if the portal could not start or the Hub died."""
    try:
        checks.check_python()
        settings = read()
        checks.check_mode(settings)
        checks.check_reachable(settings)
        checks.check_sockets(settings)
        checks.check_state(settings)
        lock = checks.StateDirectoryLock(settings)
        lock.take()
        try:
            return Portal(settings).run()
        finally:
            lock.release()
    except (checks.CannotStart, ValueError) as error:
        print(f"Makeway cannot start. {error}", file=sys.stderr)
        return 1


class Portal:
    """JupyterHub as a child of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log = settings.state.logs / "hub.log"
        self._signals = 0
        self._up = False
        self._address = settings.address
        self._problem = ""
        self._problem_since = 0.0

    def run(self) -> int:
        """Start, print the address, wait, stop; return the exit code."""
        for stopped in leftovers.stop_leftovers(self.settings):
            print(f"Stopped {stopped} of an earlier run.")
        checks.check_node()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        databases.check_no_copy(self.settings.state)
        databases.upgrade_service(self.settings.state, partial(print, flush=True))
        print("Starting Makeway …", flush=True)
        self.settings.state.problem_file.unlink(missing_ok=True)
        self.settings.state.address_file.unlink(missing_ok=True)
        with self._open_log() as log:
            hub = self._start(log)
        self._up = self._wait_until_up(hub)
        if self._up:
            print(announcement(self.settings, self._address), flush=True)
        elif hub.poll() is None and self._problem:
            print(f"Makeway cannot start. {self._problem}", file=sys.stderr, flush=True)
            self._stop(hub)
            return 1
        while hub.poll() is None and not self._signals:
            time.sleep(0.1)
        if hub.poll() is not None and not self._signals:
            return self._died(hub.returncode)
        return self._stop(hub)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _open_log(self) -> IO[bytes]:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        return self.log.open("ab")

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("JUPYTERHUB_", "CONFIGPROXY_"))}
        env.update(
            PORT=str(self.settings.port),
            MAKEWAY_STATE_DIR=str(self.settings.state.root),
            MAKEWAY_MODE=self.settings.mode,
            MAKEWAY_KEEP="1" if self.settings.keep else "",
            MAKEWAY_LAUNCHED="1",
        )
        return subprocess.Popen(
            [sys.executable, "-m", "jupyterhub", "--config", str(self._config())],
            cwd=self.settings.state.root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the rest in order
            preexec_fn=_end_with_parent,
        )

    def _config(self) -> Path:
        named = os.environ.get("MAKEWAY_HUB_CONFIG")
        if named:
            return Path(named).expanduser().absolute()
        beside = Path(__file__).resolve().parent.parent / "jupyterhub_config.py"
        if beside.is_file():
            return beside
        own = self.settings.state.root / "jupyterhub_config.py"
        if not own.exists():
            own.write_text(_CONFIG)
        return own

    def _wait_until_up(self, hub: subprocess.Popen[bytes]) -> bool:
        """Return whether Hub and service answer; False where one ended, cannot start, or shall stop."""
        slow_at = time.monotonic() + START_TIMEOUT
        wanted = ["/hub/health", f"{SERVICE_PATH}/healthz"]
        while wanted and hub.poll() is None and not self._signals:
            address = Address.read(self.settings.state.address_file)
            self._address = address or self._address
            if address and answers(address.loopback_url + wanted[0], address.panel if len(wanted) == 1 else ""):
                wanted.pop(0)
                continue
            if len(wanted) == 1 and self._cannot_start():
                return False
            if time.monotonic() > slow_at:
                slow_at = math.inf
                what = "JupyterHub" if len(wanted) == 2 else "The quota service"
                print(
                    f"{what} does not answer after {START_TIMEOUT:g} s, and is waited for; its log is {self.log}.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(0.25)
        return not wanted

    def _cannot_start(self) -> bool:
        """Whether the quota service has reported for a while that it cannot start; the Hub retries it meanwhile."""
        if not self._read_problem():
            self._problem_since = 0.0
            return False
        self._problem_since = self._problem_since or time.monotonic()
        return time.monotonic() - self._problem_since > RETRY_SECONDS

    def _read_problem(self) -> bool:
        try:
            self._problem = self.settings.state.problem_file.read_text(encoding="utf-8").strip()
        except OSError:
            self._problem = ""
        return bool(self._problem)

    def _died(self, code: int) -> int:
        if not self._up and self._read_problem():
            print(f"Makeway cannot start. {self._problem}", file=sys.stderr)
            leftovers.stop_leftovers(self.settings)
            return 1
        lines = self.log.read_text(errors="replace").splitlines()[-200:]
        print(f"JupyterHub ended unexpectedly (exit code {code}). The end of its log {self.log}:", file=sys.stderr)
        print("\n".join(f"    {line}" for line in lines[-15:]), file=sys.stderr)
        print("Notebooks and jobs may still be running; `make run` adopts them.", file=sys.stderr)
        if reasons := [line for line in lines if _FAILURE.match(line)]:
            print(f"The last error in the log: {reasons[-1]}", file=sys.stderr)
        leftovers.stop_leftovers(self.settings)
        return 1

    def _stop(self, hub: subprocess.Popen[bytes]) -> int:
        kept = "notebooks and jobs keep running" if self.settings.keep else "jobs save, notebooks end"
        print(f"\nStopping ({kept}); Ctrl-C again stops at once …", flush=True)
        before = self._signals
        hub.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        while hub.poll() is None and time.monotonic() < deadline and self._signals == before:
            time.sleep(0.1)
        orderly = hub.poll() is not None
        if not orderly:
            hub.kill()
            hub.wait()
        if not orderly or not self.settings.keep:
            leftovers.stop_leftovers(self.settings)
        if not self.settings.keep:
            leftovers.stop_machines(self.settings)
        print("Stopped." if orderly else "Stopped at once; the next `make run` adopts or stops what was still running.")
        return 0 if orderly else 1


def announcement(settings: Settings, address: Address) -> str:
    """Return the text for the terminal: the address, the sample users, the log, how to stop."""
    lines = ["", f"  Makeway is ready at  {address.browser_url}", ""]
    if not address.is_local and not address.secure:
        lines += ["  It is open to the network, without TLS (MAKEWAY_OPEN=1).", ""]
    if settings.mode == "demo":
        lines += [f"    {name:<8} {text}" for name, text in SAMPLE_USERS.items()]
        lines += ["", f"  The password of all is in  {_short(settings.state.password_file)}"]
    else:
        lines += ["    Log in with an account of this machine; its Unix groups are its teams."]
    lines += [
        f"  The log is in              {_short(settings.state.logs / 'hub.log')}",
        f"  Ctrl-C stops {'the portal; notebooks and jobs keep running' if settings.keep else 'everything'}",
        "",
    ]
    return "\n".join(lines)


def answers(url: str, origin: str = "") -> bool:
    """Whether the portal itself answers at this address with 200; no proxy of the environment is asked.

    `origin`: by which browsers know what is asked for, where it has a name of its own.

    Its certificate is for the names by which browsers know it, not for 127.0.0.1.
    """
    try:
        headers = {"Host": urlsplit(origin).netloc} if origin else {}
        return httpx2.get(url, headers=headers, timeout=5, trust_env=False, verify=False).status_code == 200
    except httpx2.HTTPError:
        return False


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _end_with_parent() -> None:
    """Make Linux end the Hub if this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
