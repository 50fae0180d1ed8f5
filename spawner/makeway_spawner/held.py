"""A lease in the Hub's hands: what it stores about it, and what the notebook sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from makeway_api.models import Session


@dataclass(slots=True)
class Held:
    """One session's lease. `started`: None before the server starts, False until the service knows of it."""

    id: str
    profile: str
    team: str | None
    gpus: float
    preemptible: bool
    places: list[tuple[str, list[int]]]
    variables: dict[str, str]
    virtual: bool
    started: bool | None = None

    @classmethod
    def of(cls, session: Session, started: bool | None = None) -> Held:
        """Take what the service granted."""
        places = [(grant.node, list(grant.devices)) for grant in session.placement]
        return cls(
            session.id,
            session.profile,
            session.team,
            session.gpus,
            session.preemptible,
            places,
            dict(session.env),
            session.virtual,
            started,
        )

    def env(self) -> dict[str, str]:
        """Tell the notebook which devices are its own; a profile without GPUs sees none of them."""
        devices = ",".join(str(index) for _, indices in self.places for index in indices)
        env = {
            **self.variables,
            "MAKEWAY_SESSION": self.id,
            "MAKEWAY_PROFILE": self.profile,
            "MAKEWAY_TEAM": self.team or "",
            "MAKEWAY_GPUS": f"{self.gpus:g}",
            "CUDA_VISIBLE_DEVICES": devices,
        }
        if self.virtual and self.gpus:
            env["MAKEWAY_VIRTUAL_GPUS"] = "1"
        return env

    def granted(self) -> str:
        """Say it on the pending page."""
        if not self.places or not self.gpus:
            return "Granted: this profile needs no GPU."
        kind = "virtual GPU" if self.virtual else "GPU"
        where = " and ".join(
            f"{node} ({kind} {', '.join(map(str, devices))})" if devices else node for node, devices in self.places
        )
        return f"Granted: {self.gpus:g} {kind}{'' if self.gpus == 1 else 's'} on {where}."

    def save(self) -> dict[str, Any]:
        """Say it as JSON for the Hub's database."""
        return {
            "session": self.id,
            "profile": self.profile,
            "team": self.team,
            "gpus": self.gpus,
            "preemptible": self.preemptible,
            "places": self.places,
            "env": self.variables,
            "virtual": self.virtual,
            "started": self.started,
        }

    @classmethod
    def load(cls, saved: Any) -> Held | None:
        """Read it back; anything that is not ours is no lease."""
        if not isinstance(saved, dict) or not isinstance(saved.get("session"), str):
            return None
        return cls(
            saved["session"],
            str(saved.get("profile") or ""),
            saved.get("team") or None,
            float(saved.get("gpus") or 0),
            bool(saved.get("preemptible")),
            [(str(node), list(devices)) for node, devices in saved.get("places") or []],
            dict(saved.get("env") or {}),
            bool(saved.get("virtual")),
            saved.get("started"),
        )
