"""Keep out of the agent's memory what the standard library imports for other programs.

`http.client` parses the headers of answers with the package `email`, which takes 1 MB with all that it imports, and
imports `ssl`, which takes 4 MB with OpenSSL's libraries. What imports them later gets the real ones.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EMAIL = ("email", "email.message", "email.parser")
_REPLACING = threading.Lock()
"""Held by the one thread that makes place for a module: another must not remove what is being imported by then"""


def import_http_client(tls: bool) -> None:
    """Import `http.client` with headers of this module; without `tls` also without the possibility of `https`."""
    if "http.client" in sys.modules:
        return
    if not tls and "ssl" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment]  # its import fails, as where Python has none
    if any(name in sys.modules for name in EMAIL):
        return
    package, message, parser = map(ModuleType, EMAIL)
    package.message, message.Message = message, Headers  # type: ignore[attr-defined]
    package.parser, parser.Parser = parser, HeaderParser  # type: ignore[attr-defined]
    sys.modules.update({"email": package, "email.message": message, "email.parser": parser})
    try:
        importlib.import_module("http.client")
    except (ImportError, AttributeError):  # of a Python that needs more of them: it gets the real ones
        sys.modules.pop("http.client", None)
    finally:
        for name in EMAIL:
            del sys.modules[name]


def import_lazily(*names: str) -> None:
    """Have these modules of the standard library imported when something of them is used first."""
    for name in names:
        sys.modules.setdefault(name, _LazyModule(name))


class _LazyModule(ModuleType):
    """A module that is imported by its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with _REPLACING:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class Headers:
    """The headers of one answer, as far as `http.client` reads them; names in any case."""

    def __init__(self, *_: Any) -> None:
        self._fields: list[tuple[str, str]] = []

    def add(self, name: str, value: str) -> None:
        """Take one more header."""
        self._fields.append((name, value))

    def get_all(self, name: str, failobj: Any = None) -> Any:
        """Return the values of all headers of a name; `failobj` without any."""
        return [value for key, value in self._fields if key.lower() == name.lower()] or failobj

    def get(self, name: str, failobj: Any = None) -> Any:
        """Return the value of the first header of a name; `failobj` without any."""
        return self.get_all(name, [failobj])[0]

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def keys(self) -> list[str]:
        """Return the names as they came."""
        return [name for name, _ in self._fields]

    def values(self) -> list[str]:
        """Return the values in their order."""
        return [value for _, value in self._fields]

    def items(self) -> list[tuple[str, str]]:
        """Return names and values in their order."""
        return list(self._fields)


class HeaderParser:
    """What `http.client` makes headers of text with."""

    def __init__(self, _class: Any = Headers, **_: Any) -> None:
        self._class = _class

    def parsestr(self, text: str, headersonly: bool = False) -> Any:
        """Return the headers of a text; a line that begins with white space goes on with the one before."""
        fields: list[list[str]] = []
        for line in text.split("\n"):
            if line[:1] in (" ", "\t") and fields:
                fields[-1][1] += f" {line.strip()}"
                continue
            name, colon, value = line.partition(":")
            if colon and name.strip():
                fields.append([name.strip(), value.strip()])
        result = self._class()
        for name, value in fields:
            result.add(name, value)
        return result
