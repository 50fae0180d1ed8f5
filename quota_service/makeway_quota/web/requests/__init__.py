"""Handle requests before their route: limits, compression, the lookup of routes."""
