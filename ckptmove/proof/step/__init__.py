"""One optimizer step from the stored state."""
