"""Check the files, command and environment of a submission; each refusal is one sentence."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath

from makeway_api.durations import duration
from makeway_api.models import JobRequest
from makeway_api.quantities import count

from ...engine.snapshot import Profile
from ...policy import CAUGHT_BY_FRAMEWORKS, Document, workers_limit
from ...store.records import NewWorkload
from ...store.rows import payload_bytes_of
from ..refusals import refuse

ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
READS_NOTICE = re.compile(r"makeway\.checkpoint|from\s+makeway\s+import\b[^#\n]*\bcheckpoint\b|MAKEWAY_STOP_FILE")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_ENV_BYTES = 256_000
MAX_COMMAND_BYTES = 64 * 1024
MAX_PATH_BYTES = 1_000_000
"""Of all file names of a submission: its workers are told all of them in one answer"""

Files = tuple[tuple[str, bytes, bool], ...]


def read_files(request: JobRequest, max_bytes: int) -> Files:
    """Decode the files of a submission, refusing paths that lead out of the job's directory."""
    files: dict[str, tuple[str, bytes, bool]] = {}
    total = named = 0
    for file in request.files:
        path = _path(file.path)
        named += len(path.encode())
        if named > MAX_PATH_BYTES:
            raise refuse(
                f"The names of the {len(request.files):,} files of this job are longer than 1 MB: "
                "put the files into an archive.",
                "file_names_too_long",
                413,
                limit_bytes=MAX_PATH_BYTES,
            )
        total += len(file.data) * 3 // 4
        if total > max_bytes + 2 * len(request.files):
            raise refuse(
                f"The files of this job are larger than {max_bytes // 1_000_000} MB. Leave large data where it is "
                f"(a shared directory, object storage) and submit only code.",
                "files_too_large",
                413,
                limit_bytes=max_bytes,
            )
        if path in files:
            raise refuse(f"The file “{path}” is in the submission twice.", "duplicate_file", 422)
        try:
            data = base64.b64decode(file.data, validate=True)
        except (binascii.Error, ValueError):
            raise refuse(f"The content of the file “{path}” is not valid base64.", "bad_file", 422) from None
        files[path] = (path, data, file.executable)
    _check_nesting(files)
    return tuple(files.values())


def bytes_of(files: Sequence[tuple[str, bytes, bool]]) -> int:
    """Return the bytes of the contents of files."""
    return sum(len(data) for _, data, _ in files)


def _path(text: str) -> str:
    path = PurePosixPath(text)
    if CONTROL.search(text) or path.is_absolute() or ".." in path.parts or str(path) in ("", ".") or "\\" in text:
        raise refuse(f"“{text[:120]}” cannot be a file of a job: give a relative path without “..”.", "bad_path", 422)
    if not _encodable(text) or any(len(part.encode()) > 255 for part in path.parts):
        raise refuse(f"The file name “{text[:60]}…” is too long or not valid Unicode.", "bad_path", 422)
    return str(path)


def _check_nesting(files: dict[str, tuple[str, bytes, bool]]) -> None:
    for path in files:
        for parent in PurePosixPath(path).parents:
            if str(parent) in files:
                raise refuse(f"“{parent}” is both a file and the directory of “{path}”.", "bad_path", 422)


def check_process(request: JobRequest) -> None:
    """Refuse a command or an environment that no process could be started with."""
    if any("\x00" in word or not _encodable(word) for word in request.command):
        raise refuse("The command has a NUL character or invalid Unicode in it.", "bad_command", 422)
    if not request.command[0].strip():
        raise refuse("The command is empty: say what to run.", "bad_command", 422)
    if (long := payload_bytes_of(request.command, {}, "")) > MAX_COMMAND_BYTES:
        raise refuse(
            f"The command has {long:,} bytes, and {MAX_COMMAND_BYTES:,} is the most: put the code into a file of the "
            "job and run that file.",
            "bad_command",
            422,
            bytes=long,
            limit_bytes=MAX_COMMAND_BYTES,
        )
    for name, value in request.env.items():
        if not ENV_NAME.match(name) or "\x00" in value or not _encodable(value):
            raise refuse(f"“{name[:60]}” cannot be an environment variable with that value.", "bad_env", 422)
        if name.startswith("MAKEWAY_") or name == "CUDA_VISIBLE_DEVICES":
            raise refuse(f"{name} is set by Makeway and cannot be given.", "reserved_env", 422)
    if payload_bytes_of((), request.env, "") > MAX_ENV_BYTES:
        raise refuse("The environment is larger than 256 kB: put large values into a file of the job.", "bad_env", 422)
    if not _encodable(request.name) or not _encodable(request.source) or "\x00" in request.source:
        raise refuse("The name or the source has a NUL character or invalid Unicode in it.", "bad_name", 422)


def check_workers(document: Document, workers: int | None, profile: Profile) -> None:
    """Refuse more workers than a job of the profile may have."""
    facts = document.profile_facts[profile.name]
    limit = workers_limit(profile, facts)
    if limit is not None and (workers or 0) > limit:
        raise refuse(
            f"A job of {facts.title} may have {count(limit, 'worker')}, and this one asks for {workers:,}: ask "
            "for fewer, or have an administrator raise max_workers of the profile.",
            "too_many_workers",
            422,
            workers=workers,
            limit=limit,
        )


def time_limit_note(wanted: int | None, profile: Profile) -> list[str]:
    """Return that the profile ends a job earlier than was asked for, where it does."""
    if wanted is None or profile.time_limit is None or wanted <= profile.time_limit:
        return []
    return [
        f"Its time limit is {duration(profile.time_limit)}, the most that its profile allows; "
        f"{duration(wanted)} was asked for."
    ]


def signal_note(signal: str, request: JobRequest) -> list[str]:
    """Return that a profile's signal may not reach a job as a notice, unless its code reads the notice's file."""
    why = CAUGHT_BY_FRAMEWORKS.get(signal)
    if why is None:
        return []
    code = [request.source, *(_text(file.data) for file in request.files if file.path.endswith(".py"))]
    if any(READS_NOTICE.search(text) for text in code):
        return []
    return [
        f"Its profile sends the notice as {signal}, which may not reach the job's code: {why}. Code that uses "
        "makeway.checkpoint gets the notice without a signal."
    ]


def _text(data: str) -> str:
    try:
        return base64.b64decode(data).decode("utf-8", "replace")
    except ValueError:
        return ""


def new_job(
    document: Document, request: JobRequest, owner: str, team: str, profile: Profile, image: str | None
) -> NewWorkload:
    """Return a checked submission as a new record of the store, with an id of its own."""
    facts = document.profile_facts[profile.name]
    id = f"j-{secrets.token_hex(4)}"
    limits = [limit for limit in (request.time_limit, profile.time_limit) if limit is not None]
    return NewWorkload(
        id=id,
        kind="job",
        team=team,
        profile=profile.name,
        owner=owner,
        name=CONTROL.sub(" ", request.name).strip() or id,
        priority=request.priority.value,
        preemptible=True,
        gpus=profile.gpus,
        workers=request.workers or profile.workers,
        min_workers=None if request.workers else profile.min_workers,
        cpu=profile.cpu,
        memory=profile.memory,
        time_limit=min(limits) if limits else None,
        grace=profile.grace or document.settings.grace,
        signal=facts.signal,
        image=image,
        max_failures=request.max_failures,
        command=tuple(request.command),
        env={**facts.env, **request.env},
        source=request.source,
        clone_of=request.clone_of,
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
