"""Over random histories of pods, every eviction is one that the engine would plan with perfect knowledge.

Gangs, several victims that save at different speeds or never, containers beside the worker that end later, notebooks
that stop, nodes that are not ready for a moment, device plugins that restart, and a service that is killed and started
again in between.
`POD_HISTORIES=1000` runs as many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from service.pod_histories import lived

HISTORIES = int(os.environ.get("POD_HISTORIES", "8"))
PARTS = 4


@pytest.mark.covers("N33", "F20", "F26")
@pytest.mark.timeout(60 + 10 * HISTORIES)
@pytest.mark.parametrize("part", range(PARTS))
async def test_no_eviction_of_a_random_history_is_needless(
    tmp_path: Path, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    evictions, needless = 0, []
    seeds = range(part, max(HISTORIES, PARTS), PARTS)
    for seed in seeds:
        result = await lived(tmp_path / str(seed), seed)
        evictions += result.total
        needless += [f"history {seed} {item}" for item in result.needless]
    with capsys.disabled():
        print(f"\n{len(seeds)} histories of pods: {evictions} preemptions, {len(needless)} of them needless")
    assert not needless
    assert evictions
