"""Users in a policy document are compared as JupyterHub writes their names."""

from __future__ import annotations

import pytest
from makeway_quota import policy

DOCUMENT = """\
pools: [{name: gpu}]
profiles: []
policies:
  - name: rnd
    users:
      - Ana.Müller@Example.org
      - bo
      - service/Nightly
  - {name: ops, users: [ANA.MÜLLER@example.org, cy]}
"""


@pytest.mark.covers("F33")
def test_capitals_of_a_user_do_not_count_as_at_the_hub() -> None:
    document = policy.read_policy(DOCUMENT)
    assert document.teams_of("ana.müller@example.org", []) == ("rnd", "ops")
    assert document.teams_of("bo", []) == ("rnd",)
    assert document.teams_of("Bo", []) == (), "no user of the Hub: it writes names in small letters"


def test_a_hub_that_keeps_capitals_finds_its_user_as_written() -> None:
    assert policy.read_policy(DOCUMENT).teams_of("Ana.Müller@Example.org", []) == ("rnd",)


def test_a_user_of_the_very_name_is_meant_alone() -> None:
    document = policy.read_policy(DOCUMENT.replace("- bo", "- BOSS"))
    assert set(document.users_with_capitals) == {"Ana.Müller@Example.org", "ANA.MÜLLER@example.org", "BOSS"}
    assert document.teams_of("BOSS", []) == document.teams_of("boss", []) == ("rnd",)
    assert document.teams_of("BOSS", [], {"boss", "BOSS"}) == ("rnd",)
    assert document.teams_of("boss", [], {"boss", "BOSS"}) == ()
    assert document.teams_of("boss", [], {"boss", "Boss"}) == ("rnd",), "Boss is in no team"
    small = policy.read_policy(DOCUMENT.replace("- bo", "- boss"))
    assert (small.teams_of("boss", []), small.teams_of("BOSS", [])) == (("rnd",), ())


def test_names_of_services_and_groups_keep_their_capitals() -> None:
    document = policy.read_policy(
        DOCUMENT.replace("bo\n", "bo\n    groups: [Staff]\n", 1).replace("      - service", "    #")
    )
    assert document.teams_of("x", ["Staff"]) == ("rnd",)
    assert document.teams_of("x", ["staff"]) == ()
    assert policy.read_policy(DOCUMENT).teams_of("service/Nightly", []) == ("rnd",)
    assert policy.read_policy(DOCUMENT).teams_of("service/nightly", []) == ()


def test_entries_with_capitals_are_warned_of_with_their_lines() -> None:
    result = [str(issue) for issue in policy.policy_warnings(DOCUMENT)]
    assert result == [
        'policy.yaml:6: policies[0].users[0]: the Hub writes "Ana.Müller@Example.org" as "ana.müller@example.org", '
        "which is the user that this entry means; write it like that",
        'policy.yaml:9: policies[1].users[0]: the Hub writes "ANA.MÜLLER@example.org" as "ana.müller@example.org", '
        "which is the user that this entry means; write it like that",
    ]


@pytest.mark.parametrize("name", ["a/b", "ana/deleted-1", ".", "..", "%2e", "service/", "service/a/b"])
def test_names_that_no_user_can_have_are_warned_of(name: str) -> None:
    text = DOCUMENT.replace("- bo", f"- '{name}'")
    policy.read_policy(text)
    assert any(f'can be called "{name}"' in issue.message for issue in policy.policy_warnings(text))


def test_two_spellings_of_one_user_are_warned_of() -> None:
    (result,) = policy.policy_warnings("policies: [{name: rnd, users: [bo, Bo]}]")
    assert result.message == '"Bo" and "bo" are the same user, whom the Hub calls "bo"; keep one'


@pytest.mark.parametrize("text", ["", "[", "policies: 1", "policies: [1]", "policies: [{users: {a: b}}]", "a: &a [*a]"])
def test_no_text_fails_the_search_for_warnings(text: str) -> None:
    policy.policy_warnings(text)


def test_names_without_doubt_give_no_warning() -> None:
    assert (
        policy.policy_warnings("policies: [{name: rnd, users: ana}, {name: b, users: [bo, c.d@e-f.g, müller]}]") == []
    )


def test_a_signal_that_frameworks_catch_is_a_warning() -> None:
    entries = ["{name: a, signal: SIGUSR1}", "{name: b}", "{name: c, signal: SIGTERM}", "{name: d, signal: SIGINT}"]
    text = "".join(f"{line}\n" for line in ["profiles:", *(f"- {entry}" for entry in entries)])
    result = [str(issue) for issue in policy.policy_warnings(text)]
    assert len(result) == 2
    assert "policy.yaml:2" in result[0]
    assert "SIGUSR1 may not be taken as a notice to save" in result[0]
    assert "NCCL" in result[0]
    assert "SIGINT" in result[1]
    assert policy.policy_warnings("profiles: 3") == policy.policy_warnings("profiles: [{signal: [1]}, 7]") == []
