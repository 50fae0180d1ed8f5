"""Keep what workers report: their last report and how far their job is."""
