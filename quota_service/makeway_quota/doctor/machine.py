"""Check one machine: folders, disk, inodes, Python, ports and GPUs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..backends.local.gpus import real_gpus
from ..settings import ServiceSettings, netloc
from .findings import Finding

GIB = 2**30
LOW_DISK_BYTES, FULL_DISK_BYTES = 5 * GIB, GIB
"""With fewer free bytes, a warning and an error"""
LOW_INODES_SHARE = 0.05
"""With a smaller share of free inodes, a warning"""
OLDEST_PYTHON = (3, 11)
NVIDIA_SMI_TIMEOUT = 15.0
"""Seconds"""


def folders(settings: ServiceSettings) -> Iterator[Finding]:
    """Yield which folders of the service cannot be written to, or have little room."""
    for folder in filter(None, (settings.state_dir, settings.artifacts_dir)):
        if why := _unwritable(folder):
            yield Finding(
                "error",
                f"The folder {folder} cannot be written to: {why}.",
                str(folder),
                f"Let user {os.geteuid()} write there, or mount a volume that is not read-only nor full.",
            )
            continue
        yield from _disk_space(folder)


def _unwritable(folder: Path) -> str:
    """Return why no file can be made in a folder, or in the one above it if it does not exist yet; "" if one can."""
    name = _existing(folder) / f".makeway-doctor-{uuid.uuid4().hex}"
    try:
        with name.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
    return ""


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _disk_space(folder: Path) -> Iterator[Finding]:
    folder = _existing(folder)
    free, inodes = shutil.disk_usage(folder).free, os.statvfs(folder)
    if free < LOW_DISK_BYTES:
        yield Finding(
            "error" if free < FULL_DISK_BYTES else "warning",
            f"The disk of {folder} has {free / GIB:.1f} GiB free.",
            str(folder),
            "Make room, or move MAKEWAY_STATE_DIR to a larger disk: submissions are refused when it is full.",
        )
    if inodes.f_files and inodes.f_favail / inodes.f_files < LOW_INODES_SHARE:
        yield Finding(
            "error" if not inodes.f_favail else "warning",
            f"The disk of {folder} has {inodes.f_favail} free inodes of {inodes.f_files}.",
            str(folder),
            "Remove many small files, or move MAKEWAY_STATE_DIR.",
        )


def exposed_secrets(settings: ServiceSettings) -> Iterator[Finding]:
    """Yield secrets that others may read."""
    folder = settings.state_dir / "secrets"
    if not folder.is_dir():
        return
    for path in sorted([folder, *folder.iterdir()]):
        if path.stat().st_mode & 0o077:
            yield Finding("warning", f"{path} is open to other accounts.", str(path), f"chmod go-rwx {path}")


def python() -> Iterable[Finding]:
    """Return a finding if this Python is too old."""
    if sys.version_info >= OLDEST_PYTHON:
        return []
    version, oldest = ".".join(map(str, sys.version_info[:2])), ".".join(map(str, OLDEST_PYTHON))
    return [Finding("error", f"Python {version} is older than {oldest}.", sys.executable, "Install a newer Python.")]


def port(settings: ServiceSettings) -> Iterator[Finding]:
    """Yield a finding if another program than Makeway has the port of the service."""
    host = settings.host or "127.0.0.1"
    why = ""
    for address in ("0.0.0.0", "::") if host == "::" else (host,):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.create_server((address, settings.port), family=family).close()
        except OSError as error:
            if host != "::" or error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                why = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
    if not why:
        return
    if not _answers_as_makeway(settings):
        yield Finding(
            "error",
            f"The port {settings.port} cannot be used: {why}.",
            netloc(host, settings.port),
            "End the program that has it (ss --listening --tcp --processes), or choose another port.",
        )


def _answers_as_makeway(settings: ServiceSettings) -> bool:
    local_addresses = {"": ("127.0.0.1",), "0.0.0.0": ("127.0.0.1",), "::": ("127.0.0.1", "::1")}
    for host in local_addresses.get(settings.host, (settings.host,)):
        with contextlib.suppress(OSError), socket.create_connection((host, settings.port), 2.0) as connection:
            connection.sendall(f"GET {settings.prefix.rstrip('/')}/healthz HTTP/1.0\r\n\r\n".encode())
            if b" 200 " in connection.recv(64):
                return True
    return False


def gpus(settings: ServiceSettings) -> Iterator[Finding]:
    """Yield a finding if the machine has NVIDIA devices that the driver does not show."""
    devices = sorted(Path("/sys/bus/pci/devices").glob("*/vendor"))
    cards = [path for path in devices if _is_nvidia(path)]
    if not cards or settings.virtual_gpus or real_gpus():
        return
    message = "nvidia-smi is not installed"
    if tool := shutil.which("nvidia-smi"):
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT, check=False)
        message = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    yield Finding(
        "error",
        f"The machine has {len(cards)} NVIDIA devices, and the driver shows none: {message}.",
        "GPUs",
        "Install or repair NVIDIA's driver, and restart the machine after an upgrade of the kernel.",
    )


def _is_nvidia(vendor: Path) -> bool:
    try:
        display = (vendor.parent / "class").read_text(encoding="ascii").startswith("0x03")
        return display and vendor.read_text(encoding="ascii").strip() == "0x10de"
    except OSError:
        return False
