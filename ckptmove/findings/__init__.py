"""The rules: what can be wrong with a checkpoint, a file for each family."""
