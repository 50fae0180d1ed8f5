"""Hold one granted lease: what the Hub stores about it, and what the notebook sees of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from makeway_api.models import Session
from makeway_api.quantities import gpus, listed


@dataclass(slots=True)
class Lease:
    """One session's lease. CPU is in cores, memory and disk in MiB; 0 leaves each to the spawner's own settings.

    `claim_templates`: the ResourceClaimTemplates of its GPUs by the claim's name in the pod; empty: they are requested
    as `resource`. `started` is None before the server starts, False until the service knows of the server, then True.
    """

    id: str
    profile: str
    team: str | None
    gpus: float
    preemptible: bool
    placement: list[tuple[str, list[int]]]
    variables: dict[str, str]
    virtual: bool
    started: bool | None = None
    cpu: float = 0.0
    memory: int = 0
    profile_title: str = ""
    team_title: str = ""
    image: str = ""
    resource: str = ""
    tolerations: list[str] = field(default_factory=list)
    disk: int = 0
    claim_templates: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session, started: bool | None = None) -> Lease:
        """Return the lease that the service's answer describes."""
        return cls(
            id=session.id,
            profile=session.profile,
            team=session.team,
            gpus=session.gpus,
            preemptible=session.preemptible,
            placement=[(worker.node, list(worker.devices)) for worker in session.placement],
            variables=dict(session.env),
            virtual=session.virtual,
            started=started,
            cpu=session.cpu,
            memory=session.memory,
            profile_title=session.profile_title,
            team_title=session.team_title,
            image=session.image or "",
            resource=session.resource or "",
            tolerations=list(session.tolerations),
            disk=session.disk,
            claim_templates=dict(session.claims),
        )

    def env(self) -> dict[str, str]:
        """Return the notebook's variables; CUDA_VISIBLE_DEVICES is empty for a profile without GPUs."""
        devices = ",".join(str(index) for _, indices in self.placement for index in indices)
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

    def sentence(self) -> str:
        """Return what was granted, for the pending page: `Granted: 2 GPUs on node-1 (GPU 0, 1).`"""
        if not self.placement or not self.gpus:
            return "Granted: this profile needs no GPU."
        kind = "virtual GPU" if self.virtual else "GPU"
        nodes = listed(
            f"{node} ({kind} {', '.join(map(str, devices))})" if devices else node for node, devices in self.placement
        )
        return f"Granted: {gpus(self.gpus, kind)} on {nodes}."

    def save(self) -> dict[str, Any]:
        """Return the lease as JSON for the Hub's database; the keys are those of earlier releases."""
        saved = asdict(self)
        for old, new in _SAVED_AS.items():
            saved[new] = saved.pop(old)
        return saved

    @classmethod
    def load(cls, saved: Any) -> Lease | None:
        """Return the lease that `save` wrote, also in an earlier release; None where there is none."""
        if not isinstance(saved, dict) or not isinstance(saved.get("session"), str):
            return None
        return cls(
            id=saved["session"],
            profile=str(saved.get("profile") or ""),
            team=saved.get("team") or None,
            gpus=float(saved.get("gpus") or 0),
            preemptible=bool(saved.get("preemptible")),
            placement=[(str(node), list(devices)) for node, devices in saved.get("places") or []],
            variables=dict(saved.get("env") or {}),
            virtual=bool(saved.get("virtual")),
            started=saved.get("started"),
            cpu=float(saved.get("cpu") or 0),
            memory=int(saved.get("memory") or 0),
            profile_title=str(saved.get("profile_title") or ""),
            team_title=str(saved.get("team_title") or ""),
            image=str(saved.get("image") or ""),
            resource=str(saved.get("resource") or ""),
            tolerations=[str(text) for text in saved.get("tolerations") or ()],
            disk=int(saved.get("disk") or 0),
            claim_templates={str(name): str(template) for name, template in (saved.get("claims") or {}).items()},
        )


_SAVED_AS = {"id": "session", "placement": "places", "variables": "env", "claim_templates": "claims"}
