"""Compare two checkpoints, for ``diff`` and ``verify --against``."""
