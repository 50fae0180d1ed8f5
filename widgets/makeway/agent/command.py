"""Start the agent as its command line says: unpack it, be the agent, or a process of its own."""

from __future__ import annotations

import os
import time

from ..launcher.outage import write_line
from .light_imports import import_http_client, import_lazily
from .programs import archive, go_on_unpacked, unpack

NOT_NEEDED = 0
FAILED = 1
USAGE_ERROR = 2
IN_USE = 3


def main(words: list[str]) -> int:
    """Run the agent; return 0 if the machine is not needed any more, and another code to be started again."""
    if words[:1] == ["--run-init"] and len(words) == 2:
        from .init_script import run_init

        return run_init(words[1])
    if words[:1] == ["--start-worker"] and len(words) == 2:
        from .starter import start_worker

        return start_worker(words[1])
    if words[:1] in (["--remove-container"], ["--remove-forgotten"]) and len(words) == 2:
        from . import containers

        work = containers.remove_container if words[0] == "--remove-container" else containers.remove_forgotten
        return work(words[1])
    import_lazily("ipaddress", "locale")  # of `urllib.parse`, and of `subprocess`
    from .options import WrongOptions, complain, read_options

    try:
        options = read_options(words)
    except WrongOptions as error:
        complain(str(error))
        return USAGE_ERROR
    os.umask(0o077)
    if packed := archive():
        while True:
            try:
                folder = unpack(packed, os.path.join(options.state, "programs"))
            except OSError as error:  # such as a full disk: a machine that ends for it does not get better
                log(f"cannot unpack into {options.state}: {error}")
                time.sleep(10.0)
                continue
            go_on_unpacked(folder, words)
    import_http_client(tls=options.url.lower().startswith("https:"))
    from .machine_agent import MachineAgent
    from .machine_folder import FolderInUse, MachineFolder, MachineInUse, lock_folders, lock_machine

    try:
        state = MachineFolder(options.state, options.machine)
        if lock_machine(options.machine, options.url) is None:  # it is held until the process ends
            log(f"no lock can be had in {' or '.join(lock_folders())}: a second agent of this machine is not noticed")
    except (FolderInUse, MachineInUse) as error:
        log(str(error))
        return IN_USE
    except OSError as error:
        log(f"{options.state} cannot be used: {error}")
        return FAILED
    return MachineAgent(options, state, log=log).run()


def log(sentence: str) -> None:
    """Write a line for people who read the console of the machine; left out where that would have to wait."""
    write_line(f"agent: {sentence}")
