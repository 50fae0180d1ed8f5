"""Serve the API, the live stream and the pages; the services answer them."""
