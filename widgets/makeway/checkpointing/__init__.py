"""Parts of `makeway.checkpoint`, which imports them when they are used. Standard library only."""
