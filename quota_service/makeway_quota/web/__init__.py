"""What people and programs see: the API, the live stream and the panel, all answered by the services."""
