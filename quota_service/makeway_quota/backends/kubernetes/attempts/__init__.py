"""Follow the pods of attempts from creation to removal."""
