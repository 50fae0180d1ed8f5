"""Fills the generated parts of docs/reference/ from the code: settings, metrics, HTTP API, commands and magics.

A page marks such a part with `<!-- begin NAME -->` and `<!-- end NAME -->`; what stands around it is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"<!-- begin (?P<name>[a-z-]+)[^>]*-->\n(?P<text>.*?)<!-- end (?P=name) -->", re.DOTALL)


def pages(folder: Path) -> dict[str, str]:
    """Fill every page that has generated parts: its name → its text."""
    made = {}
    for file in sorted(folder.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if BLOCK.search(text):
            made[file.name] = BLOCK.sub(lambda result: block(result["name"]), text)
    return made


def block(name: str) -> str:
    """Make one part with its marks."""
    return f"<!-- begin {name}: made by `make docs` -->\n{PARTS[name]()}<!-- end {name} -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay rows out as a Markdown table; what would end a cell is escaped."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [
        f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def portal_settings() -> str:
    """Return every setting of the portal on one machine with its variable, default and help."""
    from makeway_hub.settings import Settings

    rows = [(variable, default, text) for _, variable, default, text in settings_of(Settings)]
    return table(["environment", "default", "meaning"], rows)


def service_settings() -> str:
    """Return every setting of the service with its variable, default and help."""
    from makeway_quota.settings import ServiceSettings

    rows = [(variable, f"`{name}`", default, text) for name, variable, default, text in settings_of(ServiceSettings)]
    return table(["environment", "in a file: `c.QuotaService.`", "default", "meaning"], rows)


def settings_of(declarations: type) -> list[tuple[str, str, str, str]]:
    """Return name, variable, default and help of each setting, by name."""
    from makeway_api.settings import declared

    result = sorted(declared(declarations).items())
    return [(name, f"`{one.variable}`", f"`{one.default!r}`", one.help) for name, one in result]


def chart_schema(text: str) -> str:
    """Return the schema of the chart's values, with the settings of the service that the site may give."""
    from makeway_api.settings import camel, declared
    from makeway_quota.settings import ServiceSettings

    schema = json.loads(text)
    given = {camel(name): one.schema for name, one in declared(ServiceSettings).items() if one.scope == "site"}
    schema["properties"]["service"]["properties"]["settings"]["properties"] = dict(sorted(given.items()))
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def transitions() -> str:
    """Return the state after each event in each state; an event without effect in a state has an empty cell."""
    from makeway_quota.control.transitions import EVENTS
    from makeway_quota.engine.snapshot import ADMITTED

    states = ("pending", "starting", "running", "checkpointing")
    head = ["event", "when", *states, "ended"]
    rows = []
    for name, event in EVENTS.items():
        after = [(event.after or state) if state in event.before else "" for state in states]
        ended = (event.after or "unchanged") if not event.before & (ADMITTED | {"pending"}) else ""
        rows.append([f"`{name}`", event.meaning, *after, ended])
    return table(head, rows)


def machine_transitions() -> str:
    """Return the states that can follow each event of a machine; an empty cell leaves the state."""
    from makeway_quota.autoscale.machine import FINISHED, STATES
    from makeway_quota.autoscale.transitions import MACHINE_TRANSITIONS

    states = [state for state in STATES if state not in FINISHED]
    rows = [
        [f"`{name}`", event.meaning, *(" or ".join(event.next_states.get(state, ())) for state in states)]
        for name, event in MACHINE_TRANSITIONS.items()
    ]
    return table(["event", "when", *states], rows)


def deployment_fields() -> str:
    """List the fields of the document of a deployment, table by table, with default and help."""
    from makeway_quota.autoscale.document import schema

    parts = []
    for name, fields in schema().items():
        rows = [
            (f"`{key}`", "required" if default == "required" else f"`{default}`", text) for key, default, text in fields
        ]
        parts.append(f"### {name}\n\n" + table(["key", "default", "meaning"], rows))
    return "\n".join(parts)


def metrics() -> str:
    """List every metric with its labels."""
    from makeway_quota.metrics import REGISTRY

    rows = []
    for collector in REGISTRY._collector_to_names:
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
            rows.append((f"`{name}`", family.type, labels or "–", family.documentation))
    return table(["metric", "kind", "labels", "meaning"], sorted(rows))


def magics() -> str:
    """Return the help of each magic, as `%NAME?` shows it."""
    from makeway import options

    lines = [
        options.gpus,
        options.train,
        options.jobs,
        options.job,
        options.logs,
        options.cancel,
        options.move,
        options.quota,
        options.delete,
    ]
    return "\n".join(described(line()) for line in lines)


def people_commands() -> str:
    """Return the help of `makeway` and its subcommands."""
    from makeway import cli

    return commands(cli._parser())


def operator_commands() -> str:
    """Return the help of `makeway-quota` and its subcommands."""
    from makeway_quota import main

    return commands(main._parser())


def device_plugin_command() -> str:
    """Return the help of `makeway-device-plugin`."""
    from makeway_device_plugin import __main__

    return commands(__main__.parser())


def commands(parser: argparse.ArgumentParser) -> str:
    """Describe a command and all below it."""
    return "\n".join(described(one) for one in walk(parser))


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Go through a command and its subcommands, each once."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {action.choices[one.dest]: one.help for one in action._choices_actions}
            for inner in dict.fromkeys(action.choices.values()):
                inner.description = inner.description or sentence(helps.get(inner))
                yield from walk(inner)


def sentence(text: str | None) -> str:
    """Write a short help as a sentence."""
    return text[0].upper() + text[1:].rstrip(".") + "." if text else ""


def described(parser: argparse.ArgumentParser) -> str:
    """Set a parser's help as a section: the same whatever Python makes it."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        takes = action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()
        many = " …" if action.nargs in ("+", "*") else ""
        names = ", ".join(sorted(action.option_strings, key=len, reverse=True)) or takes
        value = f" {takes}{many}" if action.option_strings and action.nargs != 0 else many
        text = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
        rows.append((f"`{names}{value}`", text))
    parts = [f"### `{parser.prog}`\n", (parser.description or "").strip() + "\n"]
    if rows:
        parts.append(table(["argument", "meaning"], rows))
    if parser.epilog:
        parts.append(f"```\n{parser.epilog.strip()}\n```\n")
    return "\n".join(part for part in parts if part.strip())


def http_api() -> str:
    """List every route of the API with what it takes and answers, from its own OpenAPI document."""
    from makeway_quota.web.app import create_app
    from makeway_quota.web.login.auth import TokenAuth
    from makeway_quota.web.settings import WebSettings

    document = create_app(None, WebSettings(), TokenAuth({})).openapi()  # type: ignore[arg-type]
    rows = []
    for path, verbs in document["paths"].items():
        for verb, route in verbs.items():
            short = path.removeprefix("/services/makeway")
            asks = [f"`{one['name']}`" for one in route.get("parameters", ()) if one["in"] == "query"]
            body = named(route.get("requestBody", {}))
            answers = next((named(answer) for code, answer in route["responses"].items() if code.startswith("2")), "")
            takes = ", ".join([*([f"body {body}"] if body else []), *asks]) or "–"
            meaning = (route.get("description") or route.get("summary", "")).strip().splitlines()[0]
            rows.append((f"`{verb.upper()} {short}`", takes, answers or "–", meaning))
    return table(["route", "takes", "answers", "meaning"], rows) + "\n" + models(document)


def named(content: dict[str, Any]) -> str:
    """Return the name of the model of a request or an answer, linked to its table."""
    for kind, media in content.get("content", {}).items():
        schema = media.get("schema", {})
        return type_of(schema) if kind == "application/json" and schema else f"`{kind}`"
    return ""


def type_of(schema: dict[str, Any]) -> str:
    """Return a JSON schema's type in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if schema.get("format") == "date-time":
        return "time"
    return str(schema.get("type", "anything"))


def models(document: dict[str, Any]) -> str:
    """Describe every model of the API, field by field."""
    parts = []
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        if "HTTPValidation" in name or name == "ValidationError":
            continue
        text = schema.get("description", "").replace("\n", " ").strip()
        parts.append(f"### {name}\n\n{text}\n")
        if "properties" in schema:
            needed = set(schema.get("required", ()))
            rows = [
                (f"`{field}`", type_of(one), "yes" if field in needed else "", one.get("description", ""))
                for field, one in schema["properties"].items()
            ]
            parts.append(table(["field", "type", "required", "meaning"], rows))
        elif "enum" in schema:
            parts.append(f"One of {type_of(schema)}.\n")
    return "\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "portal-settings": portal_settings,
    "service-settings": service_settings,
    "transitions": transitions,
    "machine-transitions": machine_transitions,
    "deployment-fields": deployment_fields,
    "metrics": metrics,
    "magics": magics,
    "people-commands": people_commands,
    "operator-commands": operator_commands,
    "device-plugin": device_plugin_command,
    "http-api": http_api,
}
