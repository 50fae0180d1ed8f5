"""Past over-quota use, run times, and the retention of old records."""
