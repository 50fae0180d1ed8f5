"""The rules of the policy engine, one module each, named as in its specification."""
