"""Launch machines of deployments as nodes that the cluster's own autoscaler adds and removes."""
