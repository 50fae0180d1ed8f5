"""Keep the world in memory: nodes, attempts and active rows, and the engine's view of them."""
