"""Inspect a bucket of 225 checkpoints; count its requests and bytes.

    python benchmarks/fleet.py                # each request is answered after 50 ms
    python benchmarks/fleet.py --latency 0

The bucket is on a local server (``bucket.py``). The first table has the requests and bytes of each checkpoint, by kind,
as the report states them. The second one has the time and memory of the command, and the requests that the server
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

from side_by_side import MIB, Contender

COMMAND = [sys.executable, "-m", "ckptmove", "inspect", "s3://bucket/runs/**", "--format", "jsonl"]


def spread(numbers: list[int], unit: int = 1) -> str:
    """The smallest and the largest number."""
    return "-".join(f"{number / unit:,.0f}" for number in sorted({min(numbers), max(numbers)}))


def inspect(url: str) -> None:
    """Inspect the bucket, and print the tables."""
    found = defaultdict(list)
    for line in map(json.loads, subprocess.check_output(COMMAND, stderr=subprocess.DEVNULL).splitlines()):
        found[line["path"].split("/")[4]].append(line)
    print("| kind | checkpoints | MiB each | requests each | KiB read of each |\n|---|---:|---:|---:|---:|")
    for kind, lines in found.items():
        sizes = spread([line["size_bytes"] for line in lines], MIB)
        requests, read = ([line["remote"][key] for line in lines] for key in ("requests", "bytes_read"))
        print(f"| {kind} | {len(lines)} | {sizes} | {spread(requests)} | {spread(read, 1024)} |")
    total = sum(line["remote"]["requests"] for lines in found.values() for line in lines)
    print(f"\nIn total {total} requests, and the listing.\n")
    print("| `--jobs` | seconds | seconds of a processor | peak MiB | requests at the server |")
    print("|---:|---:|---:|---:|---:|")
    for jobs in (1, 8, 16):
        urlopen(f"{url}/requests").close()
        one = Contender("inspect", [*COMMAND, "--jobs", str(jobs)])
        one.run()
        counted = urlopen(f"{url}/requests").read().decode()
        peak = one.peak_bytes[0] / MIB
        print(f"| {jobs} | {one.seconds[0]:.1f} | {one.cpu_seconds[0]:.1f} | {peak:.0f} | {counted} |")


def main() -> None:
    """Start the server, and inspect its bucket."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=50, metavar="MS", help="milliseconds before each answer")
    options = parser.parse_args()
    access = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(access)
    serve = [sys.executable, str(Path(__file__).with_name("bucket.py")), str(options.latency)]
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        os.environ["AWS_ENDPOINT_URL"] = url = server.stdout.readline().strip()
        inspect(url)


if __name__ == "__main__":
    main()
