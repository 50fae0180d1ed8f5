"""Each line of the table of what a site can set is proven, for one machine and for the chart."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINE, PORTAL, PROXY, BASES = "test_site_settings", "test_site_portal", "test_proxies", "test_databases"
PROVEN = {
    "port": (
        f"hub/{MACHINE}.py::test_a_site_chooses_port_address_and_prefix",
        "kube/test_chart_values.py::test_the_notes_say_how_to_open_the_portal",
    ),
    "path prefix": (
        f"hub/{PORTAL}.py::test_a_portal_below_a_prefix_behind_a_web_server_with_tls",
        "kube/test_chart_hub.py::test_all_parts_know_the_base_address_of_the_hub",
    ),
    "address": (
        f"hub/{MACHINE}.py::test_the_demo_never_opens_itself_to_the_network",
        f"hub/{MACHINE}.py::test_system_mode_opens_itself_with_a_certificate_only",
        "kube/test_chart_rendered.py::test_the_portal_can_work",
    ),
    "TLS in front": (
        f"hub/{PORTAL}.py::test_a_portal_below_a_prefix_behind_a_web_server_with_tls",
        f"hub/{MACHINE}.py::test_a_public_address_of_the_site_is_what_people_read",
        "kube/test_chart_values.py::test_an_ingress_takes_a_wildcard_and_a_secret_with_dots",
    ),
    "subdomains": (
        "hub/test_visited_notebook.py::test_with_subdomains_a_visited_page_gets_nothing",
        "hub/test_subdomains.py::test_one_machine_is_told_of_the_names",
        "hub/test_subdomains.py::test_a_cluster_is_told_of_the_names",
        "kube/test_chart_subdomains.py::test_the_ingress_has_the_wildcard_and_the_service_its_name",
    ),
    "own certificate": (
        f"hub/{PORTAL}.py::test_a_portal_with_a_certificate_of_the_site",
        "kube/test_chart_values.py::test_an_ingress_takes_a_wildcard_and_a_secret_with_dots",
    ),
    "a proxy to the internet": (
        f"hub/{PROXY}.py::test_a_portal_started_behind_a_proxy_works_and_tells_the_proxy_nothing",
        "hub/test_cluster.py::test_the_hub_reaches_its_cluster_without_the_proxy",
    ),
    "internal ports": (
        f"hub/{MACHINE}.py::test_an_inner_port_of_the_site_is_taken",
        f"hub/{MACHINE}.py::test_no_inner_part_listens_for_others",
    ),
    "roles, groups, services, templates, handlers, hooks": (
        f"hub/{MACHINE}.py::test_lists_of_the_site_are_merged",
        f"hub/{MACHINE}.py::test_mappings_of_the_site_are_merged",
        f"hub/{MACHINE}.py::test_hooks_and_plain_traits_of_the_site_stay",
        "hub/test_cluster.py::test_what_the_site_has_appended_stays",
        "kube/test_chart_hub.py::test_services_and_roles_of_the_site_join_those_of_makeway",
    ),
    "an upgrade of the Hub's database": (
        f"hub/{BASES}.py::test_the_hub_upgrades_its_database_as_in_the_chart",
        f"hub/{BASES}.py::test_a_database_of_a_newer_hub_is_refused_in_words",
        "hub/test_cluster.py::test_a_database_of_a_newer_hub_is_refused_on_a_cluster_too",
    ),
    "an upgrade of the service's database": (
        f"hub/{BASES}.py::test_a_portal_upgrades_what_an_earlier_release_left_and_starts",
        "kube/test_chart_installed.py::test_an_upgrade_and_a_rollback_keep_secrets_jobs_and_notebooks",
    ),
    "another authenticator": (
        f"hub/{MACHINE}.py::test_an_authenticator_and_a_spawner_of_the_site_get_what_makeway_needs",
        "kube/test_chart_hub.py::test_oauth_as_the_page_has_it",
    ),
    "another spawner, or a spawn page of your own": (
        f"hub/{MACHINE}.py::test_what_cannot_work_is_refused_in_words",
        "hub/test_cluster.py::test_a_spawner_of_the_site_that_extends_makeways_stays",
        "hub/test_cluster.py::test_what_cannot_work_on_a_cluster_is_refused_in_words",
    ),
    "`internal_ssl`": (
        f"hub/{MACHINE}.py::test_what_cannot_work_is_refused_in_words",
        "hub/test_cluster.py::test_what_cannot_work_on_a_cluster_is_refused_in_words",
    ),
    "a proxy that the portal does not start": (f"hub/{MACHINE}.py::test_what_cannot_work_is_refused_in_words",),
}


def test_each_line_of_the_table_has_tests() -> None:
    page = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8").split("## What a site can set")[1]
    lines = re.findall(r"^\| (?!-)([^|]+?) \|", page, re.MULTILINE)
    assert set(lines) == set(PROVEN)
    for tests in PROVEN.values():
        for one in tests:
            file, name = one.split("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), one
