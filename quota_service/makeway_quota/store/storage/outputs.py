"""Keep what workers send: logs, results and exceptions, piece by piece, each byte once however often it is sent.

A worker sends each of its outputs from offset 0 on. The log of an attempt is what all its workers sent, in the order of
arrival; beyond a limit its middle is dropped, and a row of its own tells how far a worker's log was known whose pieces
are gone. Small pieces are in rows, large ones where large files are.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, delete, func, insert, select, update

from .. import accounts, rows, writes
from ..database.database import Database
from ..records import ByteLimits
from ..reports.worker_reports import WorkerKey
from ..tables import outputs
from .contents import Contents

O = outputs.c  # noqa: E741
Kind = Literal["log", "result", "error"]
DROPPED = "dropped"
"""The kind of an empty row: the log of its worker was known up to `start` when its middle was dropped"""
GROW = 16 * 1024
"""Bytes up to which the last piece grows before a new one begins"""
MAX_PIECES = 64
"""Pieces that one read looks at"""


class OutOfPlace(Exception):
    """The bytes before these are missing: a worker has to send them, or say that it dropped them."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"the output is known up to offset {expected}; send what follows")
        self.expected = expected


class TooLong(Exception):
    """The output is longer than is kept."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the output is longer than {limit} bytes")
        self.limit = limit


class _Sent(NamedTuple):
    """Bytes that a worker sends: for which output, where they begin, and the rules for them."""

    kind: Kind
    offset: int
    data: bytes
    limit: int
    dropped: bool

    def after(self, known: int) -> _Sent:
        """Return what is new where the output is `known` so far; OutOfPlace and TooLong as `Outputs.append`."""
        end = self.offset + len(self.data)
        if self.offset > known and not (self.dropped and self.kind == "log"):
            raise OutOfPlace(known)
        if self.kind != "log" and end > max(known, self.limit):
            raise TooLong(self.limit)
        if self.offset >= known:
            return self
        return self._replace(offset=known, data=self.data[known - self.offset :])


class _Piece(NamedTuple):
    worker: int
    start: int
    place: int
    size: int
    blob: str | None

    @property
    def end(self) -> int:
        """The offset after it in what its worker sent."""
        return self.start + self.size


class Outputs:
    """The outputs of all attempts. Each method is one transaction; `append` writes a large piece before it."""

    def __init__(self, database: Database, contents: Contents) -> None:
        self._database = database
        self._contents = contents

    def append(
        self,
        key: WorkerKey,
        kind: Kind,
        offset: int,
        data: bytes,
        limit: int,
        *,
        dropped: bool = False,
        kept: ByteLimits | None = None,
    ) -> int:
        """Add bytes at an offset of what a worker sends, and return how far that is known now.

        Bytes that are known already are left out. OutOfPlace where bytes before are missing, unless they are of a log
        and the worker `dropped` them. A log beyond `limit` loses its middle; another output is TooLong. Of a gang the
        result of its first worker is kept that has one: what others send is taken, and dropped. StorageLimitExceeded
        where the bytes that are kept for the owner of the job exceed one of the limits with these.
        """
        given, digest = _Sent(kind, offset, data, limit, dropped), None
        if self._contents.outside(data):  # written before the transaction, so what is refused must be known before
            with self._database.read() as connection:
                if _is_superfluous(connection, key, kind):
                    return offset + len(data)
                given = given.after(_known(connection, key, kind))
            digest = self._contents.place(given.data) if given.data else None
        with self._database.write(quiet=True) as connection:
            if _is_superfluous(connection, key, kind):
                return offset + len(data)
            known = _known(connection, key, kind)
            new = given.after(known)
            if not new.data:
                return known
            if new is not given:  # the same was sent meanwhile, too
                digest = None
            offset, data = new.offset, new.data
            if kind == "result" and known == 0:
                _remove(connection, key[0], kind, [*_of(*key[:2], kind), O.worker > key[2]])
            accounts.add_output(connection, key[0], kind, len(data), kept)
            last, newest = _last(connection, key, kind, worker=key[2]), _last(connection, key, kind)
            place = 0 if newest is None else newest.place + newest.size
            grows = (
                newest is not None
                and newest == last
                and offset == newest.start + newest.size
                and newest.size + len(data) <= GROW
            )
            if newest is not None and grows and newest.blob is None:
                _grow(connection, key, kind, newest, data)
            else:
                _add(connection, key, kind, _Piece(key[2], offset, place, len(data), digest), data)
            if kind == "log" and place + len(data) > limit:
                _drop_middle(connection, key, limit)
            return offset + len(data)

    def read(self, workload: str, attempt: int, kind: Kind, offset: int, size: int) -> tuple[bytes, int]:
        """Return bytes from an offset, at most `size`, and the length of the output; nothing inside a gap.

        Of results and exceptions it is those of the first worker that sent one.
        """
        with self._database.read() as connection:
            worker = None if kind == "log" else _first_worker(connection, workload, attempt, kind)
            last = _last(connection, (workload, attempt, 0), kind, worker=worker)
            if last is None:
                return b"", 0
            column = O.place if worker is None else O.start
            here = _of(workload, attempt, kind, worker)
            first = select(func.max(column)).where(*here, column <= offset).scalar_subquery()
            query = select(column, O.size, O.blob).where(*here, column >= first, column < offset + size)
            wanted, at = [], offset
            for start, length, blob in connection.execute(query.order_by(column).limit(MAX_PIECES)):
                if not start <= at < start + length:
                    break
                wanted.append((start, blob))
                at = start + length
            inline = [start for start, blob in wanted if blob is None]
            rows_of = select(column, O.data).where(*here, column.in_(inline))
            data: dict[int, bytes] = dict(connection.execute(rows_of).all())
        whole = b"".join(data[start] if blob is None else self._contents.read(kind, blob) for start, blob in wanted)
        skip = offset - wanted[0][0] if wanted else 0
        return whole[skip : skip + size], (last.place if worker is None else last.start) + last.size

    def has(self, workload: str, attempt: int, kind: Kind) -> bool:
        """Whether a worker sent such an output."""
        with self._database.read() as connection:
            return _first_worker(connection, workload, attempt, kind) is not None

    def drop(self, key: WorkerKey, kind: Kind) -> None:
        """Remove an output of one worker which will never be whole."""
        with self._database.write(quiet=True) as connection:
            _remove(connection, key[0], kind, _of(*key[:2], kind, key[2]))

    def gap(self, workload: str, attempt: int) -> tuple[int, int] | None:
        """Return the bytes of a long log that were dropped (from, to); None while it is whole."""
        with self._database.read() as connection:
            places = connection.execute(
                select(O.place, O.size).where(*_of(workload, attempt, "log")).order_by(O.place)
            ).all()
        at = 0
        for place, size in places:
            if place > at:
                return at, place
            at = place + size
        return None


def _of(workload: str, attempt: int, kind: str, worker: int | None = None) -> list[Any]:
    conditions: list[Any] = [O.workload == rows.clean(workload), O.attempt == attempt, O.kind == kind]
    return conditions if worker is None else [*conditions, O.worker == worker]


def _last(connection: Connection, key: WorkerKey, kind: Kind, worker: int | None = None) -> _Piece | None:
    """Return the last piece of one worker, or of all."""
    order = O.place if worker is None else O.start
    query = select(O.worker, O.start, O.place, O.size, O.blob).where(*_of(*key[:2], kind, worker))
    row = connection.execute(query.order_by(order.desc()).limit(1)).first()
    return None if row is None else _Piece(*row)


def _known(connection: Connection, key: WorkerKey, kind: Kind) -> int:
    """Return how far an output of one worker is known."""
    last = _last(connection, key, kind, worker=key[2])
    known = 0 if last is None else last.start + last.size
    if kind != "log":
        return known
    dropped = connection.execute(select(func.max(O.start)).where(*_of(*key[:2], DROPPED, key[2]))).scalar_one()
    return max(known, dropped or 0)


def _first_worker(connection: Connection, workload: str, attempt: int, kind: Kind) -> int | None:
    query = select(func.min(O.worker)).where(*_of(workload, attempt, kind))
    result: int | None = connection.execute(query).scalar_one()
    return result


def _is_superfluous(connection: Connection, key: WorkerKey, kind: Kind) -> bool:
    """Whether an earlier worker of the gang has a result: that one is the result of the job, no other is kept."""
    first = _first_worker(connection, key[0], key[1], kind) if kind == "result" else None
    return first is not None and first < key[2]


def _remove(connection: Connection, workload: str, kind: Kind, where: list[Any]) -> None:
    """Remove outputs of a job, and subtract them from the account of its owner."""
    held = int(connection.execute(select(func.coalesce(func.sum(O.size), 0)).where(*where)).scalar_one())
    if held:
        accounts.add_output(connection, workload, kind, -held)
    connection.execute(delete(outputs).where(*where))


def _add(connection: Connection, key: WorkerKey, kind: Kind, piece: _Piece, data: bytes) -> None:
    if piece.blob is not None:
        writes.add_blob(connection, piece.blob, None, len(data))
        data = b""
    named = {"workload": key[0], "attempt": key[1], "kind": kind, "data": data}
    connection.execute(insert(outputs), {**named, **piece._asdict()})


def _grow(connection: Connection, key: WorkerKey, kind: Kind, piece: _Piece, data: bytes) -> None:
    one = [*_of(*key[:2], kind, piece.worker), O.start == piece.start]
    before = connection.execute(select(O.data).where(*one)).scalar_one()
    whole = before + data
    connection.execute(update(outputs).where(*one).values(data=whole, size=len(whole)))


def _drop_middle(connection: Connection, key: WorkerKey, limit: int) -> None:
    """Drop the oldest pieces of the second half of the limit, until a quarter of it is free."""
    log = _of(key[0], key[1], "log")
    held = int(connection.execute(select(func.sum(O.size)).where(*log)).scalar_one())
    if held <= limit:
        return
    query = select(O.place, O.size).where(*log, O.place >= limit // 2).order_by(O.place)
    cut = 0
    for place, size in connection.execute(query):
        if held <= limit - limit // 4:
            break
        held, cut = held - size, place + size
    gone = [*log, O.place >= limit // 2, O.place < cut]
    ends = connection.execute(select(O.worker, func.max(O.start + O.size)).where(*gone).group_by(O.worker)).all()
    _remove(connection, key[0], "log", gone)
    workers = [worker for worker, _ in ends]
    connection.execute(delete(outputs).where(*_of(key[0], key[1], DROPPED), O.worker.in_(workers)))
    named = {"workload": key[0], "attempt": key[1], "kind": DROPPED, "place": 0, "size": 0, "data": b"", "blob": None}
    connection.execute(insert(outputs), [{**named, "worker": worker, "start": end} for worker, end in ends])
