"""Connect the service with workers that are no processes of it, and keep how far jobs are."""
