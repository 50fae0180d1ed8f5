"""Define the filters of the lists: the query parameters that their pages accept."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MAX_PAGES = 1_000_000

Text = Annotated[str, Query(max_length=200)]
"""A name to filter by; empty does not filter."""
Page = Annotated[int, Query(ge=1, le=MAX_PAGES, alias="page")]
"""The page of a list, from 1 on."""
