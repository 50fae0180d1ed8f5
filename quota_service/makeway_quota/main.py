"""`makeway-quota`: serve, doctor, plan, simulate, snapshot, nodes, policy and upgrade-db, for operators."""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from . import __version__
from .backends.choice import make_backend
from .settings import ServiceSettings, load, netloc

log = logging.getLogger("makeway.main")

TROUBLE = "trouble.txt"
"""The file in the state directory that holds the error of a service that could not start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error of the user is one line on standard error and status 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=getattr(logging, args.log_level.upper()),
        format="[%(levelname).1s %(asctime)s %(name)s] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"makeway-quota: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if type(error).__module__.startswith("makeway_quota"):
            print(f"makeway-quota: {error}", file=sys.stderr)
            return 2
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="makeway-quota", description=__doc__)
    parser.add_argument("--version", action="version", version=f"makeway-quota {__version__}")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the quota service")
    serve.add_argument("--config", help="a Python file of settings (c.QuotaService.… = …)")
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser("doctor", help="find what will not work on this cluster or machine, worst first")
    doctor.add_argument("--config", help="a Python file of settings of the service")
    doctor.add_argument("--format", choices=["text", "json"], default="text")
    doctor.add_argument(
        "--hub",
        action="store_true",
        help="on a cluster, check the rights and pods of the Hub's account, not the service's",
    )
    doctor.set_defaults(run=_doctor)

    plan = commands.add_parser("plan", help="show what the engine decides for a snapshot file")
    plan.add_argument("file", help="JSON or YAML, version 1 (docs/reference/snapshot.md); - reads standard input")
    plan.add_argument("--format", choices=["table", "json"], default="table")
    engines = "fast: as the service runs it; reference: the same rules in plain code, without a cache, slow"
    plan.add_argument("--engine", choices=["fast", "reference"], default="fast", help=engines)
    plan.set_defaults(run=_plan)

    snapshot = commands.add_parser(
        "snapshot", help="write nodes, policies and workloads as they are now to a snapshot file, for `plan`"
    )
    snapshot.add_argument("--config", help="a Python file of settings")
    snapshot.add_argument("--format", choices=["yaml", "json"], default="yaml")
    snapshot.set_defaults(run=_snapshot)

    _add_nodes(commands)
    _add_simulate(commands)

    policy = commands.add_parser("policy", help="work on policy documents without a running service")
    actions = policy.add_subparsers(required=True, metavar="ACTION")
    validate = actions.add_parser("validate", help="check a document; mistakes are listed with their lines")
    validate.add_argument("file")
    validate.set_defaults(run=_policy_validate)

    upgrade = commands.add_parser("upgrade-db", help="bring the database's tables up to date")
    upgrade.add_argument("--config", help="a Python file of settings")
    upgrade.set_defaults(run=_upgrade)
    return parser


def _add_nodes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    nodes = commands.add_parser("nodes", help="list the nodes of a Kubernetes cluster as the service sees them")
    nodes.add_argument("--config", help="a Python file of settings of the service")
    nodes.add_argument(
        "--kubeconfig",
        type=Path,
        help="a kubeconfig file (default: that of the settings, else KUBECONFIG, else this pod's service account)",
    )
    nodes.add_argument(
        "--context", default="", help="context of the kubeconfig (default: that of the settings, else its current one)"
    )
    nodes.add_argument(
        "--policy",
        metavar="FILE",
        help="a policy document with pools, - reads standard input; without it, all are in one pool",
    )
    nodes.add_argument(
        "--resource",
        default="nvidia.com/gpu",
        help="the GPUs' extended resource, without --policy (default: nvidia.com/gpu)",
    )
    nodes.add_argument(
        "--tolerate",
        action="append",
        default=[],
        metavar="TAINT",
        help="a taint that jobs tolerate besides those of the settings (MAKEWAY_KUBE_TOLERATIONS): key, key=value, "
        "key:effect or key=value:effect; may be repeated",
    )
    nodes.set_defaults(run=_nodes)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser("simulate", help="play a recorded workload against policies")
    simulate.add_argument("--policy", action="append", required=True, metavar="FILE", help="may be repeated")
    simulate.add_argument(
        "--deployment",
        action="append",
        default=[],
        metavar="FILE",
        help="a deployment: its machines grow autoscaled pools, and are reported with their cost; may be repeated",
    )
    simulate.add_argument(
        "--boot", type=float, default=180.0, metavar="SECONDS", help="from a machine's launch until it is ready (180)"
    )
    columns = "submit_s, team, num_gpu, duration_s"
    simulate.add_argument("--trace", required=True, metavar="FILE", help=f"a CSV table (.gz too): {columns}")
    simulate.add_argument("--gpus", type=int, help="GPUs of the cluster (default: all reservations together)")
    simulate.add_argument("--node-gpus", type=int, default=8, help="GPUs of each node (8)")
    simulate.add_argument("--restart", type=float, default=60.0, help="seconds to load a checkpoint again (60)")
    baselines = ["static", "fifo", "backfill", "borrow"]
    simulate.add_argument("--compare", action="append", default=[], choices=baselines, help="also this baseline")
    simulate.add_argument("--json", metavar="FILE", help="also write the numbers")
    simulate.add_argument("--html", metavar="FILE", help="also write one page with pictures")
    simulate.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    from .simulate.command import interactive, simulate_command

    return simulate_command(
        args.policy,
        args.trace,
        sys.stdout,
        deployments=args.deployment,
        boot=args.boot,
        gpus=args.gpus,
        node_gpus=args.node_gpus,
        restart=args.restart,
        compare=args.compare,
        json_file=args.json,
        html_file=args.html,
        progress=interactive(),
    )


def _plan(args: argparse.Namespace) -> int:
    from .snapshot_file import plan_command

    output = io.StringIO()
    status = plan_command("/dev/stdin" if args.file == "-" else args.file, args.format, output, args.engine)
    print(output.getvalue(), end="", file=sys.stderr if status else sys.stdout)
    return status


def _nodes(args: argparse.Namespace) -> int:
    from .backends.kubernetes.cluster.nodes import toleration
    from .backends.kubernetes.cluster.nodes_table import nodes_command
    from .policy import read_policy

    document = None
    if args.policy:
        text = sys.stdin.read() if args.policy == "-" else Path(args.policy).read_text(encoding="utf-8")
        document = read_policy(text, args.policy)
    settings = load(args.config).kubernetes
    tolerations = [toleration(text) for text in (*settings.tolerations, *args.tolerate)]
    kubeconfig, context = args.kubeconfig or settings.kubeconfig, args.context or settings.context
    print(nodes_command(document, args.resource, kubeconfig, context, tolerations))
    return 0


def _policy_validate(args: argparse.Namespace) -> int:
    from makeway_api.quantities import count

    from .policy import PolicyInvalid, policy_warnings, read_policy

    try:
        text = Path(args.file).read_text(encoding="utf-8")
        document = read_policy(text, args.file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{args.file} cannot be read: {why}.") from None
    except PolicyInvalid as invalid:
        for issue in invalid.issues:
            print(f"{issue.file}:{issue.line or 1}: {issue.where}: {issue.message}", file=sys.stderr)
        return 2
    for issue in policy_warnings(text, args.file):
        print(f"{issue.file}:{issue.line or 1}: {issue.where}: warning: {issue.message}", file=sys.stderr)
    print(
        f"{args.file} is valid: {count(len(document.pools), 'pool')}, {count(len(document.profiles), 'profile')}, "
        f"{count(len(document.policies), 'policy', 'policies')}."
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor.command import doctor_command

    return doctor_command(load(args.config), args.format, hub=args.hub)


def _upgrade(args: argparse.Namespace) -> int:
    from .application import open_service_store

    settings = load(args.config)
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    open_service_store(settings).close()
    print("The database is up to date.")
    return 0


def _snapshot(args: argparse.Namespace) -> int:
    from .snapshot_file import write_snapshot

    async def dump() -> str:
        from .application import open_service_store, read_world

        settings = load(args.config)
        store = open_service_store(settings)
        now = time.time()
        world = await read_world(settings, store, make_backend(settings), now)
        text = write_snapshot(world.snapshot(await world.rows(), now), args.format)
        store.close()
        return text

    print(asyncio.run(dump()), end="")
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Serve; an error at the start is also written to the state directory, where `make run` finds it."""
    trouble = Path(os.environ.get("MAKEWAY_STATE_DIR") or "var") / TROUBLE
    # Also while it starts: the first process of a container would not end otherwise, and lead once its successor does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from .web.server.http_server import run

        settings = load(args.config)
        trouble = settings.state_dir / TROUBLE
        return run(serve(settings, ready=lambda: trouble.unlink(missing_ok=True)))
    except Exception as error:
        with suppress(OSError):
            trouble.write_text(f"{error}\n" if str(error) else f"{type(error).__name__}\n", encoding="utf-8")
        raise


async def serve(settings: ServiceSettings, ready: Callable[[], object] = lambda: None) -> int:
    """Serve until a signal, or until the Hub that started this process is gone; return the exit status.

    `ready` is called once the service leads or follows and is about to listen.
    """
    from makeway_api.open_files import raise_limit

    from .application import Application
    from .control.hub.client import HubApi
    from .web.app import create_app
    from .web.server.http_server import server_config
    from .web.server.listeners import listeners
    from .web.settings import WebSettings

    raise_limit()
    hub = HubApi(settings.hub_api_url, settings.api_token) if settings.hub_api_url else None
    service = await Application.open(settings, make_backend(settings), hub)
    app = create_app(service.services, WebSettings.of(settings))
    server_settings = server_config(app, host=settings.host, port=settings.port, timeout_graceful_shutdown=2)
    server = _Server(server_settings, app.state.streams.close)
    await service.start()
    ready()
    log.info("Serving at http://%s%s", netloc(settings.host, settings.port), settings.prefix)
    try:
        await server.run_until_signal(listeners(settings.host, settings.port))
    finally:
        stop_jobs = not (settings.keep or server.orphaned or service.components.backend.shared)
        await service.stop(stop_jobs=stop_jobs)
    return 0


def _hub() -> int | None:
    """Return the pid of the process that started this one, None without a Hub.

    The Hub names itself in the environment, because it may be gone before this process looks.
    """
    pid = os.environ.get("MAKEWAY_HUB_PID", "")
    if pid.isdecimal():
        return int(pid)
    return os.getppid() if os.environ.get("JUPYTERHUB_SERVICE_NAME") else None


class _Server(uvicorn.Server):
    """Uvicorn that ends on SIGTERM, SIGINT, or with the Hub that started it."""

    def __init__(self, settings: uvicorn.Config, close_streams: Callable[[], None]) -> None:
        super().__init__(settings)
        self.orphaned = False
        self._close_streams = close_streams
        self._parent = _hub()

    async def run_until_signal(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these sockets, else on those of the settings; return when every request in flight was answered."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        watcher = asyncio.create_task(self._watch_parent())
        try:
            await self._serve(sockets)
        finally:
            watcher.cancel()

    def _end(self) -> None:
        self._close_streams()
        self.should_exit = True

    async def _watch_parent(self) -> None:
        """Stop once the Hub is gone: else this process would keep its port, with a token that is no longer valid."""
        while self._parent is not None:
            await asyncio.sleep(0.5)
            if os.getppid() != self._parent:
                log.warning("The Hub that started this service has ended: the service stops too, running jobs continue")
                self.orphaned = True
                self._end()
                return


if __name__ == "__main__":
    sys.exit(main())
