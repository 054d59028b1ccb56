"""Checkpoints of several files: directories, archives, and the layouts of trainers."""
