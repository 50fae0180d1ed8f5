"""YAML with line numbers, and without its traps.

Values follow YAML 1.2: `no`, `on` and `12:30` are texts. Aliases and tags are refused (a few lines of them can
stand for gigabytes), a key that comes twice is an issue, and so is a document of more than 1 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from .issues import Findings, quote

Scalar = str | int | float | bool | None
LONGEST = 1_000_000
DEEPEST = 20
WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class Node:
    """A value with the line it stands on; `raw` is a scalar's text as written."""

    line: int
    value: Scalar | list[Node] | dict[str, Node]
    raw: str = ""

    @property
    def kind(self) -> str:
        """Say in a word what it is."""
        if isinstance(self.value, dict):
            return "a table"
        if isinstance(self.value, list):
            return "a list"
        return "nothing" if self.value is None else quote(self.raw)


def parse(text: str, findings: Findings) -> Node | None:
    """Read a document into nodes; None, and an issue, where that is not possible."""
    if len(text) > LONGEST or len(text.encode("utf-8", "replace")) > LONGEST:
        findings.say(None, "", f"the document is larger than {LONGEST // 1_000_000} MB; a policy is some kilobytes")
        return None
    text = text.removeprefix("\ufeff")
    bad = UNPRINTABLE.search(text)
    if bad:
        line = text.count("\n", 0, bad.start()) + 1
        findings.say(line, "", f"there is a character that no text has (U+{ord(bad.group()):04X}); take it out")
        return None
    try:
        return _Builder(findings).build(yaml.parse(text, Loader=LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        wrong = text.split("\n")[mark.line] if mark and mark.line < text.count("\n") + 1 else ""
        hint = "; indent with spaces, not with tabs" if "\t" in wrong[: len(wrong) - len(wrong.lstrip())] else ""
        findings.say(mark.line + 1 if mark else None, "", f"this is not YAML: {said}{hint}")
    except (yaml.YAMLError, _Refused) as error:
        if isinstance(error, _Refused):
            findings.say(error.line, "", str(error))
        else:
            findings.say(None, "", f"this is not YAML: {str(error).splitlines()[0]}")
    return None


class _Refused(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Builder:
    """Builds nodes from YAML events with a stack of its own, so that no nesting exhausts ours."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open: list[Node] = []
        self._keys: list[Node | None] = []
        self._root: Node | None = None
        self._documents = 0

    def build(self, events: Iterator[Any]) -> Node | None:
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    raise _Refused(line, "a second document begins here (---); a policy is one document")
            elif isinstance(event, yaml.AliasEvent):
                raise _Refused(line, f"aliases (*{event.anchor}) are not used here; write the values out")
            elif isinstance(event, yaml.NodeEvent):
                self._node(event, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._open.pop()
                self._keys.pop()
        if self._root is None:
            self._findings.say(None, "", "the document is empty; it needs pools, profiles and policies")
        return self._root

    def _node(self, event: Any, line: int) -> None:
        if event.tag is not None:
            raise _Refused(line, f"tags ({event.tag}) are not used here; write a plain value")
        if isinstance(event, yaml.ScalarEvent):
            self._add(Node(line, _scalar(event), event.value))
            return
        node = Node(line, {} if isinstance(event, yaml.MappingStartEvent) else [])
        self._add(node)
        self._open.append(node)
        self._keys.append(None)
        if len(self._open) > DEEPEST:
            raise _Refused(line, f"lists and tables are nested more than {DEEPEST} deep; a policy needs five")

    def _add(self, node: Node) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1].value
        if isinstance(parent, list):
            parent.append(node)
        elif isinstance(parent, dict):
            key = self._keys[-1]
            if key is None:
                self._keys[-1] = self._key(node, parent)
            else:
                parent[key.raw] = node
                self._keys[-1] = None

    def _key(self, node: Node, table: dict[str, Node]) -> Node:
        if isinstance(node.value, dict | list):
            raise _Refused(node.line, "a list or a table cannot be a key; give the key a name")
        if node.raw in table:
            first = table[node.raw].line
            self._findings.say(
                node.line, "", f"the key {quote(node.raw)} comes twice (first on line {first}); keep one"
            )
        return node


def _scalar(event: Any) -> Scalar:
    text: str = event.value
    if not event.implicit[0] or event.style not in (None, ""):
        return text
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return int(text)
    if NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return float(text) if FLOAT.fullmatch(text) else text
