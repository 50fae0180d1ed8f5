"""Define the tables and indexes, as the newest migration leaves them.

Texts have no length here (the API bounds them). Lists and mappings are JSON, read and written by `rows.py`.
What is large and never changes (source, files) has its own tables, so that a change of state rewrites little.
Every read of `reads.py`, `pages.py` and `pruning.py` has an index (tests/store/test_indexes.py): history may be long.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TextClause,
    false,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Serial = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only where a key is INTEGER
LIVE_ROW = text("ended_at IS NULL")
ENDED_ROW = text("ended_at IS NOT NULL")
"""The conditions of partial indexes. SQLite uses such an index only for a query with the same condition, word for word.

`writes.change` keeps `ended_at` in step with the state. A list of states as condition made every update a third slower.
"""
LIVE_MACHINE = text("over_at IS NULL")
FINISHED_MACHINE = text("over_at IS NOT NULL")
LIVE_SESSION = text("kind = 'session' AND state IN ('pending', 'starting', 'running', 'checkpointing')")


def where(condition: TextClause) -> dict[str, Any]:
    """Return the keywords of a partial index over the rows that meet a condition, for both databases."""
    return {"sqlite_where": condition, "postgresql_where": condition}


workloads = Table(
    "workloads",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("team", Text),
    Column("profile", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("priority", Text, nullable=False),
    Column("preemptible", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("infra_failures", Integer, nullable=False),
    Column("max_failures", Integer, nullable=False),
    Column("submitted_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("gpus", BigInteger, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("min_workers", Integer, nullable=False),
    Column("cpu", BigInteger, nullable=False),
    Column("memory", BigInteger, nullable=False),
    Column("time_limit", Double),
    Column("grace", Double, nullable=False),
    Column("signal", Text, nullable=False),
    Column("image", Text),
    Column("reason_code", Text, nullable=False),
    Column("reason_message", Text, nullable=False),
    Column("reason_numbers", Text, nullable=False),
    Column("not_before", Double),
    Column("over_quota", Boolean, nullable=False),
    Column("borrowed_from", Text, nullable=False),
    Column("placement", Text, nullable=False),
    Column("nomination", Text, nullable=False),
    Column("failed_node", Text),
    Column("exit_code", BigInteger),
    Column("message", Text, nullable=False),
    Column("checkpoint_step", BigInteger),
    Column("checkpoint_at", Double),
    Column("notice", Text),
    Column("evicted_for", Text),
    Column("cancel_requested", Boolean, nullable=False),
    Column("server", Text, nullable=False),
    Column("expires_at", Double),
    Column("server_started", Boolean, nullable=False),
    Column("command", Text, nullable=False),
    Column("env", Text, nullable=False),
    Column("clone_of", Text),
    Column("ran", Double, nullable=False, server_default=text("0")),
    Column("launched_at", Double),
    Column("lost_on", Text, nullable=False, server_default=text("'[]'")),
    Column("start_tries", Integer, nullable=False, server_default=text("0")),
    Column("avoids", Text, nullable=False, server_default=text("'[]'")),
    Column("version", Integer, nullable=False),
    Column("weight", BigInteger, nullable=False, server_default=text("0"), comment="bytes of command, env and source"),
    Index("ix_workloads_submitted_at_id", "submitted_at", "id"),
    Index("ix_workloads_owner", "owner"),
    Index("ix_workloads_live", "submitted_at", "id", **where(LIVE_ROW)),
    Index("ix_workloads_live_owner", "owner", "submitted_at", **where(LIVE_ROW)),
    Index("ix_workloads_live_team", "team", "submitted_at", **where(LIVE_ROW)),
    Index("ix_workloads_ended_state", "state", "submitted_at", **where(ENDED_ROW)),
    Index("ix_workloads_ended_owner", "owner", "state", "submitted_at", **where(ENDED_ROW)),
    Index("ix_workloads_ended_team", "team", "state", "submitted_at", **where(ENDED_ROW)),
    Index("ix_workloads_ended_at", "ended_at", **where(ENDED_ROW)),
    Index("uq_workloads_live_session", "owner", "server", unique=True, **where(LIVE_SESSION)),
)

sources = Table(
    "sources",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("source", Text, nullable=False),
)

blobs = Table(
    "blobs",
    metadata,
    Column("digest", Text, primary_key=True, comment="SHA-256: clones share their files"),
    Column("data", LargeBinary, nullable=False),
    Column(
        "outside",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="`data` is empty: the content is in the folder of artifacts",
    ),
    Column("size", BigInteger, nullable=False, server_default=text("0")),
)

files = Table(
    "files",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("path", Text, primary_key=True),
    Column("executable", Boolean, nullable=False),
    Column("blob", Text, ForeignKey("blobs.digest"), nullable=False, index=True),
)

attempts = Table(
    "attempts",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("placement", Text, nullable=False),
    Column("outcome", Text),
    Column("exit_code", BigInteger),
    Column("message", Text, nullable=False),
    Column("checkpoint_step", BigInteger),
    Column("checkpoint_at", Double),
    Column("lost_seconds", Double),
    Column("evicted_for", Text),
    Column("over_quota", Boolean, nullable=False),
)

worker_reports = Table(
    "worker_reports",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("worker", Integer, primary_key=True, autoincrement=False),
    Column("instance", Text, nullable=False, comment="the launcher that claimed this worker"),
    Column("serial", BigInteger, nullable=False, comment="counts the changes of this table"),
    Column("heard_at", Double, nullable=False),
    Column("report", Text, nullable=False),
    Index("ix_worker_reports_serial", "serial"),
)

progress = Table(
    "progress",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("at", Double, nullable=False, comment="when it changed last"),
    Column("reached", BigInteger, comment="the step of an earlier attempt, if this is not as far"),
    Column("progress", Text, nullable=False, comment="as its process reported it"),
)

serials = Table(
    "serials",
    metadata,
    Column("name", Text, primary_key=True, comment="a table whose changes are counted"),
    Column("value", BigInteger, nullable=False),
)

outputs = Table(
    "outputs",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True, comment="log, result, error, or dropped: how far a log was known"),
    Column("worker", Integer, primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False, comment="offset in what this worker sent"),
    Column("place", BigInteger, nullable=False, comment="offset in what all workers sent, as it arrived"),
    Column("size", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("blob", Text, ForeignKey("blobs.digest"), index=True, comment="`data` is empty: the content is a blob"),
    Index("ix_outputs_place", "workload", "attempt", "kind", "place"),
)

decisions = Table(
    "decisions",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("verb", Text, nullable=False),
    Column("workload", Text),
    Column("team", Text),
    Column("owner", Text),
    Column("code", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("numbers", Text, nullable=False),
    Index("ix_decisions_workload_id", "workload", "id"),
    Index("ix_decisions_team_id", "team", "id"),
    Index("ix_decisions_owner_id", "owner", "id"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("team", Text),
    Column("owner", Text),
    Column("workload", Text),
    Column("data", Text, nullable=False),
    sqlite_autoincrement=True,
)

policies = Table(
    "policies",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("author", Text, nullable=False),
    Column("comment", Text, nullable=False),
    Column("document", Text, nullable=False),
)

submission_keys = Table(
    "submission_keys",
    metadata,
    Column("key", Text, primary_key=True, comment="the header Idempotency-Key"),
    Column("sender", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False, comment="counts the copies of one request"),
    Column("digest", Text, nullable=False, comment="SHA-256 of what was requested"),
    Column("workload", Text, nullable=False, comment="what was submitted; it may be removed by now"),
    Column("at", Double, nullable=False),
    Index("ix_submission_keys_at", "at"),
)

people = Table(
    "people",
    metadata,
    Column("name", Text, primary_key=True, comment="a user of the Hub, or NAME/deleted-N"),
    Column("identity", Text, nullable=False, comment="stays when the user is renamed"),
    Column("groups", Text, nullable=False),
    Column("present", Boolean, nullable=False),
)

purges = Table(
    "purges",
    metadata,
    Column("workload", Text, primary_key=True, comment="its rows are gone, its folder is still to be removed"),
    Column("at", Double, nullable=False),
)

dropped = Table(
    "dropped",
    metadata,
    Column("digest", Text, primary_key=True, comment="a content outside whose last row was removed"),
    Column("at", Double, nullable=False),
)

removals = Table(
    "removals",
    metadata,
    Column("workload", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("team", Text),
    Column("at", Double, nullable=False, comment="the end before which workloads were removed"),
    Index("ix_removals_at", "at"),
)

retention = Table(
    "retention",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False, comment="always 1"),
    Column("at", Double, nullable=False, comment="when the last pass ended"),
    Column("clock", Double, nullable=False, comment="the time that ages were counted to"),
    Column("report", Text, nullable=False),
)

accounts = Table(
    "accounts",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("team", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)

folders = Table(
    "folders",
    metadata,
    Column("workload", Text, ForeignKey("workloads.id", ondelete="CASCADE"), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("at", Double, nullable=False, comment="when it was measured"),
)

storage_days = Table(
    "storage_days",
    metadata,
    Column("day", Integer, primary_key=True, autoincrement=False, comment="days since 1970 (UTC)"),
    Column("scope", Text, primary_key=True, comment="all, team, person; disk: what may still be written"),
    Column("name", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False, comment="what was kept at the last pass of that day"),
)

histories = Table(
    "histories",
    metadata,
    Column("policy", Text, primary_key=True, comment="its decayed over-quota use"),
    Column("milli", Double, nullable=False),
    Column("at", Double, nullable=False),
)

installation = Table(
    "installation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False, comment="always 1"),
    Column("name", Text, nullable=False, comment="random"),
)

terms = Table(
    "terms",
    metadata,
    Column("term", Integer, primary_key=True, autoincrement=False),
    Column("holder", Text, nullable=False),
    Column("at", Double, nullable=False),
)

deployments = Table(
    "deployments",
    metadata,
    Column("name", Text, primary_key=True),
    Column("document", Text, nullable=False),
    Column("version", Integer, nullable=False, comment="grows with every change, also when the name is used again"),
    Column("deleting", Boolean, nullable=False, comment="its machines are being ended"),
    Column("updated_at", Double, nullable=False),
    Column("updated_by", Text, nullable=False),
    Column("deleted_at", Double, comment="when its last machine was gone; the row goes later"),
    Index("ix_deployments_deleted_at", "deleted_at"),
)

machines = Table(
    "machines",
    metadata,
    Column("id", Text, primary_key=True),
    Column("deployment", Text, nullable=False),
    Column("pool", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("market", Text, nullable=False),
    Column("price", BigInteger, comment="millionths of the currency for an hour; null is unknown"),
    Column("gpus", BigInteger, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("since", Double, nullable=False),
    Column("state", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("term", Integer, nullable=False, comment="of the leader that wrote the row"),
    Column("calls", Integer, nullable=False),
    Column("called_at", Double),
    Column("end_called_at", Double),
    Column("instance", Text),
    Column("launched_at", Double),
    Column("boot", Text),
    Column("ready_at", Double),
    Column("heard_at", Double),
    Column("attempts", Integer),
    Column("needed_at", Double, nullable=False),
    Column("drain", Text),
    Column("deadline", Double),
    Column("absences", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("over_at", Double, comment="null while it may cost something"),
    Index("ix_machines_live", "deployment", "id", **where(LIVE_MACHINE)),
    Index("ix_machines_over_at", "over_at", **where(FINISHED_MACHINE)),
    Index("ix_machines_deployment", "deployment", "requested_at", "id"),
    Index("ix_machines_state", "state", "requested_at", "id"),
    Index("ix_machines_requested_at_id", "requested_at", "id"),
)

machine_requests = Table(
    "machine_requests",
    metadata,
    Column("machine", Text, ForeignKey("machines.id", ondelete="CASCADE"), primary_key=True),
    Column("request", Text, nullable=False, comment="what the provider is asked for; it never changes"),
)

machine_events = Table(
    "machine_events",
    metadata,
    Column("id", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("machine", Text, nullable=False, comment="empty: of the deployment"),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Index("ix_machine_events_deployment_id", "deployment", "id"),
    Index("ix_machine_events_machine_id", "machine", "id"),
    sqlite_autoincrement=True,
)

machine_outputs = Table(
    "machine_outputs",
    metadata,
    Column("machine", Text, ForeignKey("machines.id", ondelete="CASCADE"), primary_key=True),
    Column("kind", Text, primary_key=True, comment="console, init"),
    Column("at", Double, nullable=False),
    Column("exit_code", BigInteger),
    Column("text", Text, nullable=False),
    Column("omitted", BigInteger, nullable=False, comment="characters in the middle that were not kept"),
    Index("ix_machine_outputs_at", "at"),
)

machine_reports = Table(
    "machine_reports",
    metadata,
    Column("machine", Text, ForeignKey("machines.id", ondelete="CASCADE"), primary_key=True),
    Column("boot", Text, nullable=False, comment="the boot that joined; no other may"),
    Column("number", BigInteger, nullable=False, comment="counts the reports of its agent"),
    Column("serial", BigInteger, nullable=False, comment="counts the changes of this table"),
    Column("joined_at", Double, nullable=False),
    Column("heard_at", Double, nullable=False),
    Column("report", Text, nullable=False),
    Index("ix_machine_reports_serial", "serial"),
)

launch_backoffs = Table(
    "launch_backoffs",
    metadata,
    Column("deployment", Text, primary_key=True),
    Column("type", Text, primary_key=True),
    Column("zone", Text, primary_key=True),
    Column("market", Text, primary_key=True),
    Column("failure", Text, primary_key=True),
    Column("failures", Integer, nullable=False),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
)

spend_months = Table(
    "spend_months",
    metadata,
    Column("deployment", Text, primary_key=True),
    Column("month", Text, primary_key=True, comment="such as 2026-11, in the time zone of the deployment"),
    Column("amount", BigInteger, nullable=False, comment="millionths, of machines that are over"),
)

unknown_instances = Table(
    "unknown_instances",
    metadata,
    Column("deployment", Text, primary_key=True),
    Column("instance", Text, primary_key=True, comment="an instance at the provider without a machine"),
    Column("first_seen", Double, nullable=False),
)

sealed_secrets = Table(
    "sealed_secrets",
    metadata,
    Column("team", Text, primary_key=True, comment="empty: all teams"),
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False, comment="cloud, file, git"),
    Column("sealed", Text, nullable=False, comment="a Fernet token of its values"),
    Column("updated_at", Double, nullable=False),
    Column("updated_by", Text, nullable=False),
    Column("disabled_at", Double, comment="when its team left the policy; null: enabled"),
)
