"""A file, a directory or an archive opened as one checkpoint, and its inventory."""
