"""Keep the deployments of autoscaled pools, their machines, and what became known of them."""
