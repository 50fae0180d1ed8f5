"""Whether code follows the notice is read from what it does, not from the words in it."""

from __future__ import annotations

import pytest
from makeway.checkpoint_use import uses_checkpoint
from makeway.submission import Submission, _saves

USES = (
    "from makeway import checkpoint\nfor step in checkpoint.loop(3): pass",
    "from makeway import checkpoint as c\nif c.requested(): c.stop()",
    "from makeway.checkpoint import loop\nfor step in loop(3): pass",
    "import makeway.checkpoint\nmakeway.checkpoint.requested()",
    "import makeway.checkpoint as c\nc.agreed()",
    "import makeway\nmakeway.checkpoint.loop(3)",
    "from makeway.checkpoint import *\nloop(3)",
    "import importlib\nimportlib.import_module('makeway.checkpoint').requested()",
    "import os\nos.path.exists(os.environ['MAKEWAY_STOP_FILE'])",
    "%time 1\nfrom makeway import checkpoint\nawait thing(checkpoint.requested)",
)
USES_NOT = (
    "",
    "# no checkpoint is saved here",
    "torch.save(model, 'checkpoint.pt')",
    "from torch.utils.checkpoint import checkpoint\ncheckpoint(f, x)",
    "print('from makeway import checkpoint')",
    "def checkpoint(): ...\ncheckpoint()",
    "from .makeway import checkpoint\ncheckpoint.loop(3)",
    "checkpoint = 3\nprint(checkpoint)",
)


@pytest.mark.parametrize("source", USES)
def test_code_that_uses_it_is_found(source: str) -> None:
    assert uses_checkpoint(source) is True


@pytest.mark.parametrize("source", USES_NOT)
def test_the_word_alone_counts_for_nothing(source: str) -> None:
    assert uses_checkpoint(source) is False


@pytest.mark.parametrize("source", ["for", "\0", "(" * 10_000])
def test_what_is_no_python_is_not_known(source: str) -> None:
    assert uses_checkpoint(source) is None


@pytest.mark.parametrize(
    ("submission", "said"),
    [
        (Submission(source=USES[0]), "No checkpoint yet"),
        (Submission(source=USES_NOT[1]), "The cell does not use makeway.checkpoint"),
        (
            Submission(source="train()", variables={"train": 1}),
            "Whether the code saves checkpoints cannot be seen here",
        ),
        (Submission(command=["sh", "-c", "train"]), "Whether the command saves checkpoints cannot be seen here"),
    ],
)
def test_the_risk_of_running_over_quota_says_what_is_known(submission: Submission, said: str) -> None:
    assert _saves(submission, "j-1").startswith(said)


def test_a_script_that_is_sent_along_is_read(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    for name, code in (("plain.py", USES_NOT[2]), ("saves.py", USES[0])):
        with open(name, "w", encoding="utf-8") as file:
            file.write(code)
    plain = Submission(command=["python3", "-u", "plain.py"], files=["plain.py"])
    assert _saves(plain, "j-1").startswith("plain.py does not use makeway.checkpoint")
    assert _saves(Submission(command=["python3", "saves.py"], files=["saves.py"]), "j-1").startswith("No checkpoint")
    other = Submission(command=["torchrun", "other.py"], files=["plain.py"])
    assert _saves(other, "j-1").startswith("Whether the command")
