"""Checkpoints of several files."""

from __future__ import annotations

import trainer_directories

skip_what_this_torch_cannot_simulate = trainer_directories.skip_what_this_torch_cannot_simulate
answers = trainer_directories.answers
build = trainer_directories.build
saved = trainer_directories.saved
snapshot = trainer_directories.snapshot
