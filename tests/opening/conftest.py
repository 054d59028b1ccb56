"""Directories and archives of trainers, with tags of absent devices."""

from __future__ import annotations

import trainer_directories

skip_what_this_torch_cannot_simulate = trainer_directories.skip_what_this_torch_cannot_simulate
answers = trainer_directories.answers
build = trainer_directories.build
packer = trainer_directories.packer
snapshot = trainer_directories.snapshot
