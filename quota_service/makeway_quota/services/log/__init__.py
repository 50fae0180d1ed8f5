"""Answer what happened: decisions, events, retention and growth."""
