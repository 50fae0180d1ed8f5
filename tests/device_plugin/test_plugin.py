"""The plugin registers with every kubelet that comes, reports health and answers allocations."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubelet_fake import Kubelet
from makeway_device_plugin import plugin as plugin_module
from makeway_device_plugin.__main__ import main, parser
from makeway_device_plugin.messages import HEALTHY, UNHEALTHY, Device
from makeway_device_plugin.plugin import Devices, Plugin


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a path that is short enough for sockets."""
    monkeypatch.setattr(plugin_module, "POLL_SECONDS", 0.02)
    with tempfile.TemporaryDirectory(prefix="mw-") as path:
        yield Path(path)


@pytest.fixture
def unhealthy(folder: Path) -> Path:
    return folder / "unhealthy"


@pytest.fixture
def plugin(folder: Path, unhealthy: Path) -> Iterator[Plugin]:
    """Run a plugin with three devices."""
    stop = threading.Event()
    made = Plugin(folder, "nvidia.com/gpu", Devices(3, unhealthy))
    thread = threading.Thread(target=made.run, args=[stop])
    thread.start()
    yield made
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not (folder / "nvidia.com-gpu.sock").exists(), "its socket goes with it"


def device(index: int, health: str = HEALTHY) -> Device:
    return Device(f"virtual-gpu-{index:04d}", health)


@pytest.mark.usefixtures("plugin")
def test_it_waits_for_the_kubelet_and_lists_its_devices(folder: Path) -> None:
    kubelet = Kubelet(folder)
    assert kubelet.wait_for(1).devices == [device(0), device(1), device(2)]
    (registration,) = kubelet.registrations
    assert (registration.version, registration.resource_name) == ("v1beta1", "nvidia.com/gpu")
    assert not kubelet.options().pre_start_required
    kubelet.stop()


@pytest.mark.usefixtures("plugin")
def test_a_container_learns_the_indices_of_its_devices(folder: Path) -> None:
    kubelet = Kubelet(folder)
    kubelet.wait_for(1)
    first, second = kubelet.allocate(["virtual-gpu-0002", "virtual-gpu-0000"], ["virtual-gpu-0001"]).containers
    assert first.envs == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "MAKEWAY_VIRTUAL_GPUS": "1",
    }
    assert second.envs["CUDA_VISIBLE_DEVICES"] == "1"
    kubelet.stop()


@pytest.mark.usefixtures("plugin")
def test_the_lowest_free_devices_are_preferred(folder: Path) -> None:
    kubelet = Kubelet(folder)
    kubelet.wait_for(1)
    free = [device(index).id for index in (2, 0, 1)]
    assert kubelet.options().get_preferred_allocation_available
    assert kubelet.prefer(free, size=2) == ["virtual-gpu-0000", "virtual-gpu-0001"]
    assert kubelet.prefer(free, must_include=["virtual-gpu-0002"], size=2) == ["virtual-gpu-0002", "virtual-gpu-0000"]
    kubelet.stop()


@pytest.mark.usefixtures("plugin")
def test_it_registers_with_a_new_kubelet(folder: Path) -> None:
    first = Kubelet(folder)
    first.wait_for(1)
    first.stop()
    second = Kubelet(folder)
    assert len(second.wait_for(1).devices) == 3
    assert len(second.registrations) == 1
    second.stop()


@pytest.mark.usefixtures("plugin")
def test_it_registers_again_when_its_own_socket_was_removed(folder: Path) -> None:
    kubelet = Kubelet(folder)
    kubelet.wait_for(1)
    (folder / "nvidia.com-gpu.sock").unlink()
    kubelet.wait_for(2)
    assert len(kubelet.registrations) == 2
    kubelet.stop()


@pytest.mark.usefixtures("plugin")
def test_broken_devices_are_reported_and_come_back(folder: Path, unhealthy: Path) -> None:
    kubelet = Kubelet(folder)
    kubelet.wait_for(1)
    unhealthy.write_text("1\nnot a number\n99\n")
    assert kubelet.wait_for(2).devices == [device(0), device(1, UNHEALTHY), device(2)]
    unhealthy.unlink()
    assert kubelet.wait_for(3).devices == [device(0), device(1), device(2)]
    kubelet.stop()


def test_a_file_that_cannot_be_read_changes_no_health(unhealthy: Path, caplog: pytest.LogCaptureFixture) -> None:
    unhealthy.write_text("1\n")
    devices = Devices(2, unhealthy)
    unhealthy.unlink()
    unhealthy.mkdir()
    for _ in range(2):
        devices.refresh()
    assert next(devices.follow(lambda: True)).devices == [device(0), device(1, UNHEALTHY)]
    assert [record.message.partition(" cannot be read")[0] for record in caplog.records] == [str(unhealthy)]
    unhealthy.rmdir()
    unhealthy.write_bytes(b"\xff\n" + b"9" * 5000 + b"\n0\n")
    devices.refresh()
    assert next(devices.follow(lambda: True)).devices == [device(0, UNHEALTHY), device(1)]


def test_a_missing_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['grpc'] = None; from makeway_device_plugin.__main__ import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'makeway[device-plugin]'.\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["--count", "0"], ["--count", "x"], ["--count", "1025"], ["--resource", "gpu"]])
def test_wrong_options_are_refused_in_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert "is no" in capsys.readouterr().err


def test_the_options_have_defaults() -> None:
    result = parser().parse_args([])
    assert (result.count, result.resource, result.unhealthy) == (8, "nvidia.com/gpu", None)


def test_the_command_ends_at_a_signal(folder: Path) -> None:
    command = [sys.executable, "-m", "makeway_device_plugin", "--folder", str(folder), "--count", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert "waiting for the kubelet's socket" in process.stderr.readline()
        kubelet = Kubelet(folder)
        assert len(kubelet.wait_for(1).devices) == 2
        process.terminate()
        assert process.wait(30) == 0
        kubelet.stop()
