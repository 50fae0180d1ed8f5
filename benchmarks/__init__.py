"""Measures what users wait for against the real service, each number beside its goal and a baseline of its run."""
