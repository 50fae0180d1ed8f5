"""Every setting of the service, with its help text and its environment variable, turned into plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from makeway_api.environment import read_environment
from traitlets import Bool, Enum, Float, Int, Unicode
from traitlets.config import Config, Configurable
from traitlets.config.loader import PyFileConfigLoader

from .backends.kubernetes.cluster.dead_nodes import NODE_LOST_AFTER
from .backends.kubernetes.configured import KubernetesSettings


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The service's settings as plain values; durations are seconds, sizes bytes."""

    state_dir: Path
    db_url: str
    policy_file: Path | None
    mode: str
    keep: bool
    virtual_gpus: int
    virtual_nodes: int
    lease_seconds: float
    leader_seconds: float
    tick_seconds: float
    artifacts_dir: Path | None
    artifacts_s3: str
    large_file_bytes: int
    max_files_bytes: int
    max_result_bytes: int
    max_pending_jobs: int
    max_submissions_per_minute: int
    max_streams: int
    max_log_followers: int
    max_failures_lost: int
    keep_workloads_days: float
    keep_decisions_days: float
    keep_events_days: float
    keep_events: int
    keep_decisions: int
    keep_keys_hours: float
    max_kept_person_bytes: int
    max_kept_team_bytes: int
    max_kept_bytes: int
    max_kept_share_bytes: int
    """Of the bytes of a team, those that one of its members may keep"""
    free_reserve_bytes: int
    start_deadline_seconds: float
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
    backend: str
    kubernetes: KubernetesSettings

    @property
    def jobs_dir(self) -> Path:
        """Where jobs, their logs and their checkpoints live."""
        return self.state_dir / "jobs"


class QuotaService(Configurable):
    """Settings by file (`c.QuotaService.… = …`) or by environment; the environment wins."""

    state_dir = Unicode("var", help="Directory of the database, the jobs and the secrets (MAKEWAY_STATE_DIR).").tag(
        config=True, env="MAKEWAY_STATE_DIR"
    )
    db_url = Unicode(
        "", help="Database, an SQLAlchemy URL; empty means SQLite in the state directory (MAKEWAY_DB_URL)."
    ).tag(config=True, env="MAKEWAY_DB_URL")
    policy_file = Unicode(
        "",
        help="The policy document that an empty database is seeded with (MAKEWAY_POLICY_FILE).",
    ).tag(config=True, env="MAKEWAY_POLICY_FILE")
    mode = Enum(
        ["demo", "system"],
        default_value="demo",
        help="demo: jobs run as the user of the service; system: under the Unix account of their owner, "
        "which needs root (MAKEWAY_MODE).",
    ).tag(config=True, env="MAKEWAY_MODE")
    keep = Bool(False, help="Leave jobs running when the service stops (MAKEWAY_KEEP=1).").tag(
        config=True, env="MAKEWAY_KEEP"
    )
    backend = Enum(
        ["local", "kubernetes"],
        default_value="local",
        help="Where jobs run: as processes of this machine, or as pods of a Kubernetes cluster (MAKEWAY_BACKEND).",
    ).tag(config=True, env="MAKEWAY_BACKEND")
    kubeconfig = Unicode(
        "",
        help="Kubeconfig of the cluster; empty: KUBECONFIG, else the service account of the service's own pod "
        "(MAKEWAY_KUBECONFIG).",
    ).tag(config=True, env="MAKEWAY_KUBECONFIG")
    kube_context = Unicode("", help="Context of the kubeconfig; empty: its current one (MAKEWAY_KUBE_CONTEXT).").tag(
        config=True, env="MAKEWAY_KUBE_CONTEXT"
    )
    kube_namespace = Unicode(
        "",
        help="Namespace of the jobs' pods; empty: that of the kubeconfig's context, or of the service's own pod "
        "(MAKEWAY_KUBE_NAMESPACE).",
    ).tag(config=True, env="MAKEWAY_KUBE_NAMESPACE")
    kube_instance = Unicode(
        "makeway",
        help="Name of this installation, a label of its pods; each installation on a cluster needs its own "
        "(MAKEWAY_KUBE_INSTANCE).",
    ).tag(config=True, env="MAKEWAY_KUBE_INSTANCE")
    worker_url = Unicode(
        "",
        help="The address at which pods reach the service, with its prefix. Not localhost or 0.0.0.0, by which a pod "
        "reaches itself. Empty: MAKEWAY_URL (MAKEWAY_WORKER_URL).",
    ).tag(config=True, env="MAKEWAY_WORKER_URL")
    kube_launcher_image = Unicode(
        "",
        help="Image with Python and Makeway, from which each pod copies its launcher (MAKEWAY_KUBE_LAUNCHER_IMAGE).",
    ).tag(config=True, env="MAKEWAY_KUBE_LAUNCHER_IMAGE")
    kube_image = Unicode(
        "",
        help="Image of jobs whose profile names none; empty: that of the launcher (MAKEWAY_KUBE_IMAGE).",
    ).tag(config=True, env="MAKEWAY_KUBE_IMAGE")
    kube_service_account = Unicode(
        "default", help="Service account of the jobs' pods, which get no token of it (MAKEWAY_KUBE_SERVICE_ACCOUNT)."
    ).tag(config=True, env="MAKEWAY_KUBE_SERVICE_ACCOUNT")
    kube_priority_class = Unicode("", help="Priority class of the jobs' pods (MAKEWAY_KUBE_PRIORITY_CLASS).").tag(
        config=True, env="MAKEWAY_KUBE_PRIORITY_CLASS"
    )
    kube_run_as = Unicode(
        "1000:100",
        help="User and group that jobs run as, not root; `platform`: the platform assigns them, as OpenShift does "
        "(MAKEWAY_KUBE_RUN_AS).",
    ).tag(config=True, env="MAKEWAY_KUBE_RUN_AS")
    kube_cpu_limits = Bool(
        False,
        help="Whether containers of jobs' pods get the CPU that they request as a limit, as a quota on limits.cpu or a "
        "LimitRange with a default limit needs (MAKEWAY_KUBE_CPU_LIMITS).",
    ).tag(config=True, env="MAKEWAY_KUBE_CPU_LIMITS")
    kube_launcher_resources = Unicode(
        "",
        help="Requests and limits of the container that copies the launcher, and of that which removes checkpoints, in "
        'JSON: {"requests": {"cpu": "100m"}}; empty: small ones (MAKEWAY_KUBE_LAUNCHER_RESOURCES).',
    ).tag(config=True, env="MAKEWAY_KUBE_LAUNCHER_RESOURCES")
    kube_pod = Unicode(
        "",
        help="Pod template of all jobs in JSON, with what `pod` of a profile may have; a profile's comes on top "
        "(MAKEWAY_KUBE_POD).",
    ).tag(config=True, env="MAKEWAY_KUBE_POD")
    kube_checkpoint_claim = Unicode(
        "",
        help="PersistentVolumeClaim in which jobs keep checkpoints, with {team} for the team's name; empty: a "
        "checkpoint ends with its pod (MAKEWAY_KUBE_CHECKPOINT_CLAIM).",
    ).tag(config=True, env="MAKEWAY_KUBE_CHECKPOINT_CLAIM")
    kube_home_claim = Unicode(
        "",
        help="PersistentVolumeClaim with the home of a job's owner, in the namespace of the jobs: home-{user}, or a "
        "claim and a folder on it, homes/{user}; {escaped_user} writes the name as KubeSpawner's slug_scheme "
        "'escape'. Empty: jobs have no homes (MAKEWAY_KUBE_HOME_CLAIM).",
    ).tag(config=True, env="MAKEWAY_KUBE_HOME_CLAIM")
    kube_home_path = Unicode(
        "/home/jovyan",
        help="Where the pods of jobs have the home of their owner, as notebooks have it (MAKEWAY_KUBE_HOME_PATH).",
    ).tag(config=True, env="MAKEWAY_KUBE_HOME_PATH")
    kube_tolerations = Unicode(
        "",
        help="Taints that jobs and notebooks tolerate besides those named like their pool's resource, as key, "
        "key=value or key=value:NoSchedule, with commas between (MAKEWAY_KUBE_TOLERATIONS).",
    ).tag(config=True, env="MAKEWAY_KUBE_TOLERATIONS")
    kube_disk_request = Unicode(
        "1Gi",
        help="What the pod of a job requests of its node's disk where its profile has no disk; a job that used more "
        "may be to blame for a full disk (MAKEWAY_KUBE_DISK_REQUEST).",
    ).tag(config=True, env="MAKEWAY_KUBE_DISK_REQUEST")
    kube_disk_limit = Unicode(
        "50Gi",
        help="The most that the pod of a job may write to its node's disk where its profile has no disk, and never "
        "more than half of that disk; empty: no limit (MAKEWAY_KUBE_DISK_LIMIT).",
    ).tag(config=True, env="MAKEWAY_KUBE_DISK_LIMIT")
    virtual_gpus = Int(
        10, min=0, max=100_000, help="Virtual GPUs in all, where the machine has no real one (MAKEWAY_VIRTUAL_GPUS)."
    ).tag(config=True, env="MAKEWAY_VIRTUAL_GPUS")
    virtual_nodes = Int(
        1, min=1, max=10_000, help="Virtual nodes that share the virtual GPUs evenly (MAKEWAY_VIRTUAL_NODES)."
    ).tag(config=True, env="MAKEWAY_VIRTUAL_NODES")
    lease_seconds = Float(
        15.0,
        min=3.0,
        max=3600.0,
        help="A session's lease ends this long after its last renewal (MAKEWAY_LEASE_SECONDS).",
    ).tag(config=True, env="MAKEWAY_LEASE_SECONDS")
    leader_seconds = Float(
        6.0,
        min=2.0,
        max=300.0,
        help="With several replicas on one PostgreSQL: a leader that could not renew its lock for this long stops "
        "acting, and another replica takes over; the same on all replicas (MAKEWAY_LEADER_SECONDS).",
    ).tag(config=True, env="MAKEWAY_LEADER_SECONDS")
    tick_seconds = Float(
        5.0, min=0.05, max=60.0, help="The control loop runs a cycle at least this often (MAKEWAY_TICK_SECONDS)."
    ).tag(config=True, env="MAKEWAY_TICK_SECONDS")
    artifacts_dir = Unicode(
        "",
        help="Folder of the large files of submissions, shared by all replicas; empty: `artifacts` beside an "
        "SQLite database; with PostgreSQL, the database (MAKEWAY_ARTIFACTS_DIR).",
    ).tag(config=True, env="MAKEWAY_ARTIFACTS_DIR")
    artifacts_s3 = Unicode(
        "",
        help="Bucket of the large files of submissions in S3 or compatible object storage, instead of a folder: "
        "s3://bucket/prefix; region, endpoint and credentials by the AWS_… variables (MAKEWAY_ARTIFACTS_S3).",
    ).tag(config=True, env="MAKEWAY_ARTIFACTS_S3")
    large_file_kb = Int(
        256, min=1, help="Size from which on a file of a submission is large, in KiB (MAKEWAY_LARGE_FILE_KB)."
    ).tag(config=True, env="MAKEWAY_LARGE_FILE_KB")
    max_files_mb = Int(
        50, min=1, max=1000, help="Size limit of the files of one submission, in MB (MAKEWAY_MAX_FILES_MB)."
    ).tag(config=True, env="MAKEWAY_MAX_FILES_MB")
    max_result_mb = Int(
        500, min=0, help="Largest result that is sent to a notebook, in MB; 0: any size (MAKEWAY_MAX_RESULT_MB)."
    ).tag(config=True, env="MAKEWAY_MAX_RESULT_MB")
    max_pending_jobs = Int(
        5_000, min=0, help="Pending jobs of one person; 0: no limit (MAKEWAY_MAX_PENDING_JOBS)."
    ).tag(config=True, env="MAKEWAY_MAX_PENDING_JOBS")
    max_submissions_per_minute = Int(
        600,
        min=0,
        help="Jobs that one person may submit in a minute, clones counted one by one; 0: no limit "
        "(MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE).",
    ).tag(config=True, env="MAKEWAY_MAX_SUBMISSIONS_PER_MINUTE")
    max_streams = Int(
        20, min=0, help="Event streams that one person may have open; 0: no limit (MAKEWAY_MAX_STREAMS)."
    ).tag(config=True, env="MAKEWAY_MAX_STREAMS")
    max_log_followers = Int(
        20, min=0, help="Logs that one person may follow at the same time; 0: no limit (MAKEWAY_MAX_LOG_FOLLOWERS)."
    ).tag(config=True, env="MAKEWAY_MAX_LOG_FOLLOWERS")
    max_failures_lost = Int(
        3,
        min=0,
        max=100,
        help="How often a job is started again whose process vanished, was stopped by others, or used more of a node "
        "that ran short than its pod requested; losses with their node do not count (MAKEWAY_MAX_FAILURES_LOST).",
    ).tag(config=True, env="MAKEWAY_MAX_FAILURES_LOST")
    keep_workloads_days = Float(
        90.0,
        min=0.0,
        help="Days that a workload is kept after its end, with its source, files, log, result and checkpoints; "
        "0 for ever (MAKEWAY_KEEP_WORKLOADS_DAYS).",
    ).tag(config=True, env="MAKEWAY_KEEP_WORKLOADS_DAYS")
    keep_decisions_days = Float(
        90.0, min=0.0, help="Days that the decision log is kept; 0 for ever (MAKEWAY_KEEP_DECISIONS_DAYS)."
    ).tag(config=True, env="MAKEWAY_KEEP_DECISIONS_DAYS")
    keep_events_days = Float(
        7.0,
        min=0.0,
        help="Days that events of the live stream are kept for readers that come back; 0: only their number counts "
        "(MAKEWAY_KEEP_EVENTS_DAYS).",
    ).tag(config=True, env="MAKEWAY_KEEP_EVENTS_DAYS")
    keep_events = Int(
        500_000, min=1000, help="Events of the live stream that are kept at most (MAKEWAY_KEEP_EVENTS)."
    ).tag(config=True, env="MAKEWAY_KEEP_EVENTS")
    keep_decisions = Int(
        2_000_000, min=1000, help="Lines of the decision log that are kept at most (MAKEWAY_KEEP_DECISIONS)."
    ).tag(config=True, env="MAKEWAY_KEEP_DECISIONS")
    max_kept_person_mb = Int(
        10_000,
        min=0,
        help="Files, results, logs and jobs that are kept for one person, in MB; beyond it submissions and results are "
        "refused; 0: no limit (MAKEWAY_MAX_KEPT_PERSON_MB).",
    ).tag(config=True, env="MAKEWAY_MAX_KEPT_PERSON_MB")
    max_kept_team_mb = Int(
        50_000, min=0, help="The same for the jobs of one team; 0: no limit (MAKEWAY_MAX_KEPT_TEAM_MB)."
    ).tag(config=True, env="MAKEWAY_MAX_KEPT_TEAM_MB")
    max_kept_mb = Int(
        200_000,
        min=0,
        help="The same for all jobs together: set it below the size of the database's volume where that is not a disk "
        "of the service; 0: no limit (MAKEWAY_MAX_KEPT_MB).",
    ).tag(config=True, env="MAKEWAY_MAX_KEPT_MB")
    max_kept_share_percent = Int(
        50,
        min=1,
        max=100,
        help="Part of the quota of a team that one of its members may keep, in percent, so that one does not use it up "
        "for the others; 100: all of it (MAKEWAY_MAX_KEPT_SHARE_PERCENT).",
    ).tag(config=True, env="MAKEWAY_MAX_KEPT_SHARE_PERCENT")
    free_reserve_mb = Int(
        512,
        min=0,
        help="Free space on the disks of the service, in MB, below which submissions, results and long logs are "
        "refused; at most a tenth of the disk. What ends, cancels and deletes may use it (MAKEWAY_FREE_RESERVE_MB).",
    ).tag(config=True, env="MAKEWAY_FREE_RESERVE_MB")
    keep_keys_hours = Float(
        24.0,
        min=0.1,
        max=8760.0,
        help="Hours that an Idempotency-Key is kept; within them a repeated submission submits nothing "
        "a second time (MAKEWAY_KEEP_KEYS_HOURS).",
    ).tag(config=True, env="MAKEWAY_KEEP_KEYS_HOURS")
    start_deadline_seconds = Float(
        120.0,
        min=5.0,
        max=86_400.0,
        help="An attempt that was ordered to start and does not appear within this time is lost "
        "(MAKEWAY_START_DEADLINE_SECONDS).",
    ).tag(config=True, env="MAKEWAY_START_DEADLINE_SECONDS")
    lost_after_seconds = Float(
        3600.0,
        min=60.0,
        max=43_200.0,
        help="A pod of a job that has not reported to the service for this long is lost; before that, its launcher "
        "has the job save and end. Until then jobs go on without the service, and a job whose node is out of reach "
        "waits for that node, but see MAKEWAY_NODE_LOST_SECONDS (MAKEWAY_LOST_AFTER_SECONDS).",
    ).tag(config=True, env="MAKEWAY_LOST_AFTER_SECONDS")
    node_lost_seconds = Float(
        NODE_LOST_AFTER,
        min=30.0,
        max=43_200.0,
        help="A job starts elsewhere when its node was not ready, and its pod there did not report, for this long, "
        "while other nodes were ready, and not its whole pool or zone went down with it. Choose as much as "
        "MAKEWAY_LOST_AFTER_SECONDS where single nodes may be cut off and still write to the checkpoints "
        "(MAKEWAY_NODE_LOST_SECONDS).",
    ).tag(config=True, env="MAKEWAY_NODE_LOST_SECONDS")


def load(config_file: str | None = None, environ: dict[str, str] | None = None) -> ServiceSettings:
    """Read the settings; ValueError names the setting that is wrong and what it accepts."""
    env = dict(os.environ if environ is None else environ)
    config = Config()
    if config_file:
        config = PyFileConfigLoader(config_file).load_config()
    service = QuotaService(config=config)
    read_environment(service, env)
    return _plain(service, env)


def _kubernetes(service: QuotaService, public_url: str) -> KubernetesSettings:
    return KubernetesSettings(
        kubeconfig=Path(service.kubeconfig).expanduser().absolute() if service.kubeconfig else None,
        context=service.kube_context,
        namespace=service.kube_namespace,
        instance=service.kube_instance,
        worker_url=service.worker_url or public_url,
        launcher_image=service.kube_launcher_image,
        image=service.kube_image or service.kube_launcher_image,
        service_account=service.kube_service_account,
        priority_class=service.kube_priority_class,
        run_as=service.kube_run_as,
        checkpoint_claim=service.kube_checkpoint_claim,
        home_claim=service.kube_home_claim.strip(),
        home_path=service.kube_home_path,
        tolerations=tuple(text.strip() for text in service.kube_tolerations.split(",") if text.strip()),
        lost_after=service.lost_after_seconds,
        node_lost_after=service.node_lost_seconds,
        disk_request=service.kube_disk_request,
        disk_limit=service.kube_disk_limit,
        cpu_limits=service.kube_cpu_limits,
        launcher_resources=service.kube_launcher_resources,
        pod=service.kube_pod,
    )


def _plain(service: QuotaService, env: dict[str, str]) -> ServiceSettings:
    state_dir = Path(service.state_dir).expanduser().absolute()
    url = urlparse(env.get("JUPYTERHUB_SERVICE_URL", "") or "http://127.0.0.1:8765")
    prefix = env.get("JUPYTERHUB_SERVICE_PREFIX", "/services/makeway/")
    host, port = url.hostname or "127.0.0.1", url.port or 8765
    public_url = env.get("MAKEWAY_URL", f"http://{host}:{port}{prefix.rstrip('/')}")
    return ServiceSettings(
        state_dir=state_dir,
        db_url=service.db_url.strip() or f"sqlite:///{state_dir / 'makeway.sqlite'}",
        policy_file=Path(service.policy_file).expanduser().absolute() if service.policy_file else None,
        mode=service.mode,
        keep=service.keep,
        virtual_gpus=service.virtual_gpus,
        virtual_nodes=service.virtual_nodes,
        lease_seconds=service.lease_seconds,
        leader_seconds=service.leader_seconds,
        tick_seconds=service.tick_seconds,
        artifacts_dir=Path(service.artifacts_dir).expanduser().absolute() if service.artifacts_dir else None,
        artifacts_s3=service.artifacts_s3,
        large_file_bytes=service.large_file_kb * 1024,
        max_files_bytes=service.max_files_mb * 1_000_000,
        max_result_bytes=service.max_result_mb * 1_000_000,
        max_pending_jobs=service.max_pending_jobs,
        max_submissions_per_minute=service.max_submissions_per_minute,
        max_streams=service.max_streams,
        max_log_followers=service.max_log_followers,
        max_failures_lost=service.max_failures_lost,
        keep_workloads_days=service.keep_workloads_days,
        keep_decisions_days=service.keep_decisions_days,
        keep_events_days=service.keep_events_days,
        keep_events=service.keep_events,
        keep_decisions=service.keep_decisions,
        keep_keys_hours=service.keep_keys_hours,
        max_kept_person_bytes=service.max_kept_person_mb * 1_000_000,
        max_kept_team_bytes=service.max_kept_team_mb * 1_000_000,
        max_kept_bytes=service.max_kept_mb * 1_000_000,
        max_kept_share_bytes=service.max_kept_team_mb * 10_000 * service.max_kept_share_percent,
        free_reserve_bytes=service.free_reserve_mb * 1_000_000,
        start_deadline_seconds=service.start_deadline_seconds,
        host=host,
        port=port,
        prefix="/" + prefix.strip("/") + "/",
        public_url=public_url,
        hub_api_url=env.get("JUPYTERHUB_API_URL", ""),
        api_token=env.get("JUPYTERHUB_API_TOKEN", ""),
        hub_base_url=env.get("JUPYTERHUB_BASE_URL", "/"),
        hub_origin=_hub_origin(env),
        ticket_secret=env.get("MAKEWAY_TICKET_SECRET", ""),
        metrics_token=env.get("MAKEWAY_METRICS_TOKEN", ""),
        backend=service.backend,
        kubernetes=_kubernetes(service, public_url),
    )


def _hub_origin(env: Mapping[str, str]) -> str:
    """Return the Hub's origin for browsers where it is another one than the service's, else an empty string."""
    hub = env.get("JUPYTERHUB_HOST", "").rstrip("/")
    login = urlparse(env.get("JUPYTERHUB_OAUTH_CALLBACK_URL", ""))
    return hub if login.netloc and hub and f"{login.scheme}://{login.netloc}" != hub else ""
