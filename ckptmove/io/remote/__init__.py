"""Checkpoints at a URL, read through fsspec. Only ``address`` and ``errors`` are imported for local paths."""
