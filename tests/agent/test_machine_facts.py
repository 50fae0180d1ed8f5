"""What a machine has, as the agent counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from makeway.agent.facts import count_facts


def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make a program stand for nvidia-smi."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("script", "gpus", "model"),
    [
        ("printf 'NVIDIA H200\\nNVIDIA H200\\n'", 2, "NVIDIA H200"),
        ("printf 'NVIDIA H200\\n\\nNVIDIA A100\\n'", 2, "NVIDIA A100 + NVIDIA H200"),
        ("printf 'NVIDIA H200\\nUnable to determine the device handle for GPU1: Unknown Error\\n'", 1, "NVIDIA H200"),
        ("echo 'No devices were found'; exit 6", 0, ""),
        ("echo NVIDIA; exit 9", 0, ""),
        ("true", 0, ""),
        ("printf '\\377\\n'", 1, "\ufffd"),
    ],
)
def test_gpus_are_those_that_the_driver_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: int, model: str
) -> None:
    driver(tmp_path, monkeypatch, script)
    facts = count_facts(None)
    assert (facts.gpus, facts.model, facts.virtual) == (gpus, model, False)


def test_a_driver_that_hangs_shows_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from makeway.agent import facts

    driver(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(facts, "QUERY_SECONDS", 0.1)
    assert count_facts(None).gpus == 0


def test_a_machine_without_a_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_facts(None).gpus == 0


def test_virtual_gpus_are_marked_and_no_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "printf 'NVIDIA H200\\n'")
    facts = count_facts(3)
    assert (facts.gpus, facts.model, facts.virtual) == (3, "virtual GPU", True)
    assert facts.cpu >= 1000
    assert facts.memory > 0
