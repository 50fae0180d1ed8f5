"""Single fields change in the text of a document, whose comments stay, however the text is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.autoscale.document import read_deployment
from makeway_quota.autoscale.document_edits import differences, free_name, with_name, with_paused
from makeway_quota.policy import PolicyInvalid

TYPES = "machine_types: [{name: a, pool: gpu, instance: big}]"
BLOCK = f"name: cloud  # the tag\nprovider: local\n# the types\n{TYPES}\n"
WRITTEN = {
    "block": BLOCK,
    "windows": BLOCK.replace("\n", "\r\n"),
    "name last": f"provider: local # the types\n{TYPES}\nname: cloud",
    "quoted": BLOCK.replace("cloud", '"cloud"'),
    "indented": "".join(f"  {line}\n" for line in BLOCK.splitlines()),
    "given": f"{BLOCK}paused: false # the types, too\n",
    "empty": f"paused:   # the types\n{BLOCK}",
    "null": f"paused: null\n{BLOCK}",
    "flow": f"{{name: cloud, provider: local, {TYPES}}} # the types\n",
    "marked": f"\ufeff--- # a document\n{BLOCK}",
    "wide": f"title: Ärger 😀 Straße\n{BLOCK}",
}
JSON = '{"name": "cloud", "provider": "local", "machine_types": [{"name": "a", "pool": "gpu", "instance": "big"}]}'


@pytest.mark.parametrize("written", WRITTEN)
def test_a_pause_changes_one_field_and_keeps_the_comments(written: str) -> None:
    text = WRITTEN[written]
    before = read_deployment(text)
    paused = with_paused(text, True)
    assert read_deployment(paused) == replace(before, paused=True)
    assert "the types" in paused
    assert with_paused(paused, True) == paused
    assert read_deployment(with_paused(paused, False)) == before
    assert with_paused(text, False) == text


@pytest.mark.parametrize("written", WRITTEN)
def test_another_name_changes_one_field_and_keeps_the_comments(written: str) -> None:
    text = WRITTEN[written]
    for name in ("other", "7", "on", "1.5"):
        renamed = with_name(text, name)
        assert read_deployment(renamed) == replace(read_deployment(text), name=name)
        assert "the types" in renamed


def test_json_stays_json() -> None:
    paused = with_paused(JSON, True)
    assert paused == JSON.replace('"cloud"', '"cloud", "paused": true')
    assert with_name(paused, "other").startswith('{"name": "other", ')


@pytest.mark.parametrize("odd", ["name: >-\n  cloud\nprovider: local\n" + TYPES, "? name\n: cloud\n" + BLOCK[22:]])
def test_a_text_that_cannot_be_edited_is_written_anew(odd: str) -> None:
    before = read_deployment(odd)
    assert read_deployment(with_paused(odd, True)) == replace(before, paused=True)
    assert read_deployment(with_name(odd, "other")) == replace(before, name="other")


def test_a_document_that_cannot_be_read_is_not_edited() -> None:
    for text in ("", "name: [", BLOCK.replace("local", "aws")):
        with pytest.raises(PolicyInvalid):
            with_paused(text, True)


def test_a_free_name_counts_on() -> None:
    assert free_name("cloud", ()) == "cloud"
    assert free_name("cloud", {"cloud", "cloud-2"}) == "cloud-3"
    assert free_name("cloud-9", {"cloud-9"}) == "cloud-10"
    assert free_name("gpu-a", {"gpu-a"}) == "gpu-a-2"
    long = "a" * 63
    assert free_name(long, {long}) == "a" * 61 + "-2"
    for name in ("a." + "b" * 61, "a" * 60 + "-99"):
        result = free_name(name, {name})
        assert len(result) <= 63
        assert read_deployment(with_name(BLOCK, result)).name == result


def test_differences_name_each_field_and_type() -> None:
    old = read_deployment(BLOCK)
    assert differences(None, old) == ["The deployment cloud is new."]
    assert differences(old, old) == []
    more = "{name: b, pool: gpu, instance: big, price: 1}"
    types = f"machine_types: [{more}, {{name: a, pool: gpu, instance: big, price: 3.10}}]"
    new = read_deployment(BLOCK.replace(TYPES, types) + "hour: 5\ntitle: Nights\n")
    assert differences(old, new) == [
        "title: none → Nights.",
        "hour: none → 5.",
        "The machine type b is added.",
        "a, price: none → 3.1.",
    ]
    turned = replace(new, types=new.types[::-1])
    assert differences(new, turned) == ["Machine types are tried in the order a, b."]
    assert differences(new, old)[2] == "The machine type b is removed."
    long = replace(old, types=(replace(old.types[0], init_script="#!/bin/sh\napt-get update\n"),))
    assert differences(old, long) == ["a, init_script: none → #!/bin/sh…."]
