"""The user's own training code on the target: `--case`, `--script`, and ranks under torchrun."""
