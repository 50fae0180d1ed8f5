"""What the Hub must be told: configuration, people, pages, and how `make run` starts it all."""
