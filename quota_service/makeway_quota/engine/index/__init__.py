"""The cluster of a plan: nodes, allocations, the ledger of quotas; indexes and caches that make the rules fast."""
