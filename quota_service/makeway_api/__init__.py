"""Define the contract between Makeway's parts: wire models, events, errors, shared formats and one client."""

API_VERSION = "v1"
API_PREFIX = "/api/v1"
