"""Convert records to rows and back: JSON columns, and the fields that a change may set.

SQLAlchemy's TypeDecorator does the same in 1.25 times the time when 1,000 active rows are read, and cannot serve the
writes of `statements.py`, which hands values to the driver as they are.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, cast

import orjson

from ..values import Notice, Place
from .damaged_rows import faults, repaired
from .records import Attempt, Decision, Event, NewWorkload, Workload

LARGE_FIELDS = ("command", "env", "source")
"""What is read with one workload only: a person may have submitted thousands of the largest ones."""
WORKLOAD_FIELDS = tuple(name for name in Workload._fields if name not in LARGE_FIELDS)
ATTEMPT_FIELDS = tuple(f.name for f in fields(Attempt))
CHANGEABLE = frozenset(WORKLOAD_FIELDS) - {"id", "kind", "owner", "version", "clone_of", "weight"}
ATTEMPT_CHANGEABLE = frozenset(ATTEMPT_FIELDS) - {"workload", "number"}
NOTHING: Mapping[str, str] = Workload._field_defaults["env"]
_POSITION = {name: at for at, name in enumerate(Workload._fields)}
_VERSION = _POSITION["version"]
_ASKED = tuple(f.name for f in fields(NewWorkload))
_READ_ASKED = attrgetter(*_ASKED)
_NUMBERS = frozenset({int, float, bool})

_AS_IS = frozenset({type(None), bool, float})
LARGEST = 2**63 - 1
MESSAGE_FIELDS = frozenset({"message", "reason_message"})
MAX_MESSAGE = 4000
"""Characters of a sentence about a workload, which may quote the output of a job: each is kept in memory"""


def clean(value: object) -> object:
    """Replace what a column cannot hold (NUL, half surrogates, huge integers): a job may report anything."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is str:
        text = cast(str, value)
        return text if text.isascii() and "\x00" not in text else _storable(text)
    if isinstance(value, int):
        return value if -LARGEST <= value <= LARGEST else max(-LARGEST, min(LARGEST, value))
    return _storable(value) if isinstance(value, str) else value


def _storable(text: str) -> str:
    text = text.replace("\x00", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def shorten_message(text: str) -> str:
    """Return a message, shortened to its beginning and end where it is longer than MAX_MESSAGE."""
    if len(text) <= MAX_MESSAGE:
        return text
    half = MAX_MESSAGE // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


def refuse_unstorable(value: object, where: str) -> None:
    """Raise ValueError where a submitted text holds NUL or half a surrogate."""
    if isinstance(value, str):
        if "\x00" in value:
            raise ValueError(f"{where} contains a NUL character; take it out")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} is not valid text at character {error.start}; write it as UTF-8") from error
    elif isinstance(value, Mapping):
        for key, item in value.items():
            refuse_unstorable(key, f"a name in {where}")
            refuse_unstorable(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            refuse_unstorable(item, f"{where}[{number}]")


def to_json(value: object) -> str:
    """Return compact JSON that every reader takes: null for NaN and infinity, and texts as `clean` leaves them."""
    try:
        written = orjson.dumps(value)
        if b"\\u0000" not in written:
            return written.decode()
    except TypeError:  # what orjson does not write: half surrogates, huge integers, named tuples, mappings
        pass
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {clean(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return clean(value)


def _mapping_to_json(value: Any) -> str:
    return to_json(dict(value)) if value else "{}"


def strings(text: str) -> tuple[str, ...]:
    """Return the texts of a JSON list; ValueError for anything else."""
    return tuple(_all_are(str, _list(text))) if text != "[]" else ()


def _list(text: str) -> list[Any]:
    result = orjson.loads(text)
    if type(result) is not list:
        raise ValueError("no JSON list")
    return result


def _all_are(kind: type, items: Any) -> Any:
    for item in items:
        if type(item) is not kind:
            raise ValueError(f"no list of {kind.__name__}")
    return items


def _mapping(text: str) -> dict[str, Any]:
    if text == "{}":
        return {}
    result = orjson.loads(text)
    if type(result) is not dict:
        raise ValueError("no JSON object")
    return result


def _places_to_json(value: Any) -> str:
    if not value:
        return "[]"
    result = [[place.node, list(place.devices), list(place.milli)] for place in value]
    for place, columns in zip(value, result, strict=True):
        columns += [place.backend] if place.backend else []
    return to_json(result)


def _places(text: str) -> tuple[Place, ...]:
    if text == "[]":
        return ()
    result = []
    for node, devices, milli, *backend in _list(text):
        _all_are(str, (node, *backend))
        result.append(Place(node, tuple(_all_are(int, devices)), tuple(_all_are(int, milli)), *backend))
    return tuple(result)


def _avoided(text: str) -> tuple[tuple[str, float], ...]:
    return tuple((str(node), float(until)) for node, until in _list(text)) if text != "[]" else ()


def _notice_to_json(value: Any) -> str | None:
    return None if value is None else to_json(asdict(cast(Notice, value)))


def _notice(text: str | None) -> Notice | None:
    if text is None:
        return None
    notice = Notice(**orjson.loads(text))
    if type(notice.at) not in _NUMBERS or type(notice.deadline) not in _NUMBERS or type(notice.reason) is not str:
        raise ValueError("a notice without its times")
    return notice


_ENCODERS: dict[str, Callable[[Any], str | None]] = {
    "reason_numbers": _mapping_to_json,
    "borrowed_from": lambda value: to_json(list(value)) if value else "[]",
    "lost_on": lambda value: to_json(list(value)) if value else "[]",
    "avoids": lambda value: to_json([list(one) for one in value]) if value else "[]",
    "placement": _places_to_json,
    "nomination": _places_to_json,
    "notice": _notice_to_json,
    "command": lambda value: to_json(list(value)),
    "env": _mapping_to_json,
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "reason_numbers": _mapping,
    "borrowed_from": strings,
    "lost_on": strings,
    "avoids": _avoided,
    "placement": _places,
    "nomination": _places,
    "notice": _notice,
}
_WORKLOAD_DECODERS = tuple((WORKLOAD_FIELDS.index(name), decode) for name, decode in _DECODERS.items())
_PLACEMENT = ATTEMPT_FIELDS.index("placement")
_KIND, _PRIORITY = WORKLOAD_FIELDS.index("kind"), WORKLOAD_FIELDS.index("priority")
_CHECKED_TYPES: set[tuple[object, ...]] = set()
"""Combinations of column types that passed the checks of `faults`, so that most rows need none"""
MAX_CHECKED_TYPES = 1000


def encode(values: Mapping[str, object]) -> dict[str, object]:
    """Return fields of a record as columns."""
    columns: dict[str, object] = {}
    for name, value in values.items():
        if name in MESSAGE_FIELDS and isinstance(value, str):
            value = shorten_message(value)
        if name in _ENCODERS:
            columns[name] = _ENCODERS[name](value)
        elif name != "source":
            columns[name] = value if type(value) in _AS_IS else clean(value)
    return columns


def encode_change(values: Mapping[str, object], allowed: frozenset[str], what: str) -> dict[str, object]:
    """Return the fields of a change as columns; ValueError names those that do not exist or never change."""
    unknown = sorted(set(values) - allowed)
    if unknown:
        raise ValueError(f"a change cannot set {', '.join(unknown)} of {what}; it can set {', '.join(sorted(allowed))}")
    return encode(values)


def decode(columns: Mapping[str, object]) -> dict[str, Any]:
    """Return columns as fields of a record, just as a later read would."""
    return {name: _DECODERS[name](value) if name in _DECODERS else value for name, value in columns.items()}


def workload(row: Iterable[Any], damaged: dict[str, Sequence[str]] | None = None) -> Workload:
    """Return the workload of a row whose columns are WORKLOAD_FIELDS in that order, without LARGE_FIELDS.

    Of a row that is damaged what can be read; `damaged` gets its id, with the fields that cannot.
    """
    given = tuple(row)
    values = list(given)
    try:
        for index, decode in _WORKLOAD_DECODERS:
            values[index] = decode(values[index])
        types = (*map(type, given), values[_KIND], values[_PRIORITY])
        if types not in _CHECKED_TYPES:
            if faults(WORKLOAD_FIELDS, given):
                raise ValueError
            if len(_CHECKED_TYPES) < MAX_CHECKED_TYPES:
                _CHECKED_TYPES.add(types)
    except Exception:
        values, fields = repaired(WORKLOAD_FIELDS, given, _DECODERS)
        if damaged is not None:
            damaged[values[0]] = fields
    return Workload(*values)


def with_large_fields(row: Iterable[Any]) -> Workload:
    """Return the workload of a row whose columns are WORKLOAD_FIELDS and LARGE_FIELDS in that order."""
    *values, command, env, source = row
    result = workload(values)
    try:
        return result._replace(command=strings(command), env=_mapping(env), source=source or "")
    except Exception:  # it cannot be started, which is its own end
        return result._replace(command=(), env=NOTHING, source="")


def without_large_fields(workload: Workload) -> Workload:
    """Return a workload without its LARGE_FIELDS, as it is read among many."""
    return workload._replace(command=(), env=NOTHING, source="")


def payload_bytes_of(command: Iterable[str], env: Mapping[str, str], source: str) -> int:
    """Return the bytes of a command, an environment and a source as UTF-8."""
    texts = itertools.chain(command, env, env.values(), (source,))
    return sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)


def changed(before: Workload, fields: Mapping[str, Any]) -> Workload:
    """Return a workload with some fields changed and the next version; as `_replace`, in 40 % of the time."""
    values = list(before)
    for name, value in fields.items():
        values[_POSITION[name]] = value
    values[_VERSION] = before.version + 1
    return Workload._make(values)


def workloads(rows: Iterable[Iterable[Any]], damaged: dict[str, Sequence[str]] | None = None) -> list[Workload]:
    """Return the workloads of many rows; `damaged` as for one."""
    return [workload(row, damaged) for row in rows]


def _mapping_or_nothing(text: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for what cannot be read, so that it hides no other row."""
    try:
        return _mapping(text)
    except Exception:
        return {}


def attempt(row: Iterable[Any]) -> Attempt:
    """Return the attempt of a row whose columns are ATTEMPT_FIELDS in that order."""
    values = list(row)
    try:
        values[_PLACEMENT] = _places(values[_PLACEMENT])
    except Exception:
        values[_PLACEMENT] = ()
    return Attempt(*values)


def decision(row: Iterable[Any]) -> Decision:
    """Return the decision of a row."""
    id, at, verb, workload, team, owner, code, message, numbers = row
    return Decision(id, at, verb, workload, team, owner, code, message, _mapping_or_nothing(numbers))


def event(row: Iterable[Any]) -> Event:
    """Return the event of a row."""
    id, at, kind, team, owner, workload, data = row
    return Event(id, at, kind, team, owner, workload, _mapping_or_nothing(data))


def initial_record(new: NewWorkload, now: float) -> Workload:
    """Return the record of a workload as it is submitted; ValueError where a text cannot be stored."""
    given = dict(zip(_ASKED, _READ_ASKED(new), strict=True))
    for name, value in given.items():
        if value and type(value) not in _NUMBERS:
            refuse_unstorable(value, name)
    given["min_workers"] = new.workers if new.min_workers is None else new.min_workers
    given["weight"] = payload_bytes_of(new.command, new.env, new.source)
    return Workload(
        **given,
        attempt=0,
        preemptions=0,
        failures=0,
        infra_failures=0,
        submitted_at=now,
        started_at=None,
        ended_at=None if new.state in ("pending", "starting", "running", "checkpointing") else now,
        not_before=None,
        over_quota=False,
        borrowed_from=(),
        placement=(),
        nomination=(),
        failed_node=None,
        exit_code=None,
        message="",
        checkpoint_step=None,
        checkpoint_at=None,
        notice=None,
        evicted_for=None,
        cancel_requested=False,
        server_started=False,
        ran=0.0,
        launched_at=None,
        lost_on=(),
        start_tries=0,
        avoids=(),
        version=1,
    )


MAX_EVENT_WORKERS = 100
"""Workers whose nodes are in the event about a change"""


def event_data(workload: Workload) -> dict[str, Any]:
    """Return what a page needs to redraw the row of a workload.

    `gpus` is in devices (0.5 is half of one), not in thousandths.
    """
    notice = workload.notice
    return {
        "id": workload.id,
        "kind": workload.kind,
        "state": workload.state,
        "version": workload.version,
        "name": workload.name,
        "team": workload.team,
        "owner": workload.owner,
        "profile": workload.profile,
        "gpus": workload.gpus * workload.workers / 1000,
        "workers": workload.workers,
        "attempt": workload.attempt,
        "preemptions": workload.preemptions,
        "over_quota": workload.over_quota,
        "borrowed_from": list(workload.borrowed_from),
        "nodes": [place.node for place in workload.placement[:MAX_EVENT_WORKERS]],
        "reason": {"code": workload.reason_code, "message": workload.reason_message}
        if workload.reason_code or workload.reason_message
        else None,
        "message": workload.message,
        "submitted_at": workload.submitted_at,
        "started_at": workload.started_at,
        "ended_at": workload.ended_at,
        "not_before": workload.not_before,
        "checkpoint_step": workload.checkpoint_step,
        "checkpoint_at": workload.checkpoint_at,
        "notice": None if notice is None else asdict(notice),
    }
