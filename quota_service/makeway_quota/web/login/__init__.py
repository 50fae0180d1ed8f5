"""Identify who sends a request: login by the Hub, tickets, confirmations."""
