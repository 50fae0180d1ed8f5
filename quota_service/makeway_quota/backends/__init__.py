"""Run work on nodes: one module for each kind of backend, behind the protocol of `base`."""
