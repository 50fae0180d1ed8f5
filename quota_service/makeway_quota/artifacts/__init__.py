"""Keep large file contents in a folder, by digest; used by the store."""
