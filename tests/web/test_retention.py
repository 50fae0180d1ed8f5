"""Administrators see what is kept, for how long, and what the last pass removed."""

from __future__ import annotations

import pytest
from web.portal import API, Portal


@pytest.mark.covers("N25")
async def test_the_retention_is_shown_to_administrators(web: Portal) -> None:
    before = (await web.as_("root").get(f"{API}/retention")).json()
    assert [(item["kind"], item["days"]) for item in before["kept"]] == [
        ("workloads", 90.0),
        ("decisions", 90.0),
        ("events", 7.0),
    ]
    await web.running_job()
    sweep = await web.run.service.retention.sweep()
    after = (await web.as_("root").get(f"{API}/retention")).json()
    assert after["removed"] == sweep.report["removed"]
    assert [item["count"] > 0 for item in after["kept"]] == [True, True, True]
    assert after["database_bytes"] > 0
    assert after["at"]
    assert (await web.as_("ana").get(f"{API}/retention")).status_code == 403
    assert (await web.as_(None).get(f"{API}/retention")).status_code == 401
