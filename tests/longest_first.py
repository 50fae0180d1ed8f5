"""Hand groups of tests to the workers of pytest-xdist, the longest first: none starts when all others have ended.

Those that start a whole portal run on few workers at once: beside more of their kind each waits for seconds, and what
is killed and watched there has deadlines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

SECONDS = {
    "tests/kube/portal": 500,
    "images": 420,
    "tests/kube/test_cluster_faults.py": 170,
    "tests/kube/test_notebooks.py": 150,
    "tests/kube/test_job_pods.py": 150,
    "tests/kube/test_two_nodes.py": 170,
    "tests/kube/test_trainings.py": 160,
    "tests/kube/test_run_kube.py": 60,
    "tests/kube/test_chart_pods.py": 80,
    "tests/kube/test_notebook_placement.py": 70,
    "tests/kube/test_killed_service.py": 70,
    "tests/kube/test_chart_installed.py": 60,
    "tests/kube/test_inventory.py": 50,
    "tests/kube/test_teardown.py": 50,
    "tests/kube/test_policies.py": 40,
    "tests/kube/test_node.py": 30,
    "tests/kube/test_chart_rights.py": 20,
    "accounts": 160,
    "tests/hub": 150,
    "tests/e2e/test_faults.py::test_the_hub_is_killed": 110,
    "tests/e2e/test_story.py::test_story": 100,
    "types": 130,
    "tests/web/test_at_size.py::test_the_panel_of_a_thousand_nodes": 80,
    "tests/hub/test_embedded.py::test_a_killed_hub_is_announced_and_its_notebooks_are_adopted": 75,
    "tests/hub/test_embedded.py::test_a_hub_killed_during_a_start_leaks_no_lease": 75,
    "tests/hub/test_databases.py::test_a_portal_upgrades_what_an_earlier_release_left_and_starts": 70,
    "tests/hub/test_proxies.py::test_a_portal_started_behind_a_proxy_works_and_tells_the_proxy_nothing": 60,
    "tests/service/test_power_losses.py::test_five_losses_of_everything_fail_no_job": 40,
    "tests/service/test_large_commands.py": 60,
    "tests/hub/test_embedded.py::test_ctrl_c_stops_everything_and_a_second_start_finds_nothing_left": 70,
    "tests/hub/test_embedded.py::test_a_killed_starter_takes_the_hub_with_it_and_the_next_start_clears_up": 60,
    "tests/hub/test_embedded.py::test_kept_notebooks_survive_ctrl_c": 80,
    "tests/e2e/test_faults.py::test_the_service_is_killed": 60,
    "tests/e2e/test_bad_input.py::test_a_broken_policy_at_the_first_start_is_named": 40,
    "tests/e2e/test_elsewhere.py": 90,
    "tests/frameworks/test_reclaims.py::test_trainings_make_way_for_an_owner_and_resume": 90,
    "tests/frameworks/test_trainings.py::test_torchrun": 50,
    "tests/frameworks/test_trainings.py::test_accelerate": 50,
    "tests/frameworks/test_trainings.py::test_a_loop_over_epochs": 50,
    "tests/frameworks/test_units.py::test_the_parts_of_the_adapters": 50,
    "tests/widgets": 60,
    "tests/widgets/test_ordinary_cells.py": 60,
    "tests/widgets/test_cell_state.py": 50,
    "tests/e2e/test_bad_input.py": 50,
    "tests/web/test_live_at_size.py::test_an_open_page_takes_few_bytes_and_does_not_move": 50,
    "tests/store/test_soak.py::test_sizes_level_off_once_the_oldest_jobs_are_removed": 70,
    "tests/store/test_year.py::test_every_table_levels_off_within_a_year": 40,
    "tests/service/test_eviction.py": 40,
    "tests/service/test_elsewhere.py": 40,
    "tests/house/test_newcomer.py::test_the_readmes_tour": 40,
    "tests/house/test_packages.py": 40,
    "tests/engine/test_shortcuts.py": 40,
    "tests/house/test_newcomer.py::test_a_fresh_machine_without_node_is_set_up_and_then_left_alone": 60,
    "tests/web/test_schemathesis.py::test_many_requests_and_no_500": 40,
    "tests/hub/test_site_portal.py::test_a_portal_with_a_certificate_of_the_site": 30,
    "tests/hub/test_site_portal.py::test_a_portal_below_a_prefix_behind_a_web_server_with_tls": 30,
    "tests/engine/test_scaling.py": 30,
    "tests/store/test_retention.py": 30,
    "tests/e2e/test_replicas.py": 30,
    "tests/engine/test_invariants.py": 30,
    "tests/engine/test_reference.py": 30,
}
"""Roughly how long the longest groups take on two processors; `make test ARGS=--durations=40` shows the tests."""

BUSY = 10
"""A worker needs two tests to begin the first: behind a longer group than this it gets the shortest one."""


PORTALS = ("accounts", "tests/hub", "tests/e2e/", "tests/house/test_newcomer.py::test_the_readmes_tour")
"""Where tests start a whole portal or several services; in tests/hub the others are groups of whole files."""
MAX_WITH_PORTALS = max(2, len(os.sched_getaffinity(0)))
"""The most workers that run such tests at the same time, while there are others to run."""


def starts_portal(group: str) -> bool:
    """Whether the tests of a group start a whole portal."""
    return group.startswith(PORTALS) and not (group.startswith("tests/hub/") and "::" not in group)


def choose(queue: Sequence[str], own: Iterable[str], others: Iterable[Iterable[str]]) -> str:
    """Return the group that a worker gets next; `own` and `others` are what it and the other workers still have."""
    if any(seconds(group) > BUSY for group in own):
        return queue[-1]
    if sum(any(map(starts_portal, groups)) for groups in others) >= MAX_WITH_PORTALS:
        return next((group for group in queue if not starts_portal(group)), queue[0])
    return queue[0]


def seconds(group: str) -> int:
    """Return the known length of a group, 0 for a short one."""
    return SECONDS.get(group.partition("[")[0], 0)


class LongestFirst(LoadGroupScheduling):
    """Groups stay on one worker; the longest that is left goes to the worker that is free, as `choose` says."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # the order is that of the collection: conftest.py
        super().__init__(config, log)

    def _assign_work_unit(self, node: WorkerController) -> None:
        remaining = {
            worker: [group for group, tests in groups.items() if not all(tests.values())]
            for worker, groups in self.assigned_work.items()
        }
        own = remaining.pop(node, [])
        self.workqueue.move_to_end(choose([*self.workqueue], own, remaining.values()), last=False)
        super()._assign_work_unit(node)


def in_order(items: Sequence[pytest.Item], groups: Sequence[str]) -> list[pytest.Item]:
    """Return the tests with those of the longest groups first; otherwise in their own order."""
    max_length = sorted(range(len(items)), key=lambda at: -seconds(groups[at]))
    return [items[at] for at in max_length]
