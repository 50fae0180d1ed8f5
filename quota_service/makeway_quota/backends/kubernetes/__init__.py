"""Run jobs as pods: a client of the API server, informers on nodes and pods, and what they mean for the inventory."""
