"""Define the demo's users and teams, as the sample policy expects them, and what its first start begins with."""

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
_NOTED = (LOCAL, WITH_MACHINES)
"""The backends with which a later start needs no other settings."""
_OWN = ("MAKEWAY_POLICY_FILE", "MAKEWAY_DEPLOYMENT_FILE", "MAKEWAY_DB_URL")
"""Variables with which a site begins with documents, or a database, of its own."""


def set_samples(env: dict[str, str], settings: Settings) -> None:
    """Set the documents that an empty database begins with, and where the demo runs its jobs."""
    demo = settings.mode == "demo"
    if demo:
        _set_backend(env, settings.state)
    machines = demo and "machines" in _names(env.get("MAKEWAY_BACKEND", ""))
    here = Path(__file__).resolve().parent
    for folder in (here.parent, here):  # in a checkout, in a wheel
        own = folder / "machines"
        if not env.get("MAKEWAY_POLICY_FILE") and machines and (own / "policy.yaml").is_file():
            env["MAKEWAY_POLICY_FILE"] = str(own / "policy.yaml")
            env["MAKEWAY_DEPLOYMENT_FILE"] = env.get("MAKEWAY_DEPLOYMENT_FILE") or str(own / "deployment.yaml")
        elif not env.get("MAKEWAY_POLICY_FILE") and (folder / "policy.yaml").is_file():
            env["MAKEWAY_POLICY_FILE"] = str(folder / "policy.yaml")


def _set_backend(env: dict[str, str], state: StateDirectory) -> None:
    """Set the backend where none is named: with machines in a new demo, later that of the last start.

    Jobs that run on machines, or wait for them, would be stranded by a start without that backend.
    """
    chosen = env.get("MAKEWAY_BACKEND")
    if not chosen:
        noted = ""
        with suppress(OSError):
            noted = state.backend_file.read_text(encoding="utf-8", errors="replace").strip()
        if noted in _NOTED and (env.get("MAKEWAY_DB_URL") or not state.is_new):
            chosen = noted
        elif state.is_new:
            chosen = LOCAL if any(env.get(name) for name in _OWN) else WITH_MACHINES
        else:  # of an earlier release, or restored from a backup
            chosen = WITH_MACHINES if has_used_machines(state) else LOCAL
        env["MAKEWAY_BACKEND"] = chosen
    used = ",".join(_names(chosen))
    if used == WITH_MACHINES and not env.get("MAKEWAY_MACHINE_CHECKPOINT_DIR"):
        # Machines of the demo are processes of this computer: without it, no job here would count on its checkpoints.
        env["MAKEWAY_MACHINE_CHECKPOINT_DIR"] = str(state.root / "checkpoints")
    if used in _NOTED:
        state.backend_file.write_text(f"{used}\n", encoding="utf-8")


def _names(backend: str) -> list[str]:
    return [name.strip() for name in backend.split(",") if name.strip()]
