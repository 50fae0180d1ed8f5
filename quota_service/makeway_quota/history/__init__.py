"""What past work tells: over-quota use and run times."""
