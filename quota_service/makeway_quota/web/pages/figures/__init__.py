"""Draw the figures of the pages: bars, cells, heat maps, colours."""
