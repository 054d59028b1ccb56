"""The comparison of two checkpoints, for ``diff`` and ``verify --against``."""
