"""Parse YAML or JSON without implicit types, aliases and tags, and find the line of each place.

Scalars stay text until a model reads them: `no`, `on`, `010` and `12:30` are names where a name is expected.
Aliases and tags are refused (a few lines can stand for gigabytes), as are deep nesting and a second document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import yaml

from .issues import Issue, Loc, quote, sorted_issues

MAX_DEPTH = 20
NULLS = frozenset(("", "~", "null", "Null", "NULL"))
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
SURROGATES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Plain(str):
    """A scalar without quotes: a number or a word, depending on what its place expects."""

    __slots__ = ()


class UnreadableDocument(Exception):
    """The text is not a document at all. `problems` has lines, from 1, and messages."""

    def __init__(self, *problems: tuple[int | None, str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def issues(self, file: str) -> list[Issue]:
        """Return the problems as issues of a file."""
        return sorted_issues(Issue(file, line, "", message) for line, message in self.problems)


class Source:
    """A parsed document. `value` has dicts, lists, texts, booleans (from JSON only) and None."""

    def __init__(self, text: str) -> None:
        self._repeated: list[tuple[int, str]] = []
        self._text = text
        self._root: yaml.Node | None = None
        self._pairs: dict[int, dict[Any, tuple[Any, Any]]] = {}
        self.value: Any = _json(text) if text.startswith("{") else None
        if self.value is None:
            self.value = self._yaml()
        if self._repeated:
            raise UnreadableDocument(*self._repeated)

    def node(self, loc: Loc) -> yaml.Node | None:
        """Return the YAML node at a place, None if there is none."""
        steps = self._steps(loc)
        return steps[-1][1] if len(steps) > len(loc) else None

    def line(self, loc: Loc) -> int | None:
        """Return the line of a place (of its key, if it has one), else of the nearest place around it."""
        steps = self._steps(loc)
        return steps[-1][0].start_mark.line + 1 if steps else None

    def _steps(self, loc: Loc) -> list[tuple[Any, Any]]:
        """Return the nodes from the root to a place, as far as they exist: where each begins, and its value."""
        if self._root is None:
            text = SURROGATES.sub(lambda pair: "?" * len(pair.group()), self._text)  # in JSON, but not in YAML
            with suppress(yaml.YAMLError):
                self._root = yaml.compose(text, Loader=LOADER)
        steps = [(self._root, self._root)] if self._root else []
        for part in loc if steps else ():
            node = steps[-1][1]
            if isinstance(part, int) and isinstance(node, yaml.SequenceNode):
                result = [(item, item) for item in node.value[part : part + 1]]
            else:
                if isinstance(node, yaml.MappingNode) and id(node) not in self._pairs:
                    self._pairs[id(node)] = {key.value: (key, value) for key, value in node.value}
                pair = self._pairs.get(id(node), {}).get(part)
                result = [pair] if pair else []
            if not result:
                break
            steps.append(result[-1])
        return steps

    def _yaml(self) -> Any:
        """Return the value of YAML, from its events: no nesting exhausts a stack, and no alias expands."""
        document: list[tuple[Any, int]] = []
        stack = [document]
        for event in yaml.parse(self._text, Loader=LOADER):
            line = cast(Any, event.start_mark).line + 1
            if isinstance(event, yaml.AliasEvent):
                raise UnreadableDocument((line, f"aliases (*{event.anchor}) are not used here; write the values out"))
            if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None) is not None:
                raise UnreadableDocument(
                    (line, f"tags ({getattr(event, 'tag', '')}) are not used here; write a plain value")
                )
            if isinstance(event, yaml.ScalarEvent):
                plain = event.style in (None, "")
                value: Any = event.value if not plain else None if event.value in NULLS else Plain(event.value)
                stack[-1].append((value, line))
            elif isinstance(event, yaml.CollectionStartEvent):
                items: list[tuple[Any, int]] = []
                stack[-1].append((items, line))
                stack.append(items)
                if len(stack) > MAX_DEPTH + 1:
                    raise UnreadableDocument((line, f"lists and tables are nested more than {MAX_DEPTH} deep"))
            elif isinstance(event, yaml.CollectionEndEvent):
                items = stack.pop()
                value = self._table(items) if isinstance(event, yaml.MappingEndEvent) else [item for item, _ in items]
                stack[-1][-1] = (value, stack[-1][-1][1])
            elif isinstance(event, yaml.DocumentStartEvent) and document:
                raise UnreadableDocument((line, "a second document begins here (---); write one document per file"))
        if not document:
            raise UnreadableDocument((None, "the document is empty"))
        return document[0][0]

    def _table(self, items: Sequence[tuple[Any, int]]) -> dict[str, Any]:
        """Return the table of keys and values that follow each other."""
        table: dict[str, Any] = {}
        for (key, line), (value, _) in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise UnreadableDocument((line, "a list, a table or nothing cannot be a key; give the key a name"))
            if key in table:
                first = next(at for name, at in items[::2] if name == key)
                self._repeated.append((line, f"the key {quote(key)} comes twice (first on line {first}); keep one"))
            table[key] = value
        return table


def parse(text: str, max_bytes: int | None = None) -> Source:
    """Return the parsed document; UnreadableDocument says why there is none."""
    if max_bytes and (len(text) > max_bytes or len(text.encode("utf-8", "replace")) > max_bytes):
        raise UnreadableDocument(
            (None, f"the document is larger than {max_bytes // 1_000_000} MB; some kilobytes are usual")
        )
    text = text.removeprefix("\ufeff")
    if bad := UNPRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise UnreadableDocument((line, f"U+{ord(bad.group()):04X} is not a printable character; remove it"))
    try:
        return Source(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        bad_line = text.split("\n")[mark.line] if mark and mark.line < text.count("\n") + 1 else ""
        hint = (
            "; indent with spaces, not with tabs" if "\t" in bad_line[: len(bad_line) - len(bad_line.lstrip())] else ""
        )
        raise UnreadableDocument(
            (mark.line + 1 if mark else None, f"this is not YAML or JSON: {reason}{hint}")
        ) from None
    except yaml.YAMLError as error:
        raise UnreadableDocument((None, f"this is not YAML or JSON: {str(error).splitlines()[0]}")) from None


def _json(text: str) -> Any:
    """Return the value of JSON; None where it is wrong, because YAML's reader knows the line."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key comes twice")
        return result

    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_int=Plain, parse_float=Plain, parse_constant=Plain, object_pairs_hook=table)
    return None
