"""The fuzz targets: the function that runs an input, the mutator, and the seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fuzz import journals, mutators, seeds, whole_mutators, whole_seeds
from fuzz.changing import examine_changes
from fuzz.harness import examine_file, examine_pickle
from fuzz.verifying import examine_resume
from fuzz.wholes import examine_archive, examine_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.mutators import Mutator


@dataclass(frozen=True, slots=True)
class Target:
    """A fuzz target.

    Attributes:
        run: runs an input; raises AssertionError if the invariant does not hold.
        mutator: changes an input.
    """

    run: Callable[[bytes], None]
    mutator: Mutator


TARGETS: Final[dict[str, Target]] = {
    "machine": Target(examine_pickle, mutators.pickle_mutator),
    "torch-zip": Target(examine_file, mutators.zip_mutator),
    "torchscript": Target(examine_file, mutators.zip_mutator),
    "torch-export": Target(examine_file, mutators.zip_mutator),
    "torch-legacy": Target(examine_file, mutators.legacy_mutator),
    "pickle": Target(examine_file, mutators.bare_mutator),
    "safetensors": Target(examine_file, mutators.safetensors_mutator),
    "torch-tar": Target(examine_file, whole_mutators.tar_mutator),
    "archive": Target(examine_archive, whole_mutators.archive_mutator),
    "distributed": Target(examine_directory, whole_mutators.directory_mutator),
    "directory": Target(examine_directory, whole_mutators.directory_mutator),
    "in-place": Target(examine_changes, journals.change_mutator),
    "verify": Target(examine_resume, whole_mutators.content_mutator),
}


def seeds_by_target() -> dict[str, list[bytes]]:
    """The seeds of each target, by its name."""
    single = seeds.by_target()
    return single | {
        "torch-tar": list(whole_seeds.old_tars()),
        "archive": list(whole_seeds.archives()),
        "distributed": list(whole_seeds.distributed()),
        "directory": list(whole_seeds.directories()),
        "in-place": list(journals.changes()),
        "verify": [data for name, files in single.items() if name != "machine" for data in files],
    }
