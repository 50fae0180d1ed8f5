"""Reading one table of the document: each method takes one key and says what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar, cast

from .issues import Findings, did_you_mean, quote
from .tree import Node

T = TypeVar("T", bound=str)
SLUG = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
MOST_GPUS = 1_000_000
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])")
MIB = {"Mi": 1, "MiB": 1, "Gi": 1024, "GiB": 1024, "Ti": 1024 * 1024, "TiB": 1024 * 1024}
AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(Mi|MiB|Gi|GiB|Ti|TiB)")


class Fields:
    """One table and where it is. What is wrong goes to `findings`; the answer is then the default."""

    def __init__(self, node: Node | None, where: str, findings: Findings, known: Sequence[str]) -> None:
        self.where = where
        self.findings = findings
        self.line = node.line if node else None
        self.broken = node is not None and not isinstance(node.value, dict)
        self._table: dict[str, Node] = {}
        if node is None:
            return
        if not isinstance(node.value, dict):
            findings.say(node.line, where, f"this is {node.kind}, expected a table with the keys {', '.join(known)}")
            return
        self._table = node.value
        for key, value in node.value.items():
            if key not in known:
                findings.say(value.line, self.at(key), f"{quote(key)} is not a key here; {did_you_mean(key, known)}")

    def at(self, key: str) -> str:
        """Name the place of a key."""
        return f"{self.where}.{key[:60]}" if self.where else key[:60]

    def has(self, key: str) -> bool:
        """Say whether the key is there, with a value."""
        node = self._table.get(key)
        return node is not None and node.value is not None

    def node(self, key: str) -> Node | None:
        """Take the value as it stands; None when it is missing or null."""
        return self._table[key] if self.has(key) else None

    def line_of(self, key: str) -> int | None:
        """Tell the key's line, else the table's."""
        return self._table[key].line if key in self._table else self.line

    def wrong(self, key: str, message: str) -> None:
        """Report a key's value."""
        self.findings.say(self.line_of(key), self.at(key), message)

    def text(self, key: str, default: str = "", longest: int = 200) -> str:
        """Read one line of text; numbers and words count as they are written."""
        node = self.node(key)
        if node is None:
            return default
        if isinstance(node.value, dict | list):
            self.wrong(key, f"this is {node.kind}, expected a text")
            return default
        text = node.raw.strip()
        if len(text) > longest:
            self.wrong(key, f"the text has {len(text)} characters, {longest} are allowed; shorten it")
            return default
        return text

    def slug(self, key: str) -> str:
        """Read a name; an empty answer means that it was wrong."""
        if not self.has(key):
            self.wrong(key, f"the {key} is missing; give one such as gpu-1")
            return ""
        text = self.text(key, longest=1_000_000)
        if SLUG.fullmatch(text):
            return text
        if isinstance(self._table[key].value, dict | list):
            return ""  # told already
        self.wrong(key, f"{quote(text)} is no {key}: {SLUG_RULE}")
        return ""

    def names(self, key: str, *, slugs: bool = True) -> tuple[str, ...]:
        """Read a list of names, each once."""
        found: list[str] = []
        for node, where in self.items(key):
            name = self._name(node, where, slugs)
            if name in found:
                self.findings.say(node.line, where, f"{quote(name)} is listed twice; keep one")
            elif name:
                found.append(name)
        return tuple(found)

    def ranks(self, key: str) -> tuple[tuple[str, ...], ...]:
        """Read names, best rank first; an inner list shares one rank."""
        ranks: list[tuple[str, ...]] = []
        seen: set[str] = set()
        for node, where in self.items(key):
            inner = node.value if isinstance(node.value, list) else [node]
            rank: list[str] = []
            for number, item in enumerate(inner):
                place = f"{where}[{number}]" if isinstance(node.value, list) else where
                name = self._name(item, place, True)
                if name in seen:
                    self.findings.say(item.line, place, f"{quote(name)} is listed twice; keep one")
                elif name:
                    seen.add(name)
                    rank.append(name)
            if rank:
                ranks.append(tuple(rank))
        return tuple(ranks)

    def _name(self, node: Node, where: str, slug: bool) -> str:
        if isinstance(node.value, dict | list) or not node.raw.strip():
            self.findings.say(node.line, where, f"this is {node.kind}, expected a name")
            return ""
        name = node.raw.strip()
        if slug and not SLUG.fullmatch(name):
            self.findings.say(node.line, where, f"{quote(name)} is no name: {SLUG_RULE}")
            return ""
        if len(name) > 255:
            self.findings.say(node.line, where, f"{quote(name)} has more than 255 characters; shorten it")
            return ""
        return name

    def items(self, key: str) -> Iterator[tuple[Node, str]]:
        """Go through a list with the place of each item."""
        node = self.node(key)
        if node is None:
            return
        if not isinstance(node.value, list):
            self.wrong(key, f"this is {node.kind}, expected a list, such as [{node.raw or '…'}]")
            return
        for number, item in enumerate(node.value):
            yield item, f"{self.at(key)}[{number}]"

    def texts(self, key: str) -> dict[str, str]:
        """Read a table of texts."""
        node = self.node(key)
        if node is None:
            return {}
        if not isinstance(node.value, dict):
            self.wrong(key, f"this is {node.kind}, expected a table such as {{NAME: value}}")
            return {}
        found: dict[str, str] = {}
        for name, item in node.value.items():
            if isinstance(item.value, dict | list):
                self.findings.say(item.line, f"{self.at(key)}.{name[:60]}", f"this is {item.kind}, expected a text")
            else:
                found[name] = item.raw if item.value is not None else ""
        return found

    def amount(self, key: str, least: float, most: float, unit: str) -> float | None:
        """Read a finite number between two bounds; None when it is missing or wrong."""
        node = self.node(key)
        if node is None:
            return None
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(key, f"this is {node.kind}, expected a number of {unit}")
        elif not math.isfinite(value):
            self.wrong(key, f"{quote(node.raw)} is not a finite number; give a number of {unit}")
        elif value < least:
            self.wrong(key, f"{node.raw} is too small; the least is {least:,g} {unit}")
        elif value > most:
            self.wrong(key, f"{node.raw} is too large; the most is {most:,.12g} {unit}")
        else:
            return value
        return None

    def gpus(self, key: str) -> int | None:
        """Read a quantity of GPUs into thousandths; 0.5 is half of one."""
        value = self.amount(key, 0, MOST_GPUS, "GPUs")
        return None if value is None else self._milli(key, value, "GPU")

    def cores(self, key: str) -> int:
        """Read CPU cores into thousandths."""
        value = self.amount(key, 0, 1_000_000, "cores")
        return 0 if value is None else self._milli(key, value, "core") or 0

    def _milli(self, key: str, value: float, unit: str) -> int | None:
        milli = round(value * 1000)
        if abs(value * 1000 - milli) > 1e-6 * max(1.0, value):
            self.wrong(key, f"{self._table[key].raw} is finer than a thousandth of a {unit}; round it")
            return None
        return milli

    def whole(self, key: str, default: int, least: int, most: int, unit: str) -> int:
        """Read a whole number."""
        value = self.amount(key, least, most, unit)
        if value is None:
            return default
        if value != int(value):
            self.wrong(key, f"{self._table[key].raw} is not a whole number of {unit}")
            return default
        return int(value)

    def seconds(self, key: str, most: float = 366 * 86_400) -> float | None:
        """Read a duration: seconds, or a text such as 30s, 15m, 2h, 1d."""
        node = self.node(key)
        match = SPAN.fullmatch(node.raw.strip()) if node is not None else None
        if node is None or match is None:
            value = self.amount(key, 0, most, "seconds (or write 30s, 15m, 2h, 1d)")
        else:
            value = float(match[1]) * UNITS[match[2]]
            if value > most:
                self.wrong(key, f"{node.raw} is too long; the most is {most:,.12g} seconds")
                return None
        return None if value is None else float(value)

    def memory(self, key: str) -> int:
        """Read memory into MiB: a number, or a text such as 512Mi, 64Gi."""
        node = self.node(key)
        match = AMOUNT.fullmatch(node.raw.strip()) if node is not None else None
        if match is not None:
            mib = float(match[1]) * MIB[match[2]]
            if mib <= 2**40:
                return round(mib)
        return self.whole(key, 0, 0, 2**40, "MiB (or write 512Mi, 64Gi)")

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        node = self.node(key)
        if node is None:
            return default
        if isinstance(node.value, bool):
            return node.value
        self.wrong(key, f"this is {node.kind}, expected true or false")
        return default

    def choice(self, key: str, choices: Sequence[T], default: T) -> T:
        """Read one of some words."""
        node = self.node(key)
        if node is None:
            return default
        if node.raw in choices:
            return cast(T, node.raw)
        self.wrong(key, f"this is {node.kind}, expected one of {', '.join(choices)}; {did_you_mean(node.raw, choices)}")
        return default


SLUG_RULE = (
    "small letters, digits, dots, dashes and underscores, at most 63, beginning and ending with a letter or digit"
)
