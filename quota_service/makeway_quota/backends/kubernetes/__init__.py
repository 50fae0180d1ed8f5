"""Run jobs as pods: a client of the API server, informers on nodes and pods, manifests, and how pods end."""
