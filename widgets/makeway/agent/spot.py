"""Read when the provider takes a spot machine back: from a file, or the metadata service of AWS (IMDSv2) or Google."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time

from ..launcher.files import number, read_json

METADATA = ("169.254.169.254", 80)
AWS_PATH = "/latest/meta-data/spot/instance-action"
TOKEN_PATH = "/latest/api/token"
GCP_PATH = "/computeMetadata/v1/instance/preempted"
GCP_NOTICE = 30.0
"""Seconds that Google gives a spot machine, from when its metadata say that it is taken back"""
TIMEOUT = 2.0
MAX_ANSWER = 4096
TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?Z")


class SpotNotice:
    """The deadline of this machine, as its provider last said it; Unix seconds by the provider's clock."""

    def __init__(self, source: str, address: tuple[str, int] = METADATA) -> None:
        self._file = source[len("file:") :] if source.startswith("file:") else ""
        self._provider = source if source in ("aws", "gcp") else ""
        self._address = address
        self._deadline: float | None = None

    @property
    def watched(self) -> bool:
        """Whether there is a file or a metadata service to read."""
        return bool(self._file or self._provider)

    @property
    def pause(self) -> float:
        """Seconds between two reads: AWS allows one in five seconds."""
        return 5.0 if self._provider == "aws" else 1.0

    def deadline(self) -> float | None:
        """Read and return the deadline, None without one; the last one where the metadata service does not answer."""
        if self._file:
            self._deadline = number(read_json(self._file).get("deadline"))
        elif self._provider:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
                if self._provider == "aws":
                    self._deadline = _ask_aws(self._address)
                elif _preempted(self._address):
                    self._deadline = self._deadline or time.time() + GCP_NOTICE
                else:
                    self._deadline = None
        return self._deadline


def _ask_aws(address: tuple[str, int]) -> float | None:
    """Return when AWS stops or terminates this machine; None if it does not. ValueError for no answer to that."""
    connection = http.client.HTTPConnection(address[0], address[1], timeout=TIMEOUT)
    try:
        connection.request("PUT", TOKEN_PATH, headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        status, token = _answer(connection)
        if status != 200:
            raise ValueError(f"status {status}")
        connection.request("GET", AWS_PATH, headers={"X-aws-ec2-metadata-token": token})
        status, text = _answer(connection)
    finally:
        connection.close()
    if status == 404:
        return None
    if status != 200:
        raise ValueError(f"status {status}")
    return _time(json.loads(text)["time"])


def _preempted(address: tuple[str, int]) -> bool:
    """Whether Google takes this machine back. ValueError for no answer to that."""
    connection = http.client.HTTPConnection(address[0], address[1], timeout=TIMEOUT)
    try:
        connection.request("GET", GCP_PATH, headers={"Metadata-Flavor": "Google"})
        status, text = _answer(connection)
    finally:
        connection.close()
    if status != 200 or text not in ("TRUE", "FALSE"):
        raise ValueError(f"status {status}")
    return text == "TRUE"


def _answer(connection: http.client.HTTPConnection) -> tuple[int, str]:
    response = connection.getresponse()
    text = response.read(MAX_ANSWER).decode("utf-8", "replace")
    response.read()
    return response.status, text.strip()


def _time(text: str) -> float:
    import calendar  # the agent keeps it out of its memory

    result = TIME.fullmatch(str(text))
    if result is None:
        raise ValueError(f"{text!r} is no time")
    year, month, day, hour, minute, second = map(int, result.groups())
    return float(calendar.timegm((year, month, day, hour, minute, second)))
