"""Run several backends at a time: each node, and each attempt, belongs to one of them."""
