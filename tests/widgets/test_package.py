"""`import makeway` loads nothing else, and every exported name exists."""

from __future__ import annotations

import subprocess
import sys

import makeway
import pytest

HEAVY = ("pydantic", "httpx2", "IPython", "ipywidgets", "cloudpickle", "makeway_api", "asyncio")


def loaded(program: str) -> set[str]:
    """Return the modules that a fresh Python has loaded after a program."""
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_it_loads_nothing() -> None:
    assert not loaded("import makeway, makeway.checkpoint") & set(HEAVY)


@pytest.mark.parametrize("name", makeway.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(makeway, name).__doc__
    assert name in dir(makeway)


def test_a_wrong_name_is_reported() -> None:
    with pytest.raises(AttributeError, match="makeway has no 'train'; it has Job, JobError"):
        makeway.train  # noqa: B018


def test_loading_the_extension_leaves_widgets_alone() -> None:
    program = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'makeway')"
    )
    assert "ipywidgets" not in loaded(program)
