"""Keep the token of a remote worker from its job: out of environments and command lines, and this process unreadable.

Used once, before the job is there. What a process starts with stays readable in `/proc` for others of its account,
whatever it does to its variables later: so one that got the token in its environment starts itself again without it.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_DUMPABLE = 4
TOKEN, TOKEN_FILE, TOKEN_FD = "MAKEWAY_ATTEMPT_TOKEN", "MAKEWAY_ATTEMPT_TOKEN_FILE", "MAKEWAY_ATTEMPT_TOKEN_FD"
MAX_TOKEN = 65536


def take_token() -> str:
    """Return the token, which is nowhere in `/proc` then, nor in a file; OSError or ValueError where that fails."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # others of the account can read no memory of this process
    if token := os.environ.pop(TOKEN, ""):
        _start_again(token)
    if path := os.environ.pop(TOKEN_FILE, ""):
        with open(path, encoding="utf-8") as file:
            token = file.read(MAX_TOKEN)
        os.unlink(path)
    elif number := os.environ.pop(TOKEN_FD, ""):
        with os.fdopen(int(number), encoding="utf-8") as file:
            token = file.read(MAX_TOKEN)
    return token.strip()


def _start_again(token: str) -> None:
    """Replace this process by the same program, which gets the token through a pipe."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    os.write(writing, token.encode())
    os.environ[TOKEN_FD] = str(reading)
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[:-1]
    os.execv(sys.executable or "/proc/self/exe", words)
