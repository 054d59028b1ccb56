"""Change keys, parts, objects and dtypes of a checkpoint."""
