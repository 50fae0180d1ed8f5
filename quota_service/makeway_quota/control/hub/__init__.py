"""Follow the Hub: its users, their teams and servers, and the leases of notebooks."""
