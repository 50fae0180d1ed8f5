"""Wrap each piece of HTML that Makeway shows in a notebook in its style sheet (looks.css)."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from markupsafe import Markup


def styled(*body: Markup) -> Markup:
    """Return HTML with its style sheet, complete by itself in a saved notebook."""
    return Markup('<div class="makeway">{}{}</div>').format(_style(), Markup("").join(body))


@lru_cache(maxsize=1)
def _style() -> Markup:
    text = Path(__file__).with_name("looks.css").read_text(encoding="utf-8")
    text = re.sub(r"/[*].*?[*]/", "", text, flags=re.DOTALL)
    return Markup("<style>{}</style>").format(Markup(re.sub(r"\s+", " ", text).strip()))
