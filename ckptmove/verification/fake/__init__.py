"""Memory of a case on one rank of many, from tensors without values."""
