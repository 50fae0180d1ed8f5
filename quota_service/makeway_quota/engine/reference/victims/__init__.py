"""Choose victims in the reference engine."""
