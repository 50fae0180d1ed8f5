"""Make the fields of a deployment's form from the tables of its document, and the document from what was typed.

A field is named by its place: `hour`, `machine_types.0.price`, `machine_types.0.schedule.1.start`. What is typed
becomes a document as it is, so that the same reader says what is wrong, for each field by its place; an empty field is
its default. A document with anything that no field has is edited as YAML alone.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from makeway_api.models import PolicyIssue

from ....autoscale.document import MAX_BYTES, DeploymentTable, ScheduleTable, TypeTable, written_defaults
from ....policy.source import UnreadableDocument, parse
from ....policy.tables import Table

Values = dict[str, str]
"""What the fields have, by their names; the order is that of the page"""
Kind = Literal["text", "number", "choice", "list", "lines", "area"]
AREA = 10_000
"""Characters beyond which a text may have many lines"""
MAX_TABLES = 30
"""Machine types, and entries of a schedule, of a form; larger documents are edited as YAML"""
NOT_OFFERED = frozenset({"memory"})
"""Choices that no service can use: they exist for tests of the document"""
LABELS = {
    "gpus": "GPUs", "cpu": "CPU cores", "cpu_only": "CPU only", "hour": "Budget of an hour", "timezone": "Time zone",
    "max_age": "Maximum age",
    "month": "Budget of a month", "max_machines": "Maximum of machines", "min_idle": "Idle machines kept",
}  # fmt: skip
NULLS = frozenset({"~", "null", "Null", "NULL"})
"""What YAML reads as no value"""
NAME = re.compile(r"(?:machine_types\.(\d{1,2})\.(?:schedule\.(\d{1,2})\.)?)?([a-z_]{1,40})")


@dataclass(frozen=True, slots=True)
class FieldShape:
    """A field of a table, as it is asked for."""

    key: str
    label: str
    help: str
    default: str
    kind: Kind
    required: bool
    is_time: bool
    is_table: bool
    """whether it is a table of its own, with a line for each of its keys"""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FormField:
    """A field on the page, with what is typed and what is wrong with it."""

    name: str
    shape: FieldShape
    value: str
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FormTable:
    """A table on the page with its fields, and the tables in it."""

    name: str
    fields: tuple[FormField, ...]
    tables: tuple[FormTable, ...] = ()


@cache
def shapes(table: type[Table]) -> tuple[FieldShape, ...]:
    """Return the fields of a table, without the tables in it."""
    defaults = written_defaults(table)
    result = []
    for name, field in table.model_fields.items():
        key = field.alias or name
        kind = _kind(field.annotation, field.metadata)
        if key == "version" or kind is None:
            continue
        choices = tuple(str(one) for one in get_args(field.annotation)) if kind == "choice" else ()
        result.append(
            FieldShape(
                key,
                LABELS.get(key, key.replace("_", " ").capitalize()),
                (field.description or "").replace("`", ""),
                "" if field.is_required() else defaults[name],
                kind,
                field.is_required(),
                field.annotation is float and table is DeploymentTable,
                any(_is_table(one) for one in (field.annotation, *get_args(field.annotation))),
                choices or (("true", "false") if kind == "choice" else ()),
            )
        )
    return tuple(result)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def _kind(annotation: Any, metadata: Sequence[Any]) -> Kind | None:
    """Return how a value is typed; None for tables in the table."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0], [*get_args(annotation)[1:], *metadata])
    inner = [one for one in get_args(annotation) if one is not NoneType]
    if NoneType in get_args(annotation):
        return _kind(inner[0], metadata)
    if get_origin(annotation) is Literal or annotation is bool:
        return "choice"
    if get_origin(annotation) is dict or _is_table(annotation):
        return "lines"
    if get_origin(annotation) is tuple:
        return "list" if _kind(inner[0], ()) == "text" else None
    if annotation is str:
        return "area" if any((getattr(one, "max_length", 0) or 0) > AREA for one in metadata) else "text"
    return "number" if annotation in (int, float) else None


def values_of(text: str) -> Values | None:
    """Return what the fields have for a document; None for one that fields cannot show."""
    try:
        tree = parse(text, MAX_BYTES).value
    except UnreadableDocument:
        return None
    values: Values = {}
    return values if _read_table(values, "", DeploymentTable, tree) else None


def _read_table(values: Values, prefix: str, table: type[Table], tree: Any) -> bool:
    if not isinstance(tree, dict):
        return False
    known = {shape.key: shape for shape in shapes(table)}
    inner = _INNER.get(table)
    for key, value in tree.items():
        if inner is not None and key == inner[0]:
            if not isinstance(value, list) or len(value) > MAX_TABLES:
                return False
        elif not (key == "version" and table is DeploymentTable) and key not in known:
            return False
    for key, shape in known.items():
        written = _written(shape.kind, tree.get(key))
        if written is None or (shape.is_table and tree.get(key) == {}):  # an empty field would be no table
            return False
        values[prefix + key] = written
    entries = tree.get(inner[0], ()) if inner else ()
    return all(_read_table(values, f"{prefix}{inner[0]}.{n}.", inner[1], one) for n, one in enumerate(entries) if inner)


def _written(kind: Kind, value: Any) -> str | None:
    """Return a value of a document as it is typed; None where the field cannot have it."""
    if value is None:
        return ""
    if kind == "lines" and isinstance(value, dict):
        lines = [f"{key}: {'' if item is None else item}" for key, item in value.items()]
        return None if any(_is_nested(item) or "\n" in str(item) for item in value.values()) else "\n".join(lines)
    if kind == "list" and isinstance(value, list):
        return None if any(_is_nested(item) or "," in str(item) for item in value) else ", ".join(map(str, value))
    if kind in ("lines", "list") or _is_nested(value):
        return None
    if kind != "area" and "\n" in str(value):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_nested(value: Any) -> bool:
    return value is None or isinstance(value, (list, dict))


def typed_values(form: Iterable[tuple[str, Any]]) -> Values:
    """Return what was typed into fields, which the form names `f.PLACE`; the rest of the form is left out."""
    values = {}
    for key, value in form:
        name = key.removeprefix("f.")
        match = NAME.fullmatch(name)
        if key != name and isinstance(value, str) and match and match[3] in _keys(name):
            values[name] = value.replace("\r\n", "\n")
    return values


def _keys(name: str) -> set[str]:
    table = (DeploymentTable, TypeTable, ScheduleTable)[name.count(".") // 2]
    return {shape.key for shape in shapes(table)}


def document_of(values: Values) -> str:
    """Return the document of what was typed, with the keys in their order."""
    tree = {"version": 1, **_table(values, "", DeploymentTable)}
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _table(values: Values, prefix: str, table: type[Table]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for shape in shapes(table):
        typed = values.get(prefix + shape.key, "")
        if typed.strip():
            tree[shape.key] = _typed(shape, typed)
    if table in _INNER:
        key, inner = _INNER[table]
        entries = [_table(values, f"{prefix}{key}.{n}.", inner) for n in numbers(values, f"{prefix}{key}")]
        if entries:
            tree[key] = entries
    return tree


def _typed(shape: FieldShape, typed: str) -> Any:
    kind = shape.kind
    if kind == "area":
        return typed
    if kind == "list":
        return [part.strip() for part in typed.split(",") if part.strip()]
    if kind == "lines":
        pairs = [line.partition(":") for line in typed.split("\n") if line.strip()]
        bare = _Bare if shape.is_table else str
        return _Pairs((key.strip(), bare(value.strip())) for key, _, value in pairs)
    return typed.strip() if kind == "text" or typed.strip() in NULLS else _Bare(typed.strip())


def numbers(values: Values, place: str) -> list[int]:
    """Return the numbers of the entries of a list of tables."""
    result = re.compile(re.escape(place) + r"\.(\d{1,2})\..*")
    return sorted({int(match[1]) for name in values if (match := result.fullmatch(name))})


def edited(values: Values, action: str) -> Values:
    """Return the fields after a table was added (`add:PLACE`) or removed (`remove:PLACE.NUMBER`)."""
    verb, _, place = action.partition(":")
    if verb == "remove":
        return {name: value for name, value in values.items() if not name.startswith(f"{place}.")}
    match = re.fullmatch(r"machine_types(\.\d{1,2}\.schedule)?", place)
    if verb != "add" or match is None:
        return values
    known = numbers(values, place)
    number = max(known, default=-1) + 1
    if len(known) >= MAX_TABLES or number > 99:
        return values
    table = ScheduleTable if match[1] else TypeTable
    return {**values, **{f"{place}.{number}.{shape.key}": "" for shape in shapes(table)}}


def is_at(issue: PolicyIssue, values: Values, fields: Container[str]) -> bool:
    """Whether what is wrong is at one of some fields."""
    return _field_at(issue.where, dict(_places(values))) in fields


def form_of(values: Values, issues: Iterable[PolicyIssue] = ()) -> tuple[FormTable, list[PolicyIssue]]:
    """Return the form with what is wrong beside its fields, and what is wrong with none of them."""
    places = dict(_places(values))
    errors: dict[str, list[str]] = {}
    others = []
    for issue in issues:
        name = _field_at(issue.where, places)
        if name is None:
            others.append(issue)
        else:
            errors.setdefault(name, []).append(issue.message)
    return _form_table(values, errors, "", DeploymentTable), others


def _places(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the place of each field in the document that is made of them, and its name."""
    for shape in shapes(DeploymentTable):
        yield shape.key, shape.key
    for at, n in enumerate(numbers(values, "machine_types")):
        for shape in shapes(TypeTable):
            yield f"machine_types[{at}].{shape.key}", f"machine_types.{n}.{shape.key}"
        for inner_at, m in enumerate(numbers(values, f"machine_types.{n}.schedule")):
            for shape in shapes(ScheduleTable):
                place = f"machine_types[{at}].schedule[{inner_at}].{shape.key}"
                yield place, f"machine_types.{n}.schedule.{m}.{shape.key}"


def _field_at(where: str, places: Mapping[str, str]) -> str | None:
    """Return the field at a place, or around it: the list for one of its entries."""
    while where and where not in places:
        where = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", where)
    return places.get(where)


def _form_table(values: Values, errors: Mapping[str, list[str]], prefix: str, table: type[Table]) -> FormTable:
    fields = [
        FormField(
            prefix + shape.key, shape, values.get(prefix + shape.key, ""), tuple(errors.get(prefix + shape.key, ()))
        )
        for shape in shapes(table)
    ]
    if table not in _INNER:
        return FormTable(prefix.removesuffix("."), tuple(fields))
    key, inner = _INNER[table]
    tables = [_form_table(values, errors, f"{prefix}{key}.{n}.", inner) for n in numbers(values, f"{prefix}{key}")]
    return FormTable(prefix.removesuffix("."), tuple(fields), tuple(tables))


_INNER: Mapping[type[Table], tuple[str, type[Table]]] = {
    DeploymentTable: ("machine_types", TypeTable),
    TypeTable: ("schedule", ScheduleTable),
}


class _Bare(str):
    """What is written without quotation marks where YAML allows it: a number, or what was typed in the place of one."""


class _Pairs(tuple[tuple[str, str], ...]):
    """Keys and values as they were typed: a key that was typed twice is written twice, and refused by the reader."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of many lines as blocks, and what is bare without quotation marks."""


def _pairs(dumper: yaml.SafeDumper, value: _Pairs) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", value)


def _bare(dumper: yaml.SafeDumper, value: _Bare) -> yaml.Node:
    tag: str = dumper.resolve(yaml.ScalarNode, str(value), (True, False))  # type: ignore[no-untyped-call]
    return dumper.represent_scalar(tag, str(value))


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(_Bare, _bare)
_Dumper.add_representer(_Pairs, _pairs)
_Dumper.add_representer(str, _text)
