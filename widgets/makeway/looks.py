"""The one style of everything Makeway shows in a notebook (looks.css), around each piece of HTML."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path


def dressed(body: str) -> str:
    """A piece of HTML with its style around it, complete by itself in a saved notebook."""
    return f'<div class="makeway">{_style()}{body}</div>'


@lru_cache(maxsize=1)
def _style() -> str:
    text = Path(__file__).with_name("looks.css").read_text(encoding="utf-8")
    text = re.sub(r"/[*].*?[*]/", "", text, flags=re.DOTALL)
    return "<style>" + re.sub(r"\s+", " ", text).strip() + "</style>"
