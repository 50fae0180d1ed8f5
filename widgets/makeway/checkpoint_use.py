"""Find out from code whether it follows the notice of a preemption; used before a submission and after a test of it.

Code is parsed, never run: a comment, a string or a variable that has the word `checkpoint` in it counts for nothing.
"""

from __future__ import annotations

import ast
import re

MODULE = "makeway.checkpoint"
STOP_FILE = "MAKEWAY_STOP_FILE"
MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def uses_checkpoint(source: str) -> bool | None:
    """Whether Python code imports `makeway.checkpoint`, or uses the stop file; None where it cannot be parsed."""
    try:
        tree = compile(MAGIC.sub(r"\1pass", source), "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return any(_is_use(node) for node in ast.walk(tree))


def _is_use(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = {alias.name for alias in node.names}
        return node.module == MODULE or (node.module == "makeway" and "checkpoint" in names)
    if isinstance(node, ast.Import):
        return any(alias.name == MODULE for alias in node.names)
    if isinstance(node, ast.Attribute):
        return node.attr == "checkpoint" and isinstance(node.value, ast.Name) and node.value.id == "makeway"
    return isinstance(node, ast.Constant) and node.value in (MODULE, STOP_FILE)
