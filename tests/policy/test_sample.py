"""The sample policy is right, and fits the machine it is started on."""

from __future__ import annotations

import pytest
from makeway_quota import policy


@pytest.mark.covers("F08", "N01")
def test_the_sample_is_the_example_of_the_founding_documents(sample: str) -> None:
    document = policy.read_policy(sample, "policy.yaml", {"gpu": 10})
    assert [(p.name, p.title) for p in document.policies] == [("rnd", "R&D"), ("devops", "DevOps")]
    assert [(q.reserved, q.limit, q.lend) for p in document.policies for q in p.quotas] == [(5000, 9000, None)] * 2
    assert [(p.name, p.gpus) for p in document.profiles] == [
        ("cpu", 0),
        ("gpu1", 1000),
        ("gpu2", 2000),
        ("gpu3", 3000),
        ("gpu8", 8000),
    ]
    assert document.teams_of("ana", ["rnd", "users"]) == ("rnd",)
    assert document.teams_of("lead", {"devops", "rnd"}) == ("rnd", "devops")
    assert document.teams_of("unknown", []) == ()
    assert document.profiles_for(None, "session") == ("cpu",)
    assert document.profiles_for(None, "job") == ()
    assert document.profiles_for("rnd", "session") == ("cpu", "gpu1", "gpu2", "gpu3", "gpu8")
    assert document.profiles_for("rnd", "job") == ("gpu1", "gpu2", "gpu3", "gpu8")
    assert document.pool_of_device(7) == "gpu"
    assert all(profile.grace == 30.0 for profile in document.profiles)
    assert policy.rescale(document, {"gpu": 10}) is document


@pytest.mark.parametrize(
    ("gpus", "quotas"),
    [
        (1, [(1, 1), (0, 1)]),
        (2, [(1, 1), (1, 1)]),
        (7, [(4, 6), (3, 6)]),
        (8, [(4, 7), (4, 7)]),
        (16, [(8, 14), (8, 14)]),
    ],
)
def test_the_sample_is_scaled_to_the_machine(sample: str, gpus: int, quotas: list[tuple[int, int]]) -> None:
    sizes = {"gpu": gpus}
    document = policy.read_policy(sample)
    assert bool(policy.overcommitments(document, sizes)) == (gpus < 10)
    rescaled = policy.rescale(document, sizes)
    assert policy.overcommitments(rescaled, sizes) == ()
    assert [(q.reserved / 1000, (q.limit or 0) / 1000) for p in rescaled.policies for q in p.quotas] == quotas
    assert policy.read_policy(policy.write_policy(rescaled), sizes=sizes) == rescaled
    text = policy.rescale_text(sample, "policy.yaml", sizes)
    assert policy.read_policy(text, sizes=sizes) == rescaled
    assert text.count("#") == sample.count("#")
    assert len(text.splitlines()) == len(sample.splitlines())


def test_a_sample_that_fits_keeps_every_letter(sample: str) -> None:
    assert policy.rescale_text(sample, "policy.yaml", {"gpu": 10}) is sample


@pytest.mark.covers("F33")
def test_a_policy_is_of_a_group_a_person_or_a_list_of_people() -> None:
    document = policy.read_policy("""
pools: [{name: gpu}]
profiles: []
policies:
  - {name: team, groups: [rnd, interns]}
  - {name: person, users: [ana]}
  - {name: activity, users: [ana, bo], groups: [hackathon]}
""")
    assert document.teams_of("ana", ["interns"]) == ("team", "person", "activity")
    assert document.teams_of("bo", []) == ("activity",)
    assert document.teams_of("cleo", {"hackathon", "rnd"}) == ("team", "activity")
    assert document.teams_of("dan", ["other"]) == ()


def test_ranks_and_queues_are_read(sample: str) -> None:
    text = sample.replace("policies: [[rnd, devops]]", "policies: [rnd]", 1).replace(
        "policies: [[rnd, devops]]", "policies: [devops, rnd]", 1
    )
    document = policy.read_policy(text)
    one, two, three = (document.profile(name) for name in ("gpu1", "gpu2", "gpu3"))
    assert one is not None
    assert two is not None
    assert three is not None
    assert (one.policies, two.policies, three.policies) == (
        (("rnd",),),
        (("devops",), ("rnd",)),
        (("rnd", "devops"),),
    )
    assert document.queue_open("rnd", "gpu1")
    assert not document.queue_open("devops", "gpu1")
    assert not document.queue_open("unknown", "gpu2")
    assert not document.queue_open("rnd", "gpu9")
    assert not document.queue_open(None, "gpu1")
    assert document.queue_open(None, "cpu")
