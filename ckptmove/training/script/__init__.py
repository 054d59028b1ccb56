"""A training script: run up to its first step after the load, and compared with the checkpoint."""
