"""Send requests to one cluster's API server, watch it, and read the quantities that it writes."""
