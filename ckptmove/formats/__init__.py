"""One module for each format of a checkpoint file."""
