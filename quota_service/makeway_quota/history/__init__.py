"""Past over-quota use, run times, and the retention of what is past."""
