"""From the inert tree of a pickle to the inventory of a checkpoint."""
