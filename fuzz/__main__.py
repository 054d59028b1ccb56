"""Run one fuzz target until it fails or is stopped: ``python -m fuzz TARGET [libFuzzer options]``.

Failing inputs are written to ``fuzz/found/TARGET``, inputs that reach new code to ``fuzz/corpus/TARGET``.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from random import Random
from typing import Final

import atheris

with atheris.instrument_imports(include=["ckptmove"]):
    from fuzz import mutators
    from fuzz.harness import guarded
    from fuzz.targets import TARGETS, seeds_by_target

_HERE: Final = Path(__file__).parent
#: Limits for one input: seconds, MiB of memory, and size in bytes.
_BOUNDS: Final = ("-timeout=20", "-rss_limit_mb=1500", "-max_len=65536", "-print_final_stats=1")


def main() -> None:
    """Write the seeds and start the fuzzer."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--list":
        sys.stdout.write(" ".join(TARGETS) + "\n")
        return
    if name not in TARGETS:
        sys.exit(f"python -m fuzz TARGET [-max_total_time=60]; the targets are {', '.join(TARGETS)}")
    target, corpus, found = TARGETS[name], _HERE / "corpus" / name, _HERE / "found" / name
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for data in seeds_by_target()[name]:
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return mutators.mixed(target.mutator, data, Random(seed), _plain)[:most]

    def run(data: bytes) -> None:
        guarded(target.run, data)

    atheris.Setup(
        [sys.argv[0], *_BOUNDS, f"-artifact_prefix={found}/", *sys.argv[2:], str(corpus)], run, custom_mutator=mutate
    )
    atheris.Fuzz()


def _plain(data: bytes) -> bytes:
    """Mutate bytes with libFuzzer's own mutator."""
    return bytes(atheris.Mutate(data, len(data) + 64))


main()
