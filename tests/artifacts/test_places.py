"""Every place of large contents keeps them whole, verifies them, and removes only what is old."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from makeway_quota.artifacts.base import CHUNK, ORPHAN_AGE, Artifacts, ContentUnreadable, put_bytes, read_whole
from storage import Place

BIG = os.urandom(64) * (20 * 2**14)  # 20 MiB: an upload in parts


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(artifacts: Artifacts, data: bytes) -> str:
    put_bytes(artifacts, digest(data), data)
    return digest(data)


def listed(artifacts: Artifacts) -> list[str]:
    return [stored.digest for part in artifacts.list_pages() for stored in part]


@pytest.mark.parametrize("size", [0, 1, CHUNK, 8 * 2**20, len(BIG)])
def test_a_content_comes_back_as_it_was_put(place: Place, size: int) -> None:
    data = BIG[:size]
    name = put(place.artifacts, data)
    assert b"".join(place.artifacts.read(name)) == data
    assert listed(place.artifacts) == [name]


MEASURED = """
import hashlib, sys, tracemalloc
from pathlib import Path
from makeway_quota.artifacts.choice import make_artifacts
folder, s3 = sys.argv[1:]
place, size, chunk = make_artifacts(Path(folder) if folder else None, s3), 64 * 2**20, 2**20
content = hashlib.sha256(bytes(size)).hexdigest()
tracemalloc.start()
place.put(content, size, (bytes(chunk) for _ in range(size // chunk)))
print(tracemalloc.get_traced_memory()[1])
tracemalloc.reset_peak()
assert sum(len(chunk) for chunk in place.read(content)) == size
print(tracemalloc.get_traced_memory()[1])
"""


def words(place: Place) -> list[str]:
    """Return a place as the arguments of a process: folder, bucket."""
    kind, _, where = place.artifacts.where.removeprefix("the ").partition(" ")
    return [where, ""] if kind == "folder" else ["", where]


def test_a_content_is_never_in_memory_as_a_whole(place: Place) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, *words(place)], check=True, capture_output=True, text=True)
    assert max(map(int, done.stdout.split())) < 48 * 2**20


def test_a_content_that_is_missing_or_damaged_is_not_read_to_its_end(place: Place) -> None:
    with pytest.raises(ContentUnreadable, match="missing"):
        read_whole(place.artifacts, "0" * 64)
    name = put(place.artifacts, BIG)
    place.overwrite(BIG[:-1] + b"!")
    chunks = place.artifacts.read(name)
    received: list[bytes] = []
    with pytest.raises(ContentUnreadable, match="damaged"):
        received.extend(chunks)
    assert sum(map(len, received)) < len(BIG)


def test_a_name_that_is_no_digest_is_refused(place: Place) -> None:
    for name in ("../lock", "", "A" * 64, "0" * 63):
        with pytest.raises(ValueError, match="no SHA-256"):
            read_whole(place.artifacts, name)
        with pytest.raises(ValueError, match="no SHA-256"):
            put_bytes(place.artifacts, name, b"")


@pytest.mark.parametrize("size", [10, len(BIG)])
def test_chunks_that_are_not_the_content_leave_nothing(place: Place, size: int) -> None:
    with pytest.raises(ContentUnreadable, match="damaged"):
        place.artifacts.put(digest(b"other"), size, [BIG[:size]])
    assert listed(place.artifacts) == []
    with pytest.raises(ContentUnreadable, match="missing"):
        read_whole(place.artifacts, digest(b"other"))


def test_writers_of_the_same_content_do_not_disturb_each_other(place: Place) -> None:
    data = BIG[: 2 * CHUNK]
    errors: list[BaseException] = []

    def write() -> None:
        try:
            put(place.artifacts, data)
            assert read_whole(place.artifacts, digest(data)) == data
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    place.age(2 * ORPHAN_AGE)
    for part in place.artifacts.list_pages():
        for stored in part:
            if not stored.digest:
                assert place.artifacts.remove(stored, place.artifacts.now() - ORPHAN_AGE)
    assert listed(place.artifacts) == [digest(data)], "one copy is left, and it is whole"
    assert read_whole(place.artifacts, digest(data)) == data


def test_only_what_is_old_is_removed_and_a_writer_refreshes_it(place: Place) -> None:
    artifacts = place.artifacts
    name = put(artifacts, b"content")
    [[stored]] = [part for part in artifacts.list_pages() if part]
    assert not artifacts.remove(stored, artifacts.now() - ORPHAN_AGE), "it is recent"
    place.age(2 * ORPHAN_AGE)
    [[old]] = [part for part in artifacts.list_pages() if part]
    put(artifacts, b"content")  # between a list and a removal
    artifacts.remove(old, artifacts.now() - ORPHAN_AGE)
    assert read_whole(artifacts, name) == b"content"
    place.age(2 * ORPHAN_AGE)
    for part in artifacts.list_pages():
        for stored in part:
            assert artifacts.remove(stored, artifacts.now() - ORPHAN_AGE)
    assert listed(artifacts) == []
    with pytest.raises(ContentUnreadable, match="missing"):
        read_whole(artifacts, name)


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
from makeway_quota.artifacts.choice import make_artifacts
data = b"k" * (20 * 2**20)
def chunks():
    for at in range(0, len(data), 2**20):
        if at >= 12 * 2**20:
            os.kill(os.getpid(), signal.SIGKILL)
        yield data[at : at + 2**20]
folder, s3 = sys.argv[1:]
make_artifacts(Path(folder) if folder else None, s3).put(hashlib.sha256(data).hexdigest(), len(data), chunks())
"""


def test_a_writer_that_is_killed_leaves_no_content(place: Place) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, *words(place)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    content = digest(b"k" * (20 * 2**20))
    with pytest.raises(ContentUnreadable, match="missing"):
        read_whole(place.artifacts, content)
    [rest] = [stored for part in place.artifacts.list_pages() for stored in part]
    assert rest.digest == "", "what the write left is no content"
    now = place.artifacts.now()
    rest = rest._replace(at=now)  # moto has a fixed date
    assert not place.artifacts.remove(rest, now - ORPHAN_AGE), "it could still be written"
    assert place.artifacts.remove(rest, now + 60)
    assert listed(place.artifacts) == []
    assert put(place.artifacts, b"k" * (20 * 2**20)) == content
    assert len(read_whole(place.artifacts, content)) == 20 * 2**20
