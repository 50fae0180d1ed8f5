"""Answer requests about jobs: submit, list, move, stop, read outputs."""
