"""Keep large contents beside the rows: files, outputs, their sizes, and how they are removed."""
