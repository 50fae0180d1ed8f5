"""Read the settings of the portal on one machine from the environment, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from makeway_api.settings import read_settings, setting

from .address import Address
from .state_directory import PORT, StateDirectory

SERVICE_PATH = "/services/makeway"


def _comma_separated(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Settings:
    """The portal's settings as plain values; the quota service itself reads those that both use."""

    state: StateDirectory = setting(
        "var",
        "Databases, jobs, secrets, logs: everything that must be kept.",
        name="state_dir",
        convert=lambda folder: StateDirectory.of({"MAKEWAY_STATE_DIR": folder}),
    )
    port: int = setting(PORT, "Where the portal listens, on 127.0.0.1.", min=1, max=65535, variable="PORT")
    mode: str = setting(
        "demo",
        "demo: sample users, everything runs under your account; system: accounts of this machine, started as root.",
        choices=("demo", "system"),
    )
    keep: bool = setting(False, "Leave jobs and notebooks running when the portal stops.")
    lease_seconds: float = setting(
        15.0, "A session's lease ends this long after its last renewal.", min=3.0, max=3600.0
    )
    admin_groups: frozenset[str] = setting(
        "makeway-admins",
        "System mode: Unix groups whose members administer the Hub and Makeway, separated by commas.",
        convert=_comma_separated,
    )
    allowed_groups: frozenset[str] = setting(
        "", "System mode: only members of these Unix groups may log in; empty: everyone.", convert=_comma_separated
    )
    open: bool = setting(
        False,
        "Allow a configuration of the site that opens the demo, internal ports of the portal, or unencrypted "
        "passwords to the network, as inside of a container or behind a firewall.",
    )

    @property
    def address(self) -> Address:
        """Where the portal listens, unless the site's configuration says otherwise."""
        return Address(port=self.port)

    @property
    def url(self) -> str:
        """The portal's address for browsers, unless the site's configuration says otherwise."""
        return self.address.loopback_url


def read(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings; ValueError names the variable that is wrong and what it accepts."""
    if env.get("KEEP") and not env.get("MAKEWAY_KEEP"):
        env = {**env, "MAKEWAY_KEEP": env["KEEP"]}
    result = Settings(**read_settings(Settings, env, name="PortalSettings"))
    # empty means no groups here, where for other settings it means the default
    return replace(result, admin_groups=frozenset()) if env.get("MAKEWAY_ADMIN_GROUPS") == "" else result
