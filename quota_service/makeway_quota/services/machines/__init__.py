"""Answer administrators about deployments of machines: documents, machines, outputs, log."""
