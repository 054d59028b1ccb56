"""Measure each change that ``convert`` makes, next to the script that people use today.

    python benchmarks/remapping.py               # 3 GB
    python benchmarks/remapping.py --bytes 300e6 # smaller

Each script loads the whole file, changes it, and saves it. The commands of a comparison run in turn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import COPY, Contender, show

MAKE = """
import sys, torch
path, size = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
each = size // 4 // 3 // 24
model = {f"module.layers.{i}.weight": torch.randn(each) for i in range(24)}
moments = lambda: {"exp_avg": torch.randn(each), "exp_avg_sq": torch.rand(each)}
state = {i: {"step": torch.tensor(9.0), **moments()} for i in range(24)}
group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
group["params"] = list(range(24))
torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}, "epoch": 3}, path)
"""
LOAD = "import sys, torch\nc = torch.load(sys.argv[1], map_location='cpu', weights_only=True)\n"
SAVE = "torch.save(c, sys.argv[2])\n"
#: The change, the options of ``convert``, and the lines of the script between load and save.
CHANGES = (
    ("strip a prefix", ["--strip-prefix="], "c['model'] = {k[7:]: v for k, v in c['model'].items()}\n" + SAVE),
    ("rename keys", ["--rename", "module.*=net.*"],
     "c['model'] = {'net.' + k[7:]: v for k, v in c['model'].items()}\n" + SAVE),
    ("drop the optimizer", ["--drop", "optimizer"], "del c['optimizer']\n" + SAVE),
    ("model as root", ["--as-root", "model"], "c = c['model']\n" + SAVE),
    ("compact", ["--compact"],
     "c['model'] = {k: v.clone() for k, v in c['model'].items()}\n" + SAVE),
    ("plain", ["--plain"], SAVE),
    ("model to bfloat16", ["--dtype", "bf16"],
     "c['model'] = {k: v.bfloat16() for k, v in c['model'].items()}\n" + SAVE),
    ("model to safetensors", ["--as-root", "model"],
     "from safetensors.torch import save_file\nsave_file(c['model'], sys.argv[2], {'format': 'pt'})\n"),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=3e9, help="size of the checkpoint (default 3 GB)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each command (default 3)")
    options = parser.parse_args()
    print(f"{options.bytes / 1e9:g} GB, {options.runs} runs\n")
    print("| what | command | median s | min - max s | ratio | peak MiB |")
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="ckptmove-bench-") as folder:
        source = Path(folder, "source.pt")
        subprocess.run([sys.executable, "-c", MAKE, str(source), str(int(options.bytes))], check=True)
        for what, flags, script in CHANGES:
            output = Path(folder, "new.safetensors" if "safetensors" in what else "new.pt")
            ours = [sys.executable, "-m", "ckptmove", "convert", str(source), "-o", str(output), *flags]
            theirs = [sys.executable, "-c", LOAD + script, str(source), str(output)]
            contenders = [
                Contender(f"ckptmove convert {' '.join(flags)}", ours, output),
                Contender("load, change, save", theirs, output),
                Contender("cp + fsync of the whole file", ["sh", "-c", COPY, "sh", str(source), str(output)], output),
            ]
            for _ in range(options.runs + 1):  # the first is a warm-up
                for one in contenders:
                    one.run()
            show(what, contenders)
            output.unlink()


if __name__ == "__main__":
    main()
