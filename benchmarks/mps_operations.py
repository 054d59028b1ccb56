"""Compare a simulated mps with torch's tests of mps, over torch's operator database.

`python benchmarks/mps_operations.py [NAME...]` runs the samples of each operation on a simulated mps, in every dtype
that the CPU supports, and prints a table: whether torch's tests expect the operation to work on mps, and whether the
simulation refuses it. Below it are the operations on which the two disagree. All of them take several minutes.
"""

from __future__ import annotations

import ast
import sys
import unittest
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckptmove.verification.simulated.device import SimulatedDevice

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
WIDE = (torch.float64, torch.complex128)
SAMPLES = 60


def lists() -> dict[str, Any]:
    """The lists of torch/testing/_internal/common_mps.py, which torch defines only on a Mac."""
    tree = ast.parse((Path(torch.__path__[0]) / "testing/_internal/common_mps.py").read_text())
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = {}
    for node in function.body:
        value = getattr(node, "value", None)
        if isinstance(value, (ast.Dict, ast.Set)):
            target: Any = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]  # type: ignore[attr-defined]
            found[target.id] = eval(compile(ast.Expression(value), "common_mps", "eval"), {"torch": torch})
    return found


def is_expected_to_fail(op: Any, dtype: torch.dtype, known: dict[str, Any]) -> bool:
    """Whether torch's `TestConsistency.test_output_match` expects a failure on mps."""
    key = op.name + op.variant_test_name
    listed = (known[name].get(key, ()) for name in ("UNIMPLEMENTED_XFAILLIST", "ON_MPS_XFAILLIST"))
    decorated = any(
        unittest.expectedFailure in one.decorators
        and one.cls_name == "TestConsistency"
        and one.test_name in {None, "test_output_match"}
        and one.device_type in {None, "mps"}
        and (one.dtypes is None or dtype in one.dtypes)
        for one in op.decorators
        if hasattr(one, "cls_name")
    )
    return (
        decorated
        or any(dtypes is None or dtype in dtypes for dtypes in listed)
        or dtype not in op.supported_dtypes("mps")
        or (dtype.is_complex and key not in known["SUPPORTED_COMPLEX_OPS"])
    )


def outcome(op: Any, dtype: torch.dtype, device: torch.device) -> str:
    """The first refusal of a simulated mps; `accepted` for none, empty without a sample that the CPU accepts."""
    result = ""
    for sample in list(op.sample_inputs("cpu", dtype))[:SAMPLES]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        if any(one in WIDE or (isinstance(one, torch.Tensor) and one.dtype in WIDE) for one in leaves):
            continue
        given, args, kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            op.op(given, *args, **kwargs)
        except Exception:  # noqa: BLE001  # the CPU refuses it too
            continue
        there = [one.to(device) if isinstance(one, torch.Tensor) else one for one in leaves]
        given, args, kwargs = pytree.tree_unflatten(there, spec)
        kwargs |= {"device": device} if "device" in kwargs else {}
        try:
            op.op(given, *args, **kwargs)
            result = "accepted"
        except Exception as error:  # noqa: BLE001  # of any operation
            return f"refused: {type(error).__name__}: {str(error)[:90]}"
    return result


def main(names: list[str]) -> None:
    """Print the table, for some operations or all."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415  # takes seconds

    warnings.simplefilter("ignore")
    known, counts = lists(), Counter[tuple[str, str, str]]()
    wrong, missed = defaultdict(list), defaultdict(list)
    with SimulatedDevice("mps") as mps:
        for op in op_db:
            key = op.name + op.variant_test_name
            if op.name.startswith("jiterator") or (names and key not in names):
                continue
            for dtype in DTYPES:
                found = outcome(op, dtype, mps.device) if dtype in op.dtypes else ""
                if not found:
                    continue
                fails = is_expected_to_fail(op, dtype, known)
                short = str(dtype).removeprefix("torch.")
                kind = "complex" if dtype.is_complex else "real"
                counts[kind, "fails" if fails else "works", found.partition(":")[0]] += 1
                if fails and found == "accepted":
                    missed[key].append(short)
                elif not fails and found != "accepted":
                    wrong[key].append(f"{short}, {found}")
    print("| dtypes | in torch's tests | simulated mps | operations in a dtype |\n|---|---|---|---:|")
    for row, count in sorted(counts.items()):
        print(f"| {' | '.join(row)} | {count:,} |")
    for title, rows in (("works, refused", wrong), ("fails, accepted", missed)):
        print(f"\n{title}:", *(f"  {key}: {'; '.join(each)}" for key, each in rows.items()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
