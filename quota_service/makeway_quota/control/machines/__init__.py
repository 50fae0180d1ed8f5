"""Connect the service with the agents of machines."""
