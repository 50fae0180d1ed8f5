"""The rule of moves in the document of a deployment, its form, and its differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from makeway_quota.autoscale.deployment import MoveRules
from makeway_quota.autoscale.document import read_deployment, write_deployment
from makeway_quota.autoscale.document_edits import differences
from makeway_quota.policy.issues import PolicyInvalid
from makeway_quota.web.pages.forms.deployment_fields import document_of, form_of, values_of

DOCUMENT = """
version: 1
name: cloud
provider: local
moves: {every: 15m, headroom: 1, most: 4}
machine_types:
  - {name: g, pool: gpu, instance: g}
"""
TABLE = "{every: 15m, headroom: 1, most: 4}"


def test_no_job_is_moved_unless_the_document_says_so() -> None:
    assert read_deployment(DOCUMENT.replace(f"moves: {TABLE}\n", "")).moves is None
    assert read_deployment(DOCUMENT).moves == MoveRules(900.0, 1, 4)
    assert read_deployment(DOCUMENT.replace(TABLE, "{}")).moves == MoveRules(3600.0, 3, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{every: 5}", "moves.every: jobs would be moved all the time; make it at least 60 seconds"),
        ("{most: 0}", "moves.most: no job would ever be moved; name at least 1, or remove moves"),
        ("{headroom: -1}", "moves.headroom: -1 is too small; the least is 0 GPUs"),
        ("{evry: 3}", 'moves.evry: "evry" is not a key here; did you mean "every"?'),
        ("yes", 'moves: this is "yes", expected a table with the keys every, headroom, most'),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(PolicyInvalid) as refused:
        read_deployment(DOCUMENT.replace(TABLE, wrong))
    assert [f"{one.where}: {one.message}" for one in refused.value.issues] == [message]


@pytest.mark.parametrize("table", [TABLE, "{}", "{most: 1}"])
def test_documents_with_moves_read_back_as_they_were_written(table: str) -> None:
    deployment = read_deployment(DOCUMENT.replace(TABLE, table))
    written = write_deployment(deployment)
    assert read_deployment(written) == deployment
    values = values_of(written)
    assert values is not None
    assert read_deployment(document_of(values)) == deployment


def test_the_form_has_a_line_for_each_key_and_shows_what_is_wrong_beside_them() -> None:
    values = values_of(DOCUMENT)
    assert values is not None
    assert values["moves"] == "every: 15m\nheadroom: 1\nmost: 4"
    values["moves"] = "every: 5"
    with pytest.raises(PolicyInvalid) as refused:
        read_deployment(document_of(values))
    wrong = {one.name: one.errors for one in form_of(values, refused.value.issues)[0].fields if one.errors}
    assert wrong == {"moves": ("jobs would be moved all the time; make it at least 60 seconds",)}
    values["moves"] = ""
    assert read_deployment(document_of(values)).moves is None
    assert values_of(DOCUMENT.replace(TABLE, "{}")) is None, "an empty table, which has its defaults, is edited as YAML"


def test_a_difference_of_the_rule_is_a_sentence() -> None:
    deployment = read_deployment(DOCUMENT)
    assert differences(deployment, replace(deployment, moves=None)) == [
        'moves: {"every": 900, "headroom": 1, "most": 4} → none.'
    ]
