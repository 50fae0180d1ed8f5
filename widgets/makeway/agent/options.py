"""Read the options of the agent from its command line, and tell what is wrong with them."""

from __future__ import annotations

import os
import re
import sys
from urllib.parse import urlsplit

from ..launcher.record import Record

USAGE = """usage: agent.pyz --url URL --machine ID --token-file FILE [OPTION…]

  --url URL             the service, as http://host:port/prefix
  --machine ID          the machine that this one is, as the service has named it
  --token-file FILE     has the token with which it joins; read again by each attempt to join
  --state FOLDER        what the agent remembers, and the folders of workers (/var/lib/makeway-agent)
  --gpus N              so many virtual GPUs, instead of those that nvidia-smi shows
  --spot file:PATH|aws|gcp
                        where the provider says that it takes the machine back
  --container-user U:G  account in containers, by numbers; only for an agent that is root (0:0)
  --shell PATH          runs the init script (/bin/sh)
  --init-seconds N      seconds after which the init script is killed (3600)
  --orphan-after N      seconds without the service and without workers after which the agent ends, until it has
                        joined and the service says another number (3600)

It exits with 0 when the machine is not needed any more and may be powered off."""
MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
DEFAULTS = {
    "state": "/var/lib/makeway-agent",
    "gpus": "",
    "spot": "",
    "container-user": "",
    "shell": "/bin/sh",
    "init-seconds": "3600",
    "orphan-after": "3600",
}


class WrongOptions(ValueError):
    """The command line cannot be understood; the message says why and what is expected."""


class AgentOptions(Record):
    """What the agent is started with. `gpus`: a number of virtual ones, None to count real ones."""

    url: str
    machine: str
    token_file: str
    state: str
    gpus: int | None
    spot: str
    container_user: str
    shell: str
    init_seconds: float
    orphan_after: float


def read_options(words: list[str]) -> AgentOptions:
    """Return the options; WrongOptions for what is missing, unknown or no such value."""
    given = dict(DEFAULTS)
    known = {*DEFAULTS, "url", "machine", "token-file"}
    remaining = list(words)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--") or name[2:] not in known:
            raise WrongOptions(f"there is no option {name}")
        if not equals:
            if not remaining:
                raise WrongOptions(f"{name} needs a value")
            value = remaining.pop(0)
        given[name[2:]] = value
    missing = [f"--{name}" for name in ("url", "machine", "token-file") if not given.get(name)]
    if missing:
        raise WrongOptions(f"{', '.join(missing)} must be given")
    _check(given)
    return AgentOptions(
        url=given["url"].rstrip("/"),
        machine=given["machine"],
        token_file=os.path.abspath(given["token-file"]),
        state=os.path.abspath(given["state"]),
        gpus=int(given["gpus"]) if given["gpus"] else None,
        spot=given["spot"],
        container_user=given["container-user"],
        shell=given["shell"],
        init_seconds=float(given["init-seconds"]),
        orphan_after=float(given["orphan-after"]),
    )


def _check(given: dict[str, str]) -> None:
    try:
        parts = urlsplit(given["url"])
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise WrongOptions(f"--url {given['url']!r} is no address: expected http://host:port/prefix")
    if not MACHINE.fullmatch(given["machine"]):
        raise WrongOptions(f"--machine {given['machine']!r} is no id of a machine")
    if given["gpus"] and not re.fullmatch(r"[0-9]{1,4}", given["gpus"]):
        raise WrongOptions(f"--gpus {given['gpus']!r} is no number of GPUs")
    if given["spot"] not in ("", "aws", "gcp") and not given["spot"].startswith("file:"):
        raise WrongOptions(f"--spot {given['spot']!r} is neither file:PATH, aws nor gcp")
    if given["container-user"] and not re.fullmatch(r"[0-9]{1,9}:[0-9]{1,9}", given["container-user"]):
        raise WrongOptions(f"--container-user {given['container-user']!r} is no UID:GID, such as 1000:1000")
    for name in ("init-seconds", "orphan-after"):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,3})?", given[name]):
            raise WrongOptions(f"--{name} {given[name]!r} is no number of seconds")


def complain(message: str) -> None:
    """Write how the agent is used, and what was wrong."""
    print(f"{USAGE}\n\nagent: {message}", file=sys.stderr)
