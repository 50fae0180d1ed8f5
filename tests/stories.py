"""What the stories on one machine and on Kubernetes have in common: the same training, its proof, and pictures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from browser import WIDTH, Person
from playwright.sync_api import FloatRect, Locator

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "docs" / "examples" / "train.py"
STEPS = 600


def training_cell(name: str, hurry: str) -> str:
    """Return a cell that submits `train.py`; a step takes a second until the file `hurry`, an expression, is there."""
    steps = ["--steps", str(STEPS), "--seconds", "1", "--every", str(STEPS)]
    return f"""%%train --name {name} --profile gpu1 --files train.py
import os, pathlib, runpy, sys, time
pause, hurry = time.sleep, {hurry}
time.sleep = lambda seconds: pause(0.02 if hurry.exists() else seconds)
sys.argv = ["train.py", *{steps!r}]
runpy.run_path("train.py", run_name="__main__")
"""


def uninterrupted(folder: Path) -> str:
    """Return the weights of the same training without a preemption."""
    command = [sys.executable, str(TRAIN), "--steps", str(STEPS), "--seconds", "0", "--every", str(STEPS)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKEWAY_")}
    out = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
    return weights(out)


def weights(log: str) -> str:
    """Return the digest of the weights that a training printed at its end."""
    result = re.search(r"^weights (\w+)$", log, re.MULTILINE)
    assert result, log
    return result[1]


def sees(gpus: int) -> str:
    """Return a cell that prints the devices of its notebook, and fails if they are not so many."""
    return f"""import os
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
assert len(gpus) == {gpus}
print("{gpus} GPU{"s" * (gpus > 1)}", gpus)"""


def take(
    pictures: Path | None,
    person: Person,
    name: str,
    *,
    theme: bool = False,
    height: int = 0,
    only: Locator | None = None,
) -> None:
    """Take a light and a dark picture for the documentation.

    `height`: of the upper part that has something on it; `only`: what alone is in the picture.
    """
    if pictures is None:
        return
    pictures.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        person.page.emulate_media(color_scheme=scheme)
        if theme:
            person.theme(f"JupyterLab {scheme.capitalize()}")
        person.page.wait_for_timeout(700)
        clip: FloatRect | None = {"x": 0, "y": 0, "width": WIDTH, "height": height} if height else None
        if only is not None:
            clip = in_sight(person, only)
        person.page.screenshot(path=pictures / f"{name}-{scheme}.png", clip=clip)
    person.page.emulate_media(color_scheme="light")


def in_sight(person: Person, part: Locator) -> FloatRect:
    """Scroll a part of the page to the top; return where all of it stands, once the page has come to rest."""
    deadline, before = time.monotonic() + 60, None
    while True:
        part.evaluate("node => node.scrollIntoView({block: 'start'})")
        person.page.wait_for_timeout(500)
        covered = part.evaluate(
            """node => {
              const box = node.getBoundingClientRect(), inside = (y) =>
                node.contains(document.elementFromPoint(box.left + box.width / 2, y));
              return !inside(box.top + 2) || !inside(box.bottom - 2);
            }"""
        )
        box = part.bounding_box()
        if box is not None and box == before and not covered:
            return box
        assert time.monotonic() < deadline, f"the page does not come to rest with all of {part} in sight: {box}"
        before = box


def reads(person: Person, text: str) -> None:
    """Wait until a page shows a text; lines that came since a list was touched are shown by a click on their number."""
    deadline = time.monotonic() + 60
    while text not in person.page.locator("body").inner_text():
        assert time.monotonic() < deadline, (
            f"the page does not show {text}: {person.page.locator('body').inner_text()[-4000:]}"
        )
        for button in person.page.locator(".mw-new:visible").all():
            button.click()
        time.sleep(0.2)
