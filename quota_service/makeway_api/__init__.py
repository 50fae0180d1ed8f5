"""The contract between Makeway's parts: wire models, events, errors and one client."""

API_VERSION = "v1"
API_PREFIX = "/api/v1"
