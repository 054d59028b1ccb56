"""Convert a file in less memory than its tensors take, with ckptmove and with torch.load and torch.save.

    python benchmarks/limited_memory.py                 # 3 GB of tensors in 1.5 GB of address space
    python benchmarks/limited_memory.py --bytes 10000000000

Both run with the same limit (``ulimit -v``), on a file of 3 MB too: torch itself fits in the limit. The exit code is 1
unless ckptmove converts both files and torch only the small one.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import LOAD_SAVE

#: A model of many storages, whose bytes are not written.
MAKE = """
import sys, torch
path, nbytes = sys.argv[1], int(sys.argv[2])
with torch.serialization.skip_data():
    torch.save({f"layers.{i}.weight": torch.empty(nbytes // 400) for i in range(100)}, path)
"""


def survives(command: list[str], limit: int) -> str:
    """Run a command with a limit on its address space; return its last line of stderr, or empty if it succeeds."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limited)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or ["no message"])[-1][:160] + f" (exit code {done.returncode})"


def main() -> int:
    """Make the files, convert them under the limit, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=3_000_000_000, help="size of the tensors")
    parser.add_argument("--limit", type=int, default=1_500_000_000, help="bytes of address space")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: a temporary folder)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptmove-limited-", dir=options.folder))
    outcomes: dict[tuple[str, str], str] = {}
    try:
        for size, nbytes in (("small", 3_000_000), ("large", options.bytes)):
            source, output = folder / f"{size}.pt", folder / "output.pt"
            subprocess.run([sys.executable, "-c", MAKE, str(source), str(nbytes)], check=True)
            ways = {
                "ckptmove convert": ["-m", "ckptmove", "convert", str(source), "--to", "cuda:0", "-o", str(output)],
                "torch.load + torch.save": ["-c", LOAD_SAVE, str(source), str(output)],
            }
            for way, words in ways.items():
                failure = outcomes[size, way] = survives([sys.executable, *words], options.limit)
                print(f"{nbytes:>14,} bytes, {options.limit:,} of memory, {way}: {failure or 'converted'}", flush=True)
                output.unlink(missing_ok=True)
            source.unlink()
    finally:
        shutil.rmtree(folder)
    expected = {("large", "torch.load + torch.save")}
    return 0 if {which for which, failure in outcomes.items() if failure} == expected else 1


if __name__ == "__main__":
    sys.exit(main())
