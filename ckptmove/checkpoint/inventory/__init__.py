"""Build the inventory of a checkpoint: tensors, roles, optimizers and mentions of devices."""
