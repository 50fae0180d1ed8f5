"""How the Hub starts notebooks: ask for a lease, wait for it, start, renew, give it back."""
