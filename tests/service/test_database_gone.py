"""Requests while the database does not answer: a 503 that names the cause and allows a retry."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway_api.errors import MakewayError
from makeway_quota.store import OutcomeUnknown, StoreError
from running import running


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            StoreError("the database postgresql://db.internal/x cannot do this"),
            "database_unavailable",
            "does not answer",
        ),
        (OutcomeUnknown(), "outcome_unknown", "not known yet"),
    ],
)
async def test_a_database_that_fails_is_a_503_that_says_when_to_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError, code: str, said: str
) -> None:
    async with running(tmp_path) as run:

        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(run.service.components.store, "add_workloads", fails)
        monkeypatch.setattr(run.service.components.store, "workloads", fails)
        with pytest.raises(MakewayError, match=said) as submitting:
            await run.submit("ana", "train", profile="gpu1")
        with pytest.raises(MakewayError, match=said) as listing:
            await run.client("ana").jobs()
        for refused in (submitting.value, listing.value):
            assert (refused.code, refused.status) == (code, 503)
            assert refused.numbers["retry_after"] >= 1
            assert "db.internal" not in refused.message
