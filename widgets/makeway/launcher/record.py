"""Named tuples for modules that the agent of machines imports: `typing` takes 0.6 MB of its memory.

In these modules `TYPE_CHECKING` is a name of their own, which type checkers take for true, as that of `typing`.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as Record
else:

    class _RecordType(type):
        """Make a named tuple of a class with annotated fields; what else is in it comes along."""

        def __new__(mcs, name: str, bases: tuple, content: dict) -> type:
            plain = super().__new__(mcs, name, (), dict(content))
            if not bases:
                return plain
            result = namedtuple(name, plain.__annotations__, module=content["__module__"])
            for key, value in content.items():
                if key not in ("__annotations__", "__dict__", "__weakref__"):
                    setattr(result, key, value)
            return result

    class Record(metaclass=_RecordType):
        """The base of named tuples, as `typing.NamedTuple`; fields have no default."""


__all__ = ["Record"]
