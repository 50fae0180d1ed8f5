"""Declare settings once, as fields of a dataclass: name, default, bounds, help and use on a cluster in one place.

From the declarations follow the environment variables, the class of a configuration file (`c.QuotaService.… = …`), the
plain values, the reference page and the chart's check. traitlets is imported only to read them: no notebook needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Scalar = bool | int | float | str
Scope = Literal["site", "chart", "machine"]
_KEY = "makeway"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: what an administrator may write, and how it becomes a plain value."""

    default: Scalar
    help: str
    name: str = ""
    """In a configuration file, and in capitals behind MAKEWAY_ in the environment; by default that of the field"""
    variable: str = ""
    """The environment variable, where it has another name"""
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    scope: Scope = "site"
    """Who sets it on a cluster: the site, as a value of the chart; the chart itself; or (machine) there is none"""

    @property
    def accepts(self) -> str:
        """What it accepts: `demo or system`, `a whole number from 1 to 65535`, `1 or 0`, `text`."""
        if self.choices:
            return " or ".join(self.choices)
        if isinstance(self.default, bool):
            return "1 or 0"
        if isinstance(self.default, str):
            return "text"
        low, high = self.min, self.max
        bounds = "" if low is None else f" from {low:g}" if high is None else f" from {low:g} to {high:.12g}"
        return ("a whole number" if isinstance(self.default, int) else "a number") + bounds

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its values, for the chart."""
        kind = {bool: "boolean", int: "integer", float: "number", str: "string"}[type(self.default)]
        bounds = {"enum": self.choices or None, "minimum": self.min, "maximum": self.max}
        return {"type": kind, **{key: _whole(value) for key, value in bounds.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class _Group:
    declarations: type
    prefix: str


def setting(default: Scalar, help: str, **details: Any) -> Any:
    """Return the field of a dataclass that declares a setting; `details` are those of Setting."""
    return dataclasses.field(metadata={_KEY: Setting(default, help, **details)})


def group(declarations: type, prefix: str) -> Any:
    """Return the field of a dataclass whose value is another one with settings, whose names begin with `prefix`."""
    return dataclasses.field(metadata={_KEY: _Group(declarations, prefix)})


def declared(declarations: type, prefix: str = "") -> dict[str, Setting]:
    """Return all settings that a dataclass declares, those of its groups too, by name, each with its variable."""
    result: dict[str, Setting] = {}
    for _, made in _fields(declarations, prefix):
        if isinstance(made, _Group):
            result |= declared(made.declarations, made.prefix)
        else:
            result[made.name] = made
    return result


def read_settings(declarations: type, env: Mapping[str, str], *, file: str | None = None, name: str) -> dict[str, Any]:
    """Return the plain value of each field of a dataclass that is a setting; ValueError says what a variable accepts.

    `file` is a configuration file that sets some in the class `name`. The environment wins; an empty variable is none.
    """
    source = configurable(declarations, name)(config=_config(file))
    for result in declared(declarations).values():
        if text := env.get(result.variable, ""):
            try:
                setattr(source, result.name, source.traits()[result.name].from_string(text))
            except Exception:
                raise ValueError(
                    f"{result.variable}={text!r} is not accepted: use {result.accepts}. {result.help}"
                ) from None
    return _values(declarations, "", source)


def _config(file: str | None) -> Any:
    from traitlets.config import Config
    from traitlets.config.loader import PyFileConfigLoader

    return PyFileConfigLoader(file).load_config() if file else Config()


def configurable(declarations: type, name: str) -> Any:
    """Return the class by which a configuration file gives these settings."""
    from traitlets.config import Configurable

    traits = {result.name: _trait(result).tag(config=True) for result in declared(declarations).values()}
    return type(name, (Configurable,), traits)


def absolute_path(text: str) -> Path:
    """Return a path that does not depend on the working directory; `~` is the home."""
    return Path(text).expanduser().absolute()


def path_or_none(text: str) -> Path | None:
    """Return the same, or None for an empty text."""
    return absolute_path(text) if text else None


def camel(name: str) -> str:
    """Return a setting's name as a value of the chart: `tickSeconds`."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _values(declarations: type, prefix: str, source: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, made in _fields(declarations, prefix):
        if isinstance(made, _Group):
            values[field] = made.declarations(**_values(made.declarations, made.prefix, source))
        else:
            convert = made.convert or type(made.default)
            values[field] = convert(getattr(source, made.name))
    return values


def _fields(declarations: type, prefix: str) -> Iterator[tuple[str, Setting | _Group]]:
    """Yield the name of each field that is a setting or a group, and its declaration with its names."""
    for field in dataclasses.fields(declarations):
        made = field.metadata.get(_KEY)
        if isinstance(made, Setting):
            name = made.name or prefix + field.name
            variable = made.variable or f"MAKEWAY_{name.upper()}"
            made = dataclasses.replace(made, name=name, variable=variable)
        if made is not None:
            yield field.name, made


def _trait(declared: Setting) -> Any:
    from traitlets import Bool, Enum, Float, Int, Unicode

    if declared.choices:
        return Enum(list(declared.choices), default_value=declared.default, help=declared.help)
    if isinstance(declared.default, bool):
        return Bool(declared.default, help=declared.help)
    if isinstance(declared.default, str):
        return Unicode(declared.default, help=declared.help)
    if isinstance(declared.default, int):
        return Int(declared.default, min=declared.min, max=declared.max, help=declared.help)
    return Float(declared.default, min=declared.min, max=declared.max, help=declared.help)


def _whole(value: Any) -> Any:
    """Return a bound as JSON has it: without a fraction where it has none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
