"""The room of machines: what work takes, and what is certain to be free."""
