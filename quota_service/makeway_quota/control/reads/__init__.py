"""Answer reads without the store: the read model, the usage of teams, and the gate that lets cycles go first."""
