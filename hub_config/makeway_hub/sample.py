"""Define the demo's users and teams, as the sample policy expects them, and the documents and backend of a start."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .databases import has_used_machines
from .settings import Settings
from .state_directory import StateDirectory

SAMPLE_GROUPS: dict[str, list[str]] = {"rnd": ["ana", "lea"], "devops": ["bo", "lea"]}
SAMPLE_USERS: dict[str, str] = {
    "ana": "team rnd",
    "bo": "team devops",
    "lea": "teams rnd and devops",
    "guest": "no team",
    "admin": "administrator of the Hub and of Makeway",
}
SAMPLE_ADMIN = "admin"

LOCAL = "local"
WITH_MACHINES = "local,machines"
_DEMO_BACKENDS = (LOCAL, WITH_MACHINES)
"""The backends that a later start may take over from the last one: they need no further settings."""
_SITE_VARIABLES = ("MAKEWAY_POLICY_FILE", "MAKEWAY_DEPLOYMENT_FILE", "MAKEWAY_DB_URL")
"""Variables by which a site starts with its own documents or database."""


def set_samples(env: dict[str, str], settings: Settings) -> None:
    """Set the documents that an empty database is filled with, and the backend that runs the demo's jobs."""
    demo = settings.mode == "demo"
    if demo:
        _set_backend(env, settings.state)
    with_machines = demo and "machines" in _backend_names(env.get("MAKEWAY_BACKEND", ""))
    package = Path(__file__).resolve().parent
    for folder in (package.parent, package):  # in a checkout, in a wheel
        samples = folder / "machines"
        if not env.get("MAKEWAY_POLICY_FILE") and with_machines and (samples / "policy.yaml").is_file():
            env["MAKEWAY_POLICY_FILE"] = str(samples / "policy.yaml")
            env["MAKEWAY_DEPLOYMENT_FILE"] = env.get("MAKEWAY_DEPLOYMENT_FILE") or str(samples / "deployment.yaml")
        elif not env.get("MAKEWAY_POLICY_FILE") and (folder / "policy.yaml").is_file():
            env["MAKEWAY_POLICY_FILE"] = str(folder / "policy.yaml")


def _set_backend(env: dict[str, str], state: StateDirectory) -> None:
    """Set the backend where the site names none: with machines in a new demo, later that of the last start.

    Jobs that run on machines, or wait for them, would be stranded by a start without that backend.
    """
    chosen = env.get("MAKEWAY_BACKEND")
    if not chosen:
        last_backend = ""
        with suppress(OSError):
            last_backend = state.backend_file.read_text(encoding="utf-8", errors="replace").strip()
        if last_backend in _DEMO_BACKENDS and (env.get("MAKEWAY_DB_URL") or not state.is_new):
            chosen = last_backend
        elif state.is_new:
            chosen = LOCAL if any(env.get(name) for name in _SITE_VARIABLES) else WITH_MACHINES
        else:  # of an earlier release, or restored from a backup
            chosen = WITH_MACHINES if has_used_machines(state) else LOCAL
        env["MAKEWAY_BACKEND"] = chosen
    backends = ",".join(_backend_names(chosen))
    if backends == WITH_MACHINES and not env.get("MAKEWAY_MACHINE_CHECKPOINT_DIR"):
        # Machines of the demo are processes of this computer: without it, no job here would count on its checkpoints.
        env["MAKEWAY_MACHINE_CHECKPOINT_DIR"] = str(state.root / "checkpoints")
    if backends in _DEMO_BACKENDS:
        state.backend_file.write_text(f"{backends}\n", encoding="utf-8")


def _backend_names(backend: str) -> list[str]:
    return [name.strip() for name in backend.split(",") if name.strip()]
