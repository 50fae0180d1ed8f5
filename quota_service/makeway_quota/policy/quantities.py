"""Read single values of a document: names, texts, choices, and quantities with their units."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, PlainValidator, StringConstraints, ValidationInfo, WrapValidator

from ..engine.snapshot import GPU, PRIORITIES, from_milli
from .issues import quote
from .source import Plain
from .tables import kind, problem, wrong

NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)")
SLUG = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
SLUG_RULE = (
    "small letters, digits, dots, dashes and underscores, at most 63, beginning and ending with a letter or digit"
)
LATEST = 250_000_000_000
"""Seconds since the epoch that are still a date (in the year 9892)."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIB = {"Mi": 1, "MiB": 1, "Gi": 1024, "GiB": 1024, "Ti": 1024 * 1024, "TiB": 1024 * 1024}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number between two bounds, in `unit`, or a text with one of `units` (and its factor).

    `scale` 1000 reads into thousandths, which are exact; `whole` takes no fractions.
    """

    unit: str = ""
    max_value: float = math.inf
    min_value: float = 0
    whole: bool = False
    scale: int = 1
    units: Mapping[str, float] = field(default_factory=dict, hash=False)
    hint: str = ""
    large: str = "large"

    def __call__(self, value: Any) -> float:
        """Return the value in the unit, times `scale`: an int where it is whole or scaled."""
        amount = self._amount(value)
        if not self.min_value <= amount <= self.max_value:
            size, end, bound = (
                ("small", "least", self.min_value) if amount < self.min_value else (self.large, "most", self.max_value)
            )
            raise problem(f"{value[:60]} is too {size}; the {end} is {bound:,.12g} {self.unit}".rstrip())
        if self.whole and amount != int(amount):
            raise problem(f"{value[:60]} is not a whole number{self._of}")
        scaled = amount * self.scale
        if self.scale > 1 and abs(scaled - round(scaled)) > 1e-6 * max(1.0, amount):
            raise problem(f"{value[:60]} is finer than a thousandth of a {self.unit.removesuffix('s')}; round it")
        return round(scaled) if self.whole or self.scale > 1 else amount

    def _amount(self, value: Any) -> float:
        match = WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match and match[2] in self.units:
            amount = float(match[1]) * self.units[match[2]]
            return round(amount) if self.whole and math.isfinite(amount) else amount
        plain = value if isinstance(value, Plain) else ""
        if NOT_FINITE.fullmatch(plain) or (NUMBER.fullmatch(plain) and math.isinf(float(plain))):
            raise problem(f"{quote(plain)} is not a finite number; give a number{self._of}")
        if not NUMBER.fullmatch(plain):
            raise wrong(value, f"a number{self._of}{self.hint}")
        return float(plain)

    @property
    def _of(self) -> str:
        return f" of {self.unit}" if self.unit else ""


def _name(value: Any, info: ValidationInfo) -> str:
    slug = info.context and info.context.get("slugs")
    if not isinstance(value, str) or not (value or slug):
        raise wrong(value, "a name")
    if slug and not SLUG.fullmatch(value):
        raise problem(f"{quote(value)} is not a valid name: {SLUG_RULE}")
    return str(value)


def _tier(value: Any, names: Any, info: ValidationInfo) -> Any:
    return names(tuple(value)) if isinstance(value, list) else (_name(value, info),)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, Plain) or value not in ("true", "True", "TRUE", "false", "False", "FALSE"):
        raise wrong(value, "true or false")
    return value.lower() == "true"


def _share(milli: int) -> int:
    if milli > GPU and milli % GPU:
        raise problem("a worker takes part of one GPU (less than 1) or whole ones; round it")
    return milli


def _device(value: Any) -> int:
    if not isinstance(value, Plain) or not re.fullmatch("[0-9]{1,4}", value) or int(value) >= 1024:
        raise wrong(value, "the number of a GPU, from 0")
    return int(value)


def _version(value: Any) -> int:
    if value != "1" or not isinstance(value, Plain):
        raise problem(f"this is {kind(value)}, but this Makeway reads version 1")
    return 1


def _priority(value: Any) -> int:
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if not isinstance(value, Plain) or not NUMBER.fullmatch(value):
        raise wrong(value, f"one of {', '.join(PRIORITIES)}, or a number")
    return int(Quantity("", 1_000_000, -1_000_000, whole=True)(value))


def _time(value: Any) -> float:
    """Return seconds since the epoch; a time without a zone is UTC."""
    if isinstance(value, Plain) and NUMBER.fullmatch(value):
        return Quantity("seconds", LATEST, -LATEST)(value)
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        raise wrong(value, "a time such as 2026-01-01T12:00:00Z, or seconds") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def count(unit: str = "", max_value: float = 2**31, min_value: float = 0) -> PlainValidator:
    """Return the validator of a whole number."""
    return PlainValidator(Quantity(unit, max_value, min_value, whole=True))


def duration(max_value: float) -> PlainValidator:
    """Return the validator of a duration in seconds."""
    hint = " (or write 30s, 15m, 2h, 1d)"
    return PlainValidator(Quantity("seconds", max_value, units=SECONDS, hint=hint, large="long"))


_milli_gpus = PlainValidator(Quantity("GPUs", 1_000_000, scale=GPU))
_as_written = PlainSerializer(from_milli)

Name = Annotated[str, PlainValidator(_name)]
Tier = Annotated[
    tuple[Name, ...], WrapValidator(_tier), PlainSerializer(lambda names: names if names[1:] else names[0])
]
"""Names of equal rank; a document may write one name without a list."""
Label = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=255)]
"""A name that others made: of a user, a group."""
Title = Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)]
Flag = Annotated[bool, PlainValidator(_flag)]
Version = Annotated[int, PlainValidator(_version)]
Gpus = Annotated[int, _milli_gpus, _as_written]
GpusEach = Annotated[int, _milli_gpus, AfterValidator(_share), _as_written]
"""Milli-GPUs of a worker: part of one device, or whole ones."""
Cores = Annotated[int, PlainValidator(Quantity("cores", 1_000_000, scale=1000)), _as_written]
Mib = Annotated[int, PlainValidator(Quantity("MiB", 2**40, whole=True, units=MIB, hint=" (or write 512Mi, 64Gi)"))]
Count = Annotated[int, count()]
Device = Annotated[int, PlainValidator(_device)]
Workers = Annotated[int, count("workers", 100_000, 1)]
Duration = Annotated[float, duration(100 * 366 * 86_400)]
"""A measured duration."""
Seconds = Annotated[
    float, duration(366 * 86_400), PlainSerializer(lambda value: int(value) if value % 1 == 0 else value)
]
"""A duration that an administrator sets."""
Time = Annotated[float, PlainValidator(_time)]
"""Seconds since the epoch."""
Priority = Annotated[int, PlainValidator(_priority)]
"""The priority of a workload: a word or a number."""
