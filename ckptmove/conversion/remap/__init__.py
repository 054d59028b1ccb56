"""Change keys, parts, dtypes and storages of a checkpoint."""
