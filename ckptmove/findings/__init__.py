"""Rules that find problems in a checkpoint, one module for each family of codes."""
