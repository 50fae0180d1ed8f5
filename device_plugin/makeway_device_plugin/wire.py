"""Encode and decode the few protobuf messages of the device plugin API, which are dataclasses with field numbers.

The API is small and frozen (`v1beta1`): strings, booleans, nested messages, lists and maps of strings. A field that is
not known here is skipped, as protobuf wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, field, fields
from typing import Any, Self

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
MAX_VARINT = 10


class WireError(ValueError):
    """The bytes are no message."""


def numbered(number: int, kind: Any, *, many: bool = False, default: Any = None) -> Any:
    """Return a dataclass field with its number; `kind` is str, bool, int, dict (of strings) or a message."""
    about = {"number": number, "kind": kind, "many": many}
    if many:
        return field(default_factory=list, metadata=about)
    if kind is dict:
        return field(default_factory=dict, metadata=about)
    return field(default=default if default is not None else None if _is_message(kind) else kind(), metadata=about)


class Message:
    """A message; its subclasses are dataclasses whose fields are `numbered`."""

    def encode(self) -> bytes:
        """Return the message as protobuf; fields with their default value take no bytes."""
        out = bytearray()
        for one in fields(self):  # type: ignore[arg-type]
            for value in _values(getattr(self, one.name)):
                out += _encode_field(one.metadata["number"], value)
        return bytes(out)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the message that the bytes hold; raise WireError for anything else."""
        known: dict[int, Field[Any]] = {one.metadata["number"]: one for one in fields(cls)}  # type: ignore[arg-type]
        message = cls()
        for number, raw in _parts(data):
            if number in known:
                _store(message, known[number], raw)
        return message


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message)


def _values(value: Any) -> Iterator[Any]:
    """Yield what is encoded for a field, one record each; nothing for a default value."""
    if isinstance(value, list):
        yield from value
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, Message) or value:
        yield value


def _encode_field(number: int, value: Any) -> bytes:
    if isinstance(value, int):  # booleans, too
        return _varint(number << 3 | VARINT) + _varint(value)
    if isinstance(value, tuple):  # an entry of a map is a message with a key and a value
        content = b"".join(_encode_field(at, part) for at, part in enumerate(value, 1))
    else:
        content = value.encode()  # a string and a message alike
    return _varint(number << 3 | BYTES) + _varint(len(content)) + content


def _store(message: Message, item: Field[Any], raw: int | bytes) -> None:
    kind = item.metadata["kind"]
    if kind in (bool, int):
        if not isinstance(raw, int):
            raise WireError(f"{item.name} is no number")
        setattr(message, item.name, kind(raw))
        return
    if not isinstance(raw, bytes):
        raise WireError(f"{item.name} is a number")
    if kind is dict:
        entry = {number: _text(part) for number, part in _parts(raw)}
        getattr(message, item.name)[entry.get(1, "")] = entry.get(2, "")
        return
    value = kind.decode(raw) if _is_message(kind) else _text(raw)
    if item.metadata["many"]:
        getattr(message, item.name).append(value)
    else:
        setattr(message, item.name, value)


def _text(raw: int | bytes) -> str:
    try:
        return raw.decode() if isinstance(raw, bytes) else ""
    except UnicodeDecodeError as problem:
        raise WireError(f"a string is not UTF-8: {problem}") from problem


def _parts(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the records of a message: field number, and a number or bytes."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in FIXED_SIZES:
            size = FIXED_SIZES[kind]
        else:
            raise WireError(f"field {number} has the unknown wire type {kind}")
        if at + size > len(data):
            raise WireError(f"field {number} ends after the message")
        yield number, data[at : at + size]
        at += size


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(MAX_VARINT):
        if at + place >= len(data):
            raise WireError("a number ends after the message")
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, at + place + 1
    raise WireError("a number is longer than 10 bytes")
