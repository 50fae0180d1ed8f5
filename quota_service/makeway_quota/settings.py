"""Declare every setting of the service, and read them from the environment or a file as plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from makeway_api.settings import absolute_path, group, path_or_none, read_settings, setting

from .backends.choice import backend_names, checked_names
from .backends.kubernetes.settings import KubernetesSettings
from .backends.machines.settings import MachineSettings


def _megabytes(number: int) -> int:
    return number * 1_000_000


def _kibibytes(number: int) -> int:
    return number * 1024


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The service's settings as plain values; durations are seconds, sizes bytes.

    A setting is given by a file (`c.QuotaService.… = …`) or by the environment, which wins.
    """

    # What the Hub, or the chart in its place, tells a service at its start
    host: str
    port: int
    prefix: str
    public_url: str
    hub_api_url: str
    api_token: str
    hub_base_url: str
    hub_origin: str
    ticket_secret: str
    metrics_token: str
    # The settings
    state_dir: Path = setting(
        "var",
        "Directory of the database, the jobs and the secrets.",
        convert=absolute_path,
        scope="chart",
    )
    db_url: str = setting(
        "",
        "Database, an SQLAlchemy URL; empty means SQLite in the state directory.",
        convert=str.strip,
        scope="chart",
    )
    policy_file: Path | None = setting(
        "",
        "The policy document that an empty database is seeded with.",
        convert=path_or_none,
        scope="chart",
    )
    deployment_file: Path | None = setting(
        "",
        "The document of a deployment of machines that an empty database is seeded with, beside the policy.",
        convert=path_or_none,
        scope="chart",
    )
    credentials_key_file: Path | None = setting(
        "",
        "File with the keys that seal credentials of jobs, one Fernet key in a line: the first one seals, all of them "
        "open. Empty: credentials.key in the state directory, made when it is needed; replicas need a file that they "
        "all have.",
        convert=path_or_none,
    )
    mode: str = setting(
        "demo",
        "demo: jobs run as the user of the service; system: under the Unix account of their owner, which needs root.",
        choices=("demo", "system"),
        scope="machine",
    )
    keep: bool = setting(
        False,
        "Leave jobs running when the service stops.",
        scope="chart",
    )
    backend: str = setting(
        "local",
        "Where jobs run: local, as processes of this machine; kubernetes, as pods of a cluster; machines, on those "
        "of deployments that have joined; or several of them, separated by commas: notebooks then start on the nodes "
        "of the first one, which is not machines.",
        convert=checked_names,
        scope="chart",
    )
    virtual_gpus: int = setting(
        10,
        "Virtual GPUs in all, where the machine has no real one.",
        min=0,
        max=100000,
        scope="machine",
    )
    virtual_nodes: int = setting(
        1,
        "Virtual nodes that share the virtual GPUs evenly.",
        min=1,
        max=10000,
        scope="machine",
    )
    lease_seconds: float = setting(
        15.0,
        "A session's lease ends this long after its last renewal.",
        min=3.0,
        max=3600.0,
    )
    leader_seconds: float = setting(
        6.0,
        "With several replicas on one PostgreSQL: a leader that could not renew its lock for this long stops "
        "acting, and another replica takes over; the same on all replicas.",
        min=2.0,
        max=300.0,
    )
    tick_seconds: float = setting(
        5.0,
        "The control loop runs a cycle at least this often.",
        min=0.05,
        max=60.0,
    )
    artifacts_dir: Path | None = setting(
        "",
        "Folder of the large files of submissions, shared by all replicas; empty: `artifacts` beside an "
        "SQLite database; with PostgreSQL, the database.",
        convert=path_or_none,
        scope="chart",
    )
    artifacts_s3: str = setting(
        "",
        "Bucket of the large files of submissions in S3 or compatible object storage, instead of a folder: "
        "s3://bucket/prefix; region, endpoint and credentials by the AWS_… variables.",
        scope="chart",
    )
    large_file_bytes: int = setting(
        256,
        "Size from which on a file of a submission is large, in KiB.",
        name="large_file_kb",
        min=1,
        convert=_kibibytes,
    )
    max_files_bytes: int = setting(
        50,
        "Size limit of the files of one submission, in MB.",
        name="max_files_mb",
        min=1,
        max=1000,
        convert=_megabytes,
    )
    max_result_bytes: int = setting(
        500,
        "Largest result that is sent to a notebook, in MB; 0: any size.",
        name="max_result_mb",
        min=0,
        convert=_megabytes,
    )
    max_pending_jobs: int = setting(
        5_000,
        "Pending jobs of one person; 0: no limit.",
        min=0,
    )
    max_submissions_per_minute: int = setting(
        600,
        "Jobs that one person may submit in a minute, clones counted one by one; 0: no limit.",
        min=0,
    )
    max_streams: int = setting(
        20,
        "Event streams that one person may have open; 0: no limit.",
        min=0,
    )
    max_log_followers: int = setting(
        20,
        "Logs that one person may follow at the same time; 0: no limit.",
        min=0,
    )
    max_failures_lost: int = setting(
        3,
        "How often a job is started again whose process vanished, was stopped by others, or used more of a "
        "node that ran short than its pod requested; losses with their node do not count.",
        min=0,
        max=100,
    )
    keep_workloads_days: float = setting(
        90.0,
        "Days that a workload is kept after its end, with its source, files, log, result and checkpoints; 0 for ever.",
        min=0.0,
    )
    keep_decisions_days: float = setting(
        90.0,
        "Days that the decision log is kept; 0 for ever.",
        min=0.0,
    )
    keep_events_days: float = setting(
        7.0,
        "Days that events of the live stream are kept for readers that come back; 0: only their number counts.",
        min=0.0,
    )
    keep_events: int = setting(
        500_000,
        "Events of the live stream that are kept at most.",
        min=1000,
    )
    keep_decisions: int = setting(
        2_000_000,
        "Lines of the decision log that are kept at most.",
        min=1000,
    )
    keep_keys_hours: float = setting(
        24.0,
        "Hours that an Idempotency-Key is kept; within them a repeated submission submits nothing a second time.",
        min=0.1,
        max=8760.0,
    )
    max_kept_person_bytes: int = setting(
        10_000,
        "Files, results, logs and jobs that are kept for one person, in MB; beyond it submissions and results"
        " are refused; 0: no limit.",
        name="max_kept_person_mb",
        min=0,
        convert=_megabytes,
    )
    max_kept_team_bytes: int = setting(
        50_000,
        "The same for the jobs of one team; 0: no limit.",
        name="max_kept_team_mb",
        min=0,
        convert=_megabytes,
    )
    max_kept_bytes: int = setting(
        200_000,
        "The same for all jobs together: set it below the size of the database's volume where that is not a "
        "disk of the service; 0: no limit.",
        name="max_kept_mb",
        min=0,
        convert=_megabytes,
    )
    max_kept_share_percent: int = setting(
        50,
        "Part of the quota of a team that one of its members may keep, in percent, so that one does not use "
        "it up for the others; 100: all of it.",
        min=1,
        max=100,
    )
    free_reserve_bytes: int = setting(
        512,
        "Free space on the disks of the service, in MB, below which submissions, results and long logs are "
        "refused; at most a tenth of the disk. What ends, cancels and deletes may use it.",
        name="free_reserve_mb",
        min=0,
        convert=_megabytes,
    )
    start_deadline_seconds: float = setting(
        120.0,
        "An attempt that was ordered to start and does not appear within this time is lost.",
        min=5.0,
        max=86400.0,
    )
    kubernetes: KubernetesSettings = group(KubernetesSettings, "kube_")
    machines: MachineSettings = group(MachineSettings, "machine_")

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends."""
        return backend_names(self.backend)

    @property
    def jobs_dir(self) -> Path:
        """Where jobs, their logs and their checkpoints live."""
        return self.state_dir / "jobs"

    @property
    def max_kept_share_bytes(self) -> int:
        """Of the bytes of a team, those that one of its members may keep."""
        return self.max_kept_team_bytes * self.max_kept_share_percent // 100


def load(config_file: str | None = None, environ: Mapping[str, str] | None = None) -> ServiceSettings:
    """Read the settings; ValueError names the setting that is wrong and what it accepts."""
    env = os.environ if environ is None else environ
    values = read_settings(ServiceSettings, env, file=config_file, name="QuotaService")
    result = ServiceSettings(**values, **_from_the_hub(env))
    pods = result.kubernetes
    return replace(
        result,
        db_url=result.db_url or f"sqlite:///{result.state_dir / 'makeway.sqlite'}",
        kubernetes=replace(
            pods, worker_url=pods.worker_url or result.public_url, image=pods.image or pods.launcher_image
        ),
        machines=replace(result.machines, url=result.machines.url or result.public_url),
    )


def _from_the_hub(env: Mapping[str, str]) -> dict[str, Any]:
    url = urlparse(env.get("JUPYTERHUB_SERVICE_URL", "") or "http://127.0.0.1:8765")
    prefix = env.get("JUPYTERHUB_SERVICE_PREFIX", "/services/makeway/")
    host, port = url.hostname or "127.0.0.1", url.port or 8765
    return {
        "host": host,
        "port": port,
        "prefix": "/" + prefix.strip("/") + "/",
        "public_url": env.get("MAKEWAY_URL", f"http://{netloc(host, port)}{prefix.rstrip('/')}"),
        "hub_api_url": env.get("JUPYTERHUB_API_URL", ""),
        "api_token": env.get("JUPYTERHUB_API_TOKEN", ""),
        "hub_base_url": env.get("JUPYTERHUB_BASE_URL", "/"),
        "hub_origin": _hub_origin(env),
        "ticket_secret": env.get("MAKEWAY_TICKET_SECRET", ""),
        "metrics_token": env.get("MAKEWAY_METRICS_TOKEN", ""),
    }


def netloc(host: str, port: int) -> str:
    """Return host and port as a URL has them: an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hub_origin(env: Mapping[str, str]) -> str:
    """Return the Hub's origin for browsers where it is another one than the service's, else an empty string."""
    hub = env.get("JUPYTERHUB_HOST", "").rstrip("/")
    login = urlparse(env.get("JUPYTERHUB_OAUTH_CALLBACK_URL", ""))
    return hub if login.netloc and hub and f"{login.scheme}://{login.netloc}" != hub else ""
