"""Indexes and caches that make the rules fast."""
