"""The machines that run the work: one module per kind, behind the border of `base`."""
