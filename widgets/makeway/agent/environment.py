"""Make the environment of init scripts and launchers from that of the agent: names that are known to hold no secret."""

from __future__ import annotations

import os

ALLOWED_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "LOCAL_MACHINE_FOLDER"),
    )
)
"""LOCAL_MACHINE_FOLDER: the mark by which the local provider finds all processes of a machine"""
ALLOWED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_")
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "none", "NVIDIA_VISIBLE_DEVICES": "none"}


def machine_environment(cpu_only: bool = False) -> dict[str, str]:
    """Return the environment for programs of this machine; `cpu_only`: no GPU is visible to them."""
    allowed = {
        name: value
        for name, value in os.environ.items()
        if name in ALLOWED_VARIABLES or name.startswith(ALLOWED_PREFIXES)
    }
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
    return {**env, **allowed, **(NO_GPUS if cpu_only else {})}
