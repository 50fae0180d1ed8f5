"""The rules of the policy engine, one module for each part of its specification."""
