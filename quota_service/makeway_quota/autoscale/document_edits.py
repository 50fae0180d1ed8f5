"""Change single fields in the text of a deployment's document, and compare two documents.

Comments and the order of keys stay as they are. Where a field cannot be changed in the text, the whole document is
written again, without its comments.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import yaml

from ..policy.issues import PolicyInvalid
from ..policy.source import parse
from .deployment import Deployment
from .document import DeploymentTable, TypeTable, read_deployment, write_deployment

MAX_NAME = 63
"""Characters of a name"""
MAX_SHOWN = 60
"""Characters of a value in a sentence about a difference"""


def with_paused(text: str, paused: bool) -> str:
    """Return a document with `paused` set; the same text where it is set so already. PolicyInvalid as when read."""
    deployment = read_deployment(text, stored=True)
    if deployment.paused == paused:
        return text
    return _changed(text, "paused", "true" if paused else "false", replace(deployment, paused=paused))


def with_name(text: str, name: str) -> str:
    """Return a document under another name. PolicyInvalid as when read."""
    deployment = read_deployment(text, stored=True)
    return text if deployment.name == name else _changed(text, "name", name, replace(deployment, name=name))


def free_name(name: str, used: Collection[str]) -> str:
    """Return the first of `name`, `name-2`, `name-3` … that is not used, counting on from a number at its end."""
    stem, dash, number = name.rpartition("-")
    counted = bool(dash and number.isdecimal() and number.isascii() and len(number) < 6)
    stem, n = (stem, int(number)) if counted else (name, 1)
    while name in used:
        n += 1
        name = f"{stem[: MAX_NAME - len(str(n)) - 1]}-{n}"
    return name


def differences(old: Deployment | None, new: Deployment) -> list[str]:
    """Return a sentence for each difference of two documents."""
    if old is None:
        return [f"The deployment {new.name} is new."]
    types = {machine_type.name: machine_type for machine_type in old.types}
    names = [machine_type.name for machine_type in new.types]
    result = _fields("", DeploymentTable.of(old, machine_types=()), DeploymentTable.of(new, machine_types=()))
    result += [f"The machine type {name} is removed." for name in types if name not in names]
    for machine_type in new.types:
        if machine_type.name not in types:
            result.append(f"The machine type {machine_type.name} is added.")
        else:
            result += _fields(
                f"{machine_type.name}, ", TypeTable.of(types[machine_type.name]), TypeTable.of(machine_type)
            )
    both = [name for name in types if name in names]
    if both != [name for name in names if name in types]:
        result.append(f"Machine types are tried in the order {', '.join(names)}.")
    return result


def _fields(prefix: str, old: DeploymentTable | TypeTable, new: DeploymentTable | TypeTable) -> list[str]:
    before, after = old.model_dump(mode="json", by_alias=True), new.model_dump(mode="json", by_alias=True)
    return [
        f"{prefix}{key}: {_shown(before[key])} → {_shown(after[key])}." for key in after if before[key] != after[key]
    ]


def _shown(value: Any) -> str:
    if value in (None, "", [], {}):
        return "none"
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line, *more = shown.strip().splitlines() or [""]
    return line if not more and len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 1]}…"


def _changed(text: str, key: str, value: str, wanted: Deployment) -> str:
    """Return the text with a field of the document replaced or added, if it reads as `wanted` then."""
    plain = text.removeprefix("\ufeff")
    changed = _replaced(plain, key, value)
    try:
        if changed is not None and read_deployment(changed, stored=True) == wanted:
            return changed
    except PolicyInvalid:
        pass
    return write_deployment(wanted)


def _replaced(text: str, key: str, value: str) -> str | None:
    source = parse(text)
    node, root = source.node((key,)), source.node(())
    if isinstance(node, yaml.ScalarNode):
        begin, end = node.start_mark.index, node.end_mark.index
        written = json.dumps(value) if key == "name" and node.style else value
        return f"{text[:begin]}{written if begin < end else f' {written}'}{text[end:]}"
    name = source.node(("name",))
    if node is not None or name is None or not isinstance(root, yaml.MappingNode):
        return None
    end = name.end_mark.index
    if root.flow_style:
        return f'{text[:end]}, "{key}": {value}{text[end:]}'
    line = text.find("\n", end)
    line = len(text) if line < 0 else line
    column = " " * root.start_mark.column
    return f"{text[:line]}\n{column}{key}: {value}{text[line:]}"
