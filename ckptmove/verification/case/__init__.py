"""The user's own model and training step, and which line to mend."""
