"""Validate tables of a document with pydantic, and explain each problem with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from .issues import Loc, Problem, closest, did_you_mean, quote

T = TypeVar("T")
M = TypeVar("M", bound="Table")
ENOUGH = 1000
"""Problems of a document after which the rest is not explained."""


class Table(BaseModel):
    """A table of a document. Unknown keys are refused; a null means the default.

    With the validation context `slugs`, names of pools, profiles and policies are restricted as in a policy document.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    record: ClassVar[Any] = None
    """The dataclass that the table is converted to where it is a value in another table."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {key: item for key, item in value.items() if item is not None or key not in cls.known()}

    @classmethod
    def known(cls) -> list[str]:
        """Return the keys of the table."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def has(self, key: str) -> bool:
        """Whether the document gives the key a value."""
        return key in self.model_fields_set

    def as_value(self, record_type: type[T], **computed: Any) -> T:
        """Return a dataclass with the fields that it shares with the table, and the `computed` ones."""
        names = [field.name for field in fields(cast(Any, record_type)) if field.name not in computed]
        shared = {name: _as_value(getattr(self, name)) for name in names if hasattr(self, name)}
        return record_type(**shared, **computed)

    @classmethod
    def of(cls, *values: object, **computed: Any) -> Self:
        """Return the table of some dataclasses: the fields that they share with it, and the `computed` ones."""
        shared = {name: getattr(value, name) for value in values for name in cls.model_fields if hasattr(value, name)}
        for name, table in _nested(cls).items():
            if name in shared:
                inner = shared[name]
                if inner is not None:
                    shared[name] = tuple(map(table.of, inner)) if isinstance(inner, tuple) else table.of(inner)
        return cast(Self, cls.model_construct(**shared | computed))

    def written(self) -> dict[str, Any]:
        """Return the table as it is written in a document, without what has its default."""
        return self.model_dump(exclude_defaults=True, by_alias=True)


def _as_value(value: Any) -> Any:
    if isinstance(value, Table):
        return value.as_value(value.record)
    return tuple(map(_as_value, value)) if isinstance(value, tuple) and value and isinstance(value[0], Table) else value


@cache
def _nested(model: type[Table]) -> dict[str, type[Table]]:
    """Return the tables that the fields of a table take."""

    def tables(annotation: Any) -> Iterator[type[Table]]:
        if isinstance(annotation, type) and issubclass(annotation, Table):
            yield annotation
        for part in get_args(annotation):
            yield from tables(part)

    result = {name: next(tables(field.annotation), None) for name, field in model.model_fields.items()}
    return {name: table for name, table in result.items() if table}


def validate_partly(model: type[M], value: Any, context: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    """Return a table without its wrong values, and the problems; None where too little is left.

    So a mistake in one place does not hide those in others. Wrong values are removed from `value`.
    """
    try:
        return model.model_validate(value, context=context), []
    except ValidationError as invalid:
        problems = explain(model, invalid)
        for error in invalid.errors(include_url=False, include_context=False, include_input=False):
            _remove(value, error["loc"])
    for _ in range(2):
        try:
            return model.model_validate(value, context=context), problems
        except ValidationError as invalid:  # a table in this one lacks what it needs, so all of its key goes
            for error in invalid.errors(include_url=False, include_context=False, include_input=False):
                _remove(value, error["loc"][:1])
    return None, problems


def _remove(value: Any, loc: Loc) -> None:
    """Remove the innermost key that contains a place."""
    keys = [at for at, part in enumerate(loc) if isinstance(part, str)]
    for part in loc[: keys[-1]] if keys else ():
        try:
            value = value[part]
        except (KeyError, IndexError):
            return  # removed already, with a key around it
    if keys:
        value.pop(loc[keys[-1]], None)


def explain(model: type[Table], invalid: ValidationError) -> list[Problem]:
    """Return the problems of a table with their places, at most ENOUGH."""
    return [(error["loc"], _message(model, error)) for error in invalid.errors(include_url=False)[:ENOUGH]]


def _message(model: type[Table], error: ErrorDetails) -> str:
    """Return what is wrong, what is expected, and what to do."""
    loc, value = error["loc"], error["input"]
    match error["type"]:
        case "extra_forbidden":
            return (
                f"{quote(loc[-1])} is not a key here; {did_you_mean(str(loc[-1]), _table_at(model, loc[:-1]).known())}"
            )
        case "missing":
            return "the name is missing; give one such as gpu-1" if loc[-1] == "name" else f"{loc[-1]} is missing"
        case "model_type":
            expected = f"a table with the keys {', '.join(_table_at(model, loc).known())}"
        case "dict_type":
            expected = "a table such as {NAME: value}"
        case "tuple_type":
            expected = f"a list, such as [{'…' if isinstance(value, dict) else str(value)[:60] or '…'}]"
        case "string_type":
            expected = "a text"
        case "string_too_short":
            expected = "a name"
        case "string_too_long":
            maximum = error["ctx"]["max_length"]
            return f"the text has {len(value.strip())} characters, {maximum} are allowed; shorten it"
        case "literal_error":
            words = re.findall(r"'(\w+)'", error["ctx"]["expected"])
            near = closest(value, words) if isinstance(value, str) else None
            expected = f"one of {', '.join(words)}" + (f'; did you mean "{near}"?' if near else "")
        case _:
            return error["msg"]
    return f"this is {kind(value)}, expected {expected}"


def _table_at(model: type[Table], loc: Loc) -> type[Table]:
    """Return the model of the table at a place."""
    for part in (part for part in loc if isinstance(part, str)):
        model = _nested(model)[part]
    return model


def kind(value: object) -> str:
    """Return what a value of the document is, in a word."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quote(str(value).lower() if isinstance(value, bool) else value)


def wrong(value: object, expected: str) -> PydanticCustomError:
    """Return the error of a value that is something else than expected."""
    return problem(f"this is {kind(value)}, expected {expected}")


def problem(message: str) -> PydanticCustomError:
    """Return the error with this message."""
    return PydanticCustomError("problem", "{message}", {"message": message})


def _nulls_as_texts(value: Any) -> Any:
    return {key: "" if item is None else item for key, item in value.items()} if isinstance(value, dict) else value


Many = Annotated[tuple[T, ...], Field(strict=False)]
"""A list of the document."""
Texts = Annotated[dict[str, str], BeforeValidator(_nulls_as_texts)]
"""A table of texts with keys of the author's choice; a null is an empty text."""
