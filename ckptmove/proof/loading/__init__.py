"""Build the objects of a checkpoint in memory, in place of ``torch.load``."""
