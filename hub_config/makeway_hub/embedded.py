"""The whole portal in the foreground of one terminal: `python -m makeway_hub.embedded`, which `make run` calls.

It checks what must be true, starts JupyterHub (which starts the proxy and the quota service), says where to log in,
and on Ctrl-C stops everything that it started. With KEEP=1 notebooks and jobs stay and the next start finds them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from . import checks, leftovers
from .sample import SAMPLE_USERS
from .settings import SERVICE_PATH, Settings, read
from .state import is_free

STOP_PATIENCE = 75.0
"""Seconds for jobs and notebooks to save and end after Ctrl-C."""
START_PATIENCE = 90.0
TROUBLE_PATIENCE = 3.0
"""Seconds for a quota service that could not start to try again, as when its predecessor was just ending."""
LOG_BYTES = 10_000_000
_PR_SET_PDEATHSIG = 1
_CONFIG = '''"""The Hub's configuration: what Makeway needs, then whatever this site wants to differ."""

from makeway_hub.configure import configure

c = get_config()  # noqa: F821
configure(c)
'''


def main() -> int:
    """Run until Ctrl-C; 0 after an orderly stop, 1 when it could not start or something died."""
    try:
        checks.check_python()
        settings = read()
        checks.check_mode(settings)
        checks.check_reachable(settings)
        checks.check_sockets(settings)
        checks.check_state(settings)
        lock = checks.OneAtATime(settings)
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
        self._trouble = ""
        self._troubled_at = 0.0

    def run(self) -> int:
        """Start, announce, wait, stop."""
        for left in leftovers.clear(self.settings):
            print(f"Stopped {left}, which an earlier run left behind.")
        checks.check_node()
        checks.check_port(self.settings)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        print("Starting Makeway …", flush=True)
        self.settings.state.trouble.unlink(missing_ok=True)
        with self._open_log() as log:
            hub = self._start(log)
        self._up = self._wait_until_up(hub)
        if self._up:
            print(announcement(self.settings), flush=True)
        elif hub.poll() is None and self._trouble:
            print(f"Makeway cannot start. {self._trouble}", file=sys.stderr, flush=True)
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
        )
        return subprocess.Popen(
            [sys.executable, "-m", "jupyterhub", "--config", str(self._config())],
            cwd=self.settings.state.root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C comes here only, so that the stop has an order
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
        deadline = time.monotonic() + START_PATIENCE
        wanted = [f"{self.settings.url}/hub/health", f"{self.settings.url}{SERVICE_PATH}/healthz"]
        while wanted and hub.poll() is None and not self._signals:
            if not is_free(self.settings.port) and answers(wanted[0]):
                wanted.pop(0)
            elif len(wanted) == 1 and self._hopeless():
                return False
            elif time.monotonic() > deadline:
                what = "JupyterHub" if len(wanted) == 2 else "The quota service"
                print(f"{what} does not answer after {START_PATIENCE:g} s; its log is {self.log}.", file=sys.stderr)
                return len(wanted) == 1
            else:
                time.sleep(0.25)
        return not wanted

    def _hopeless(self) -> bool:
        """Read why the quota service does not start; the Hub tries it again, so only what lasts counts."""
        if not self._read_trouble():
            self._troubled_at = 0.0
            return False
        self._troubled_at = self._troubled_at or time.monotonic()
        return time.monotonic() - self._troubled_at > TROUBLE_PATIENCE

    def _read_trouble(self) -> bool:
        try:
            self._trouble = self.settings.state.trouble.read_text(encoding="utf-8").strip()
        except OSError:
            self._trouble = ""
        return bool(self._trouble)

    def _died(self, code: int) -> int:
        if not self._up and self._read_trouble():
            print(f"Makeway cannot start. {self._trouble}", file=sys.stderr)
            leftovers.clear(self.settings)
            return 1
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        print(f"JupyterHub ended unexpectedly (exit code {code}). The end of its log {self.log}:", file=sys.stderr)
        print("\n".join(f"    {line}" for line in lines), file=sys.stderr)
        print("Notebooks and jobs may still run; `make run` finds them again.", file=sys.stderr)
        leftovers.clear(self.settings)
        return 1

    def _stop(self, hub: subprocess.Popen[bytes]) -> int:
        kept = "notebooks and jobs keep running" if self.settings.keep else "jobs save, notebooks end"
        print(f"\nStopping ({kept}); Ctrl-C again stops at once …", flush=True)
        asked = self._signals
        hub.terminate()
        deadline = time.monotonic() + STOP_PATIENCE
        while hub.poll() is None and time.monotonic() < deadline and self._signals == asked:
            time.sleep(0.1)
        orderly = hub.poll() is not None
        if not orderly:
            hub.kill()
            hub.wait()
        if not orderly or not self.settings.keep:
            leftovers.clear(self.settings)
        print("Stopped." if orderly else "Stopped at once: what was still running is found by the next `make run`.")
        return 0 if orderly else 1


def announcement(settings: Settings) -> str:
    """Say where to go, as whom, and how to stop."""
    lines = ["", f"  Makeway is ready at  {settings.url}", ""]
    if settings.mode == "demo":
        lines += [f"    {name:<8} {text}" for name, text in SAMPLE_USERS.items()]
        lines += ["", f"  Everybody's password is in  {_short(settings.state.password_file)}"]
    else:
        lines += ["    Log in with an account of this machine; your Unix groups are your teams."]
    lines += [
        f"  The log is                  {_short(settings.state.logs / 'hub.log')}",
        f"  Ctrl-C stops {'the portal; notebooks and jobs keep running' if settings.keep else 'everything'}",
        "",
    ]
    return "\n".join(lines)


def answers(url: str) -> bool:
    """Tell whether a server answers here with anything but an error of its own."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status < 500)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500 and error.code != 404
    except OSError:
        return False


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _end_with_parent() -> None:
    """Ask Linux to end the Hub should this process be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
