"""Start notebook servers from JupyterHub with a lease on their GPUs."""
