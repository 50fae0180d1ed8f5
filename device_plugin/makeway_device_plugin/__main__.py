"""The command `makeway-device-plugin`: offer virtual GPUs to the kubelet of this node until it is stopped."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("/var/lib/kubelet/device-plugins")
RESOURCE = "nvidia.com/gpu"
RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
MAX_GPUS = 1024


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    made = argparse.ArgumentParser(
        prog="makeway-device-plugin", description="Offer virtual GPUs to the kubelet of this node. Needs root."
    )
    made.add_argument("--count", type=_count, default=8, metavar="N", help="how many GPUs (default: 8)")
    made.add_argument(
        "--resource", type=_resource, default=RESOURCE, help="the extended resource to offer (default: nvidia.com/gpu)"
    )
    made.add_argument(
        "--unhealthy",
        type=Path,
        metavar="FILE",
        help="a file with the indices of unhealthy devices, one a line; read twice a second",
    )
    made.add_argument(
        "--folder", type=Path, default=FOLDER, help=f"the kubelet's device plugin folder (default: {FOLDER})"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit status."""
    wanted = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        from .plugin import Devices, Plugin
    except ModuleNotFoundError as missing:
        install = "pip install 'makeway[device-plugin]'"
        print(f"makeway-device-plugin needs makeway[device-plugin] ({missing}): {install}.", file=sys.stderr)
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        Plugin(wanted.folder, wanted.resource, Devices(wanted.count, wanted.unhealthy)).run(stop)
    except PermissionError as problem:
        print(f"makeway-device-plugin: {problem.filename} cannot be used: run the command as root.", file=sys.stderr)
        return 1
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GPUS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs from 1 to {MAX_GPUS}")
    return int(text)


def _resource(text: str) -> str:
    if not RESOURCE_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is not the name of an extended resource, such as {RESOURCE}")
    return text


if __name__ == "__main__":
    sys.exit(main())
