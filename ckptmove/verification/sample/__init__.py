"""A sample of a checkpoint: the choice, and the copy of a remote one."""
