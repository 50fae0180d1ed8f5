"""Serve HTTP: connections, headers, bodies, and the form of errors."""
