"""Configure JupyterHub for Makeway (settings, users, pages), and run the portal on one machine."""
