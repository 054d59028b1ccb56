"""A training step of the user's own: model, optimizer and batch of a `Case`."""
