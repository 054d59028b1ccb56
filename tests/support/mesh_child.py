"""Replace the child process of a rank, without torch: print messages that a test wrote, in the protocol of the worker.

    mesh_child.py FOLDER RANK

FOLDER/RANK.json contains the messages; ``"die"`` kills the process from outside, ``"crash"`` aborts it, and
``"hang"`` stops it. Rank 0 gets its address on the first line, and writes it to FOLDER/address.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), sys.argv[2]
script = json.loads((folder / f"{rank}.json").read_text())


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


for text in ('{"torch": "imported"}', "a line of a library", "[]"):
    say(text)
if script == ["no store"]:
    sys.exit(1)
if rank == "0":
    (folder / "new").write_text(sys.stdin.readline().strip())
    (folder / "new").rename(folder / "address")
else:
    while not (folder / "address").exists():
        time.sleep(0.01)
    say(json.dumps({"address": (folder / "address").read_text()}))
if not sys.stdin.readline():
    sys.exit(1)
for message in script:
    if message == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if message == "crash":
        os.abort()
    if message == "hang":
        sys.stdin.read()
    say(json.dumps(message))
