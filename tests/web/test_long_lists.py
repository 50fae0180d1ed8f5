"""Lists are made in the threads of the requests, not on the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from makeway_quota.services import views
from makeway_quota.services.log import audit
from makeway_quota.web.pages import nodes
from makeway_quota.web.server import problems
from web.portal import API, PREFIX, Portal


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """Note the thread of every call of a function of a module."""
    threads: list[str] = []
    real = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return threads


async def test_lists_are_made_outside_the_event_loop(web: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await web.running_job()
    root = web.as_("root")
    made = [
        watched(monkeypatch, views, "job"),
        watched(monkeypatch, audit, "decision_model"),
        watched(monkeypatch, nodes, "_line"),
    ]
    assert len((await root.get(f"{API}/jobs")).json()["jobs"]) == 1
    assert len((await root.get(f"{API}/decisions")).json()) >= 2
    assert (await (await web.browser("root")).get(f"{PREFIX}nodes")).status_code == 200
    for threads in made:
        assert threads
        assert all(thread.startswith("request") for thread in threads)
    assert {line["workload"] for line in (await root.get(f"{API}/jobs/{id}/events")).json()} == {id}
    assert (await root.get(f"{API}/sessions?all=true")).json() == []
    assert problems.json_list_response([]).body == b"[]"
