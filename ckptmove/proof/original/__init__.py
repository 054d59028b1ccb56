"""Compare a checkpoint with another one that it was made from, through torch's own readers."""
