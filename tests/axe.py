"""Check a page with axe-core, as a user of a screen reader would meet it."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

AXE = Path(__file__).parent.parent / "node_modules" / "axe-core" / "axe.min.js"


def violations(page: Page) -> list[str]:
    """Return what axe-core finds on a page: the rule, its help, and the elements that break it."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    result = page.evaluate("() => axe.run(document)")
    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:120]}: {node['failureSummary']}"
        for rule in result["violations"]
        for node in rule["nodes"]
    ]
