"""Tensors that are not in memory: expressions over bytes in files, whose elements are read when they are needed."""
