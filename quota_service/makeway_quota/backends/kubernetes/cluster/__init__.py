"""Track one cluster: its nodes, what pods request of them, and whose cluster it is."""
