"""Share between backends with remote workers: channel, reports, and what is known of attempts."""
