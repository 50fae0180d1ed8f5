"""Read the settings of the portal on one machine from the environment, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from makeway_api.environment import read_environment
from traitlets import Bool, Enum, Float, Int, Unicode
from traitlets.config import Configurable

from .address import Address
from .state_directory import PORT, StateDirectory

SERVICE_PATH = "/services/makeway"


@dataclass(frozen=True, slots=True)
class Settings:
    """The portal's settings as plain values."""

    state: StateDirectory
    port: int
    mode: str
    keep: bool
    lease_seconds: float
    admin_groups: frozenset[str]
    allowed_groups: frozenset[str]
    open: bool

    @property
    def address(self) -> Address:
        """Where the portal listens, unless the site's configuration says otherwise."""
        return Address(port=self.port)

    @property
    def url(self) -> str:
        """The portal's address for browsers, unless the site's configuration says otherwise."""
        return self.address.own


class PortalSettings(Configurable):
    """The portal's settings with their variables and help texts; the service reads those that it shares itself."""

    port = Int(PORT, min=1, max=65535, help="Where the portal listens, on 127.0.0.1 (PORT).").tag(
        config=True, env="PORT"
    )
    state_dir = Unicode(
        "var", help="Databases, jobs, secrets, logs: everything that must be kept (MAKEWAY_STATE_DIR)."
    ).tag(config=True, env="MAKEWAY_STATE_DIR")
    mode = Enum(
        ["demo", "system"],
        default_value="demo",
        help="demo: sample users, everything runs under your account; system: accounts of this machine, started as "
        "root (MAKEWAY_MODE).",
    ).tag(config=True, env="MAKEWAY_MODE")
    keep = Bool(False, help="Leave jobs and notebooks running when the portal stops (MAKEWAY_KEEP=1).").tag(
        config=True, env="MAKEWAY_KEEP"
    )
    lease_seconds = Float(
        15.0,
        min=3.0,
        max=3600.0,
        help="A session's lease ends this long after its last renewal (MAKEWAY_LEASE_SECONDS).",
    ).tag(config=True, env="MAKEWAY_LEASE_SECONDS")
    admin_groups = Unicode(
        "makeway-admins",
        help="System mode: Unix groups whose members administer the Hub and Makeway, separated by commas "
        "(MAKEWAY_ADMIN_GROUPS).",
    ).tag(config=True, env="MAKEWAY_ADMIN_GROUPS")
    allowed_groups = Unicode(
        "", help="System mode: only members of these Unix groups may log in; empty: everyone (MAKEWAY_ALLOWED_GROUPS)."
    ).tag(config=True, env="MAKEWAY_ALLOWED_GROUPS")
    open = Bool(
        False,
        help="Allow a configuration of the site that opens the demo, inner parts of the portal, or passwords in clear "
        "to the network, as inside of a container or behind a firewall (MAKEWAY_OPEN=1).",
    ).tag(config=True, env="MAKEWAY_OPEN")


def read(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings; ValueError names the variable that is wrong and what it accepts."""
    if env.get("KEEP") and not env.get("MAKEWAY_KEEP"):
        env = {**env, "MAKEWAY_KEEP": env["KEEP"]}
    found = PortalSettings()
    read_environment(found, env)
    return Settings(
        state=StateDirectory.of(env),
        port=found.port,
        mode=found.mode,
        keep=found.keep,
        lease_seconds=found.lease_seconds,
        admin_groups=_names(env.get("MAKEWAY_ADMIN_GROUPS", found.admin_groups)),
        allowed_groups=_names(found.allowed_groups),
        open=found.open,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())
