"""Tables about torch: devices, dtypes, optimizers, and what weights-only loading accepts."""
