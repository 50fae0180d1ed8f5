"""Read settings from environment variables: one mechanism for the Hub and the service.

A setting is a traitlets trait tagged with `env="MAKEWAY_…"`; its help is its reference. This module does not import
traitlets, so that notebooks need not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class HasSettings(Protocol):
    """A traitlets Configurable."""

    def traits(self, **metadata: Any) -> dict[str, Any]:
        """Return its traits by name."""
        ...


def read_environment(settings: HasSettings, env: Mapping[str, str]) -> None:
    """Set every trait whose variable is set and not empty; ValueError says what the variable accepts."""
    for name, trait in settings.traits(config=True).items():
        variable = trait.metadata.get("env")
        if text := env.get(variable or "", ""):
            try:
                setattr(settings, name, trait.from_string(text))
            except Exception:
                raise ValueError(
                    f"{variable}={text!r} is not accepted: use {accepted(trait)}. {without_variable(trait)}"
                ) from None


def accepted(trait: Any) -> str:
    """Return what a trait accepts: `demo or system`, `a whole number from 1 to 65535`, `1 or 0`, `text`."""
    if values := getattr(trait, "values", None):
        return " or ".join(map(str, values))
    kind = type(trait.default_value)
    if kind is bool:
        return "1 or 0"
    if kind not in (int, float):
        return "text"
    least, most = getattr(trait, "min", None), getattr(trait, "max", None)
    bounds = "" if least is None else f" from {least:g}" if most is None else f" from {least:g} to {most:.12g}"
    return ("a whole number" if kind is int else "a number") + bounds


def without_variable(trait: Any) -> str:
    """Return a trait's help without its variable in brackets."""
    variable = trait.metadata.get("env", "")
    return str(trait.help).replace(f" ({variable}=1)", "").replace(f" ({variable})", "")
