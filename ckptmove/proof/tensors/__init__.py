"""Tensors as stored: read from the file, cut into pieces, measured."""
