"""Bound what one person can use of the service: requests, storage, time of the processor."""
