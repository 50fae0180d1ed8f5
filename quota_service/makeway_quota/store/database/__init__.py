"""Connect with SQLite or PostgreSQL, and check that it is the right one and has space."""
