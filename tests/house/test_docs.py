"""The documentation is true: its links lead somewhere, its commands exist, nothing that exists is missing in it."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import make_docs
import pytest
import yaml
from makeway_api.settings import declared
from makeway_hub.settings import Settings
from makeway_quota import policy
from makeway_quota.autoscale.document import schema
from makeway_quota.policy import models as policy_models
from makeway_quota.policy.tables import Table
from makeway_quota.settings import ServiceSettings
from makeway_quota.snapshot_file import models as snapshot_models

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"\bMAKEWAY_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
PICTURE = re.compile(r"(?:src|srcset)=\"([^\"]+)\"|!\[[^\]]*\]\(([^)]+)\)")
CODE_PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py|(?:[\w.-]+/)+[\w.-]+\.(?:css|html|js|json|toml|tpl|ts|ya?ml))`")
LARGEST_PICTURE = 200_000


def handbook(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def anchors(file: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def blocks(file: Path, kind: str) -> list[str]:
    return [text for result, text in FENCE.findall(file.read_text(encoding="utf-8")) if result == kind]


def test_every_link_leads_somewhere(root: Path) -> None:
    broken = []
    for file in handbook(root):
        for target in LINK.findall(file.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            aim = (file.parent / path).resolve() if path else file
            if not aim.exists() or (anchor and anchor not in anchors(aim)):
                broken.append(f"{file.relative_to(root)}: {target}")
    assert not broken


def test_every_code_path_in_the_docs_exists(root: Path, tracked: list[Path]) -> None:
    known = {f"/{file.relative_to(root).as_posix()}" for file in tracked}
    named = [
        (file.relative_to(root).as_posix(), path)
        for file in handbook(root)
        if file.name != "CHANGELOG.md"  # names what was there once
        for path in CODE_PATH.findall(file.read_text(encoding="utf-8"))
    ]
    assert len(named) > 100
    assert not [item for item in named if not any(path.endswith(f"/{item[1]}") for path in known)]


def test_every_page_is_reached_from_the_index(root: Path) -> None:
    index = (root / "docs/README.md").read_text(encoding="utf-8")
    pages = {file.relative_to(root / "docs").as_posix() for file in (root / "docs").rglob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page}" not in index}


def test_pictures_exist_and_are_small(root: Path) -> None:
    wrong = []
    for file in handbook(root):
        for pair in PICTURE.findall(file.read_text(encoding="utf-8")):
            picture = file.parent / (pair[0] or pair[1])
            if not picture.exists() or picture.stat().st_size > LARGEST_PICTURE:
                wrong.append(f"{file.name}: {picture.name}")
    assert not wrong


def test_generated_pages_are_up_to_date(root: Path) -> None:
    stale = [
        file.relative_to(root).as_posix()
        for file, text in make_docs.pages(root).items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make docs`"


def test_marks_name_rows_that_exist(root: Path) -> None:
    rows = {row["id"] for section in make_docs.feature_rows(root) for row in section["rows"]}
    unknown = {proof for proof in make_docs.proofs(root / "tests") if proof.row not in rows}
    assert not {proof for proof in unknown if not proof.file.startswith("tests/house/")}


def variables() -> set[str]:
    """Return the variables that follow from the declarations of settings."""
    return {setting.variable for kind in (ServiceSettings, Settings) for setting in declared(kind).values()}


def test_every_setting_is_documented(root: Path, tracked: list[Path]) -> None:
    packages = ("hub_config", "spawner", "quota_service", "widgets", "device_plugin", "Makefile")
    used = {
        name
        for file in tracked
        if file.relative_to(root).parts[0] in packages and file.suffix in {".py", ".yaml", ""}
        for name in SETTING.findall(file.read_text(encoding="utf-8"))
    }
    pages = "".join(file.read_text(encoding="utf-8") for file in (root / "docs/reference").glob("*.md"))
    assert not (used | variables()) - set(SETTING.findall(pages)) - {"PORT"}


def test_every_setting_in_the_docs_exists(root: Path, tracked: list[Path]) -> None:
    code = "".join(
        file.read_text(encoding="utf-8")
        for file in tracked
        if file.suffix in {".py", ".yaml"} and file.relative_to(root).parts[0] not in {"tests", "docs"}
    )
    named = {name for file in handbook(root) for name in SETTING.findall(file.read_text(encoding="utf-8"))}
    assert not named - set(SETTING.findall(code)) - variables()


def targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_every_make_target_is_documented_and_each_one_documented_exists(root: Path) -> None:
    text = (root / "README.md").read_text() + (root / "CONTRIBUTING.md").read_text()
    assert not {target for target in targets(root) if f"make {target}" not in text}
    named = {
        word
        for file in handbook(root)
        for word in re.findall(r"`(?:[A-Z_]+=\S+ )*make ([a-z-]+)", file.read_text(encoding="utf-8"))
    }
    assert not named - targets(root) - {"run"}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: subcommands(inner) for name, inner in action.choices.items()}
    return {}


def test_every_command_in_the_docs_exists(root: Path) -> None:
    from makeway import cli
    from makeway_quota import main

    known = {"makeway": subcommands(cli._parser()), "makeway-quota": subcommands(main._parser())}
    wrong = []
    for file in handbook(root):
        if file.name == "features.md":  # names what is yet to come
            continue
        text = file.read_text(encoding="utf-8")
        lines = re.findall(r"`((?:makeway|makeway-quota) [^`\n]+)`", text)
        lines += [line for block in blocks(file, "sh") for line in block.splitlines()]
        for line in lines:
            words = line.split("#")[0].split()
            if not words or words[0] not in known or len(words) < 2 or not words[1].islower():
                continue
            inner = known[words[0]].get(words[1])
            if inner is None or (inner and len(words) > 2 and words[2].isalpha() and words[2] not in inner):
                wrong.append(f"{file.name}: {line}")
    assert not wrong


def test_every_magic_in_the_docs_takes_these_options(root: Path) -> None:
    from makeway import options

    lines = {f"%{name}": getattr(options, name) for name in ("gpus", "jobs", "job", "logs", "cancel")}
    lines["%%train"] = options.train
    wrong = []
    for file in handbook(root):
        for magic, rest in re.findall(
            r"^\s*(%%?[a-z]+)((?: [^\n`]*)?)$", file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            if magic in lines and "…" not in rest:
                try:
                    lines[magic]().read(rest)
                except Exception as error:
                    wrong.append(f"{file.name}: {magic}{rest}: {error}")
            elif magic != "%load_ext" and magic not in lines:
                wrong.append(f"{file.name}: {magic} is no magic")
    assert not wrong


@pytest.mark.parametrize("page", ["docs/reference/policy-file.md"])
def test_the_policy_in_the_reference_is_valid(root: Path, page: str) -> None:
    (text,) = [text for text in blocks(root / page, "yaml") if text.startswith("version: 1")]
    assert policy.read_policy(text, page).policies


@pytest.mark.covers("F08")
def test_the_sample_policy_is_valid(root: Path) -> None:
    document = policy.read_policy((root / "hub_config/policy.yaml").read_text(encoding="utf-8"), "policy.yaml")
    assert {one.name: one.quotas[0].reserved for one in document.policies} == {"rnd": 5000, "devops": 5000}


@pytest.mark.parametrize(
    ("pages", "tables"), [(["policy-file"], policy_models), (["snapshot", "policy-file"], snapshot_models)]
)
def test_every_key_of_a_file_is_documented(root: Path, pages: list[str], tables: ModuleType) -> None:
    text = "".join((root / f"docs/reference/{page}.md").read_text(encoding="utf-8") for page in pages)
    own = [table for table in vars(tables).values() if isinstance(table, type) and table.__module__ == tables.__name__]
    keys = {key for table in own if issubclass(table, Table) for key in table.known()}
    assert len(keys) > 40
    assert not {key for key in keys if not re.search(rf"\b{key}\b", text)}


def test_the_snapshot_in_the_reference_gives_the_printed_plan(root: Path, tmp_path: Path) -> None:
    from makeway_quota.snapshot_file import plan_command

    (text,) = blocks(root / "docs/reference/snapshot.md", "yaml")
    file = tmp_path / "snapshot.yaml"
    file.write_text(text)
    answer = io.StringIO()
    assert plan_command(str(file), "json", answer) == 0
    plan = yaml.safe_load(answer.getvalue())
    assert [(one["id"], one["for"]) for one in plan["evict"]] == [("j3", "j4")]
    assert set(plan) >= {"start", "evict", "move", "scale", "pending", "usage"}


def test_shell_examples_can_be_read_by_a_shell(root: Path) -> None:
    for file in handbook(root):
        for block in blocks(file, "sh"):
            shlex.split(block, comments=True)


def test_each_version_in_the_changelog_has_its_headings_once(root: Path) -> None:
    versions = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert versions
    for version in versions:
        headings = re.findall(r"^### (.+)$", version, flags=re.MULTILINE)
        assert len(headings) == len(set(headings)), version.splitlines()[0]
        assert set(headings) <= {"Upgrading", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.covers("F78")
def test_the_page_of_all_options_of_a_deployment_is_that_of_the_schema(root: Path) -> None:
    """Each field with its default and its help, each setting of a provider, and nothing that does not exist."""
    page = (root / "docs/reference/machines.md").read_text(encoding="utf-8")
    made = page.partition("<!-- begin deployment-fields")[2].partition("<!-- end deployment-fields")[0]
    tables = re.split(r"^### ", made, flags=re.MULTILINE)[1:]
    cells = r"^\| `([^`]+)` \| `?([^`|]*?)`? \| (.+) \|$"
    assert {table.splitlines()[0]: re.findall(cells, table, re.MULTILINE) for table in tables} == schema()
    guide = (root / "docs/how-to/deployments.md").read_text(encoding="utf-8")
    assert "(../reference/machines.md#the-document-of-a-deployment)" in guide
