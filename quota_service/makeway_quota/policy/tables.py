"""Validate tables of a document with pydantic, and explain each problem with its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Self, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from .issues import Loc, Problem, did_you_mean, quote

T = TypeVar("T")
M = TypeVar("M", bound="Table")


class Table(BaseModel):
    """A table of a document. Unknown keys are refused; a null means the default.

    With the validation context `slugs`, names of pools, profiles and policies are restricted as in a policy document.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise wrong(value, f"a table with the keys {', '.join(cls.known())}")
        nulls = set(cls.known()) if None in value.values() else set()
        return {key: each for key, each in value.items() if each is not None or key not in nulls}

    @classmethod
    def known(cls) -> list[str]:
        """Return the keys of the table."""
        return list(cls.model_fields)

    def has(self, key: str) -> bool:
        """Whether the document gives the key a value."""
        return key in self.model_fields_set

    @classmethod
    def of(cls, *values: object, **computed: Any) -> Self:
        """Return the table of some dataclasses: the values that both have, and the `computed` ones."""
        shared = {name: getattr(each, name) for each in values for name in cls.model_fields if hasattr(each, name)}
        return cast(Self, cls.model_construct(**shared | computed))

    def written(self) -> dict[str, Any]:
        """Return the table as it is written in a document, without what has its default."""
        return self.model_dump(exclude_defaults=True)

    def as_value(self, kind: type[T], **computed: Any) -> T:
        """Return a dataclass of the table, likewise."""
        names = [field.name for field in fields(cast(Any, kind))]
        shared = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return kind(**shared | computed)


def explain(model: type[Table], invalid: ValidationError) -> Iterator[Problem]:
    """Return each problem of a table with its place."""
    for error in invalid.errors(include_url=False, include_input=False):
        loc = error["loc"]
        if error["type"] == "extra_forbidden":
            known = _table_at(model, loc[:-1]).known()
            yield loc, f"{quote(loc[-1])} is not a key here; {did_you_mean(str(loc[-1]), known)}"
        elif error["type"] == "missing":
            yield loc, "the name is missing; give one such as gpu-1" if loc[-1] == "name" else f"{loc[-1]} is missing"
        else:
            yield loc, error["msg"]


def _table_at(model: type[Table], loc: Loc) -> type[Table]:
    """Return the model of the table at a place."""
    for part in (part for part in loc if isinstance(part, str)):
        model = next(_tables(model.model_fields[part].annotation))
    return model


def _tables(annotation: Any) -> Iterator[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for part in get_args(annotation):
        yield from _tables(part)


def validate_partly(model: type[M], value: Any, context: dict[str, Any]) -> tuple[M | None, list[Problem]]:
    """Return a table without its wrong values, and the problems; None where too little is left.

    So a mistake in one place does not hide those in others. Wrong values are removed from `value`.
    """
    try:
        return model.model_validate(value, context=context), []
    except ValidationError as invalid:
        problems = list(explain(model, invalid))
    for loc, _ in problems:
        _remove(value, loc)
    try:
        return model.model_validate(value, context=context), problems
    except ValidationError:
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


def wrong(value: object, expected: str) -> PydanticCustomError:
    """Return the error of a value that is something else than expected."""
    return problem(f"this is {kind(value)}, expected {expected}")


def problem(message: str) -> PydanticCustomError:
    """Return the error with this message."""
    return PydanticCustomError("problem", "{message}", {"message": message})


def kind(value: object) -> str:
    """Return what a value of the document is, in a word."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else quote(str(value).lower() if isinstance(value, bool) else value)


def _list(value: Any) -> Any:
    if not isinstance(value, list):
        raise wrong(value, f"a list, such as [{'…' if isinstance(value, dict) else value or '…'}]")
    return tuple(value)


def _texts(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong(value, "a table such as {NAME: value}")
    return {key: "" if each is None else each for key, each in value.items()}


Many = Annotated[tuple[T, ...], BeforeValidator(_list)]
"""A list of the document, as a tuple."""
TableOf = Annotated[dict[str, T], BeforeValidator(_texts)]
"""A table with keys of the author's choice; a null is an empty text."""
