"""Signed notes: read back, refused when changed, old, or meant for something else."""

from __future__ import annotations

import pytest
from makeway_quota.web.login.tickets import Signer, same

SECRET = b"sixteen bytes or more"


def test_a_note_is_read_back_until_it_is_too_old() -> None:
    now = 1000.0
    signer = Signer(SECRET, clock=lambda: now)
    note = signer.sign("offers", ["ana", "session"], 900)
    assert signer.read("offers", note) == ["ana", "session"]
    now = 1899.0
    assert signer.read("offers", note) == ["ana", "session"]
    now = 1900.0
    assert signer.read("offers", note) is None


def test_only_the_same_purpose_and_secret_read_it() -> None:
    note = Signer(SECRET).sign("cookie", "token", 60)
    assert Signer(SECRET).read("offers", note) is None
    assert Signer(b"another secret of bytes").read("cookie", note) is None


@pytest.mark.parametrize("forged", ["", ".", "x", "a.b", "ä.ö", "e30.", "é" * 100, "=.=", "\ud800"])
def test_nonsense_is_refused(forged: str) -> None:
    assert Signer(SECRET).read("offers", forged) is None


def test_every_changed_letter_is_noticed() -> None:
    signer = Signer(SECRET)
    note = signer.sign("offers", "ana", 60)
    for at, letter in enumerate(note):
        changed = note[:at] + ("A" if letter != "A" else "B") + note[at + 1 :]
        # the last letter of base64 may carry unused bits
        assert at in (note.index(".") - 1, len(note) - 1) or signer.read("offers", changed) is None


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Signer(b"short")


def test_tokens_are_compared_as_text() -> None:
    assert same("abc", "abc")
    assert not same("abc", "\ud800")
