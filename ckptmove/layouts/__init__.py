"""Checkpoints in a directory: which files there are, whose layout it is, and all of them as one."""
