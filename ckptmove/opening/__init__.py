"""Open a file, a directory or an archive as one checkpoint."""
