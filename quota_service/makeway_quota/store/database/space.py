"""Return free pages of an SQLite file to the file system, and keep some of them for a disk that is full.

PostgreSQL needs neither: autovacuum has its free pages used again.
"""

from __future__ import annotations

import logging
import sqlite3

from sqlalchemy import URL, text

from .database import Database

log = logging.getLogger(__name__)

SLACK_PAGES = 2560
"""Free pages (10 MiB) that a file keeps at least, and a tenth of its pages: they are soon used again."""
MIN_FREE_BYTES = 2 * 2**20
"""Bytes of free pages below which a file gets more of them"""


def give_back(database: Database, pages: int) -> int:
    """Return at most `pages` free pages beyond the slack to the file system, and their number."""
    if not database.sqlite:
        return 0
    with database.read() as connection:
        free = int(connection.execute(text("PRAGMA freelist_count")).scalar_one())
        total = int(connection.execute(text("PRAGMA page_count")).scalar_one())
    surplus = min(pages, free - max(SLACK_PAGES, total // 10))
    if surplus > 0:
        database.run_script(f"PRAGMA incremental_vacuum({surplus})")
    return max(0, surplus)


def free_bytes(database: Database) -> int:
    """Return the bytes of an SQLite file that are free for new rows (0 on PostgreSQL)."""
    if not database.sqlite:
        return 0
    with database.read() as connection:
        free = int(connection.execute(text("PRAGMA freelist_count")).scalar_one())
        return free * int(connection.execute(text("PRAGMA page_size")).scalar_one())


def allow_give_back(url: URL) -> None:
    """Rewrite an SQLite file of an older version once, so that it can shrink; without disk space it stays as it is."""
    if url.get_backend_name() != "sqlite":
        return
    bare = sqlite3.connect(url.database or "", isolation_level=None, timeout=1.0)
    try:
        if bare.execute("PRAGMA auto_vacuum").fetchone()[0] == 0:
            bare.execute("PRAGMA auto_vacuum=INCREMENTAL")
            bare.execute("VACUUM")
    except sqlite3.Error as error:
        log.warning("The database file %s keeps its size; its free pages are used again: %s", url.database, error)
    finally:
        bare.close()


def keep_room_inside(database: Database) -> None:
    """Keep free pages in an SQLite file, and room in its log, for small writes on a disk that is full.

    Room on the disk may be taken by others at any moment, that inside of these two files may not. Pages are written to
    the file before they are free: a hole in a file is no room.
    """
    if not database.sqlite or free_bytes(database) >= MIN_FREE_BYTES:
        return
    database.run_script(
        "DROP TABLE IF EXISTS makeway_room; "
        "BEGIN IMMEDIATE; CREATE TABLE makeway_room (data BLOB); "
        f"INSERT INTO makeway_room VALUES (zeroblob({2 * MIN_FREE_BYTES})); COMMIT; "
        "PRAGMA wal_checkpoint(PASSIVE); "
        "DROP TABLE makeway_room;"
    )
