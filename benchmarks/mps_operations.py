"""Compare a simulated mps with torch's tests of mps, over torch's operator database.

    python benchmarks/mps_operations.py [--samples N] [NAME...]

Each operation runs on its samples on a simulated mps, in every dtype that the CPU supports. The table shows whether
torch's tests expect the operation to work on mps, and whether the simulation refuses it. Below it are the operations
on which the two disagree; the exit code is 1 if there are any. All operations take several minutes.

torch's tests also expect failures without an error: other values, undefined values, a crash. `_NO_REFUSAL` lists those
for which neither torch's sources nor the Metal kernels in its macOS wheel have a check, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import sys
import unittest
import warnings
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from operators import operators
from torch.utils import _pytree as pytree

from ckptmove.simulation.device import SimulatedDevice

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip
WIDE = (torch.float64, torch.complex128)
WORKS, FAILS, UNCLEAR = "works", "fails", "fails without an error"
_COMPLEX = (torch.complex64,)
#: torch's lists of operations with undefined values.
_UNDEFINED = ("EMPTY_OPS_SKIPLIST", "UNDEFINED_XFAILLIST")
_TIES = "the order of equal elements"
_LISTED = "not in torch's list of operations that support complex numbers; no check of the dtype in the sources"
_OF_COMPLEX = "the result is complex on mps, which has no gradient"
_FACTORED = "takes complex numbers for real ones: the matrix is not positive definite"
_SAMPLED = "torch's tests cannot make the sample on mps"
#: Operations that torch's tests expect to fail without an error, in these dtypes (None for all), with the reason.
_NO_REFUSAL: dict[str, tuple[tuple[torch.dtype, ...] | None, str]] = {
    "__rpow__": (_COMPLEX, _LISTED),
    "arange": ((torch.uint8,), "negative numbers in uint8"),
    "argsort": (None, _TIES),
    "bincount": (None, "float32, where the CPU returns float64"),
    "cholesky": (_COMPLEX, _FACTORED),
    "linalg.cholesky": (_COMPLEX, _FACTORED),
    "linalg.cholesky_ex": (_COMPLEX, _FACTORED),
    "linalg.pinvsingular": (_COMPLEX, _SAMPLED),
    "lu_unpack": (_COMPLEX, _SAMPLED),
    "masked.median": (None, "other values: torch's other tests of it pass on mps"),
    "nn.functional.conv3d": (_COMPLEX, "skipped: works on some Macs"),
    "nn.functional.conv_transpose2d": ((torch.bfloat16,), "the kernel checks volumes only"),
    "nn.functional.padreplicate_negative": (_COMPLEX, "crashes"),
    "pow": (_COMPLEX, _LISTED),
    "resize_": (None, "uninitialized values"),
    "resize_as_": (None, "uninitialized values"),
    "scatter_reduceamax": ((torch.int64,), "works on macOS 15 and newer"),
    "scatter_reduceamin": ((torch.int64,), "works on macOS 15 and newer"),
    "sort": (None, _TIES),
    "svd_lowrank": ((torch.float32,), "the signs of the vectors"),
    "to_sparse": (_COMPLEX, _LISTED),
    **dict.fromkeys(
        ("std", "stdunbiased", "std_mean", "std_meanunbiased", "var", "varunbiased", "var_mean", "var_meanunbiased"),
        (_COMPLEX, _OF_COMPLEX),
    ),
}


#: Operations that the simulation refuses although they work on mps, with the reason.
_REFUSED_HERE = {
    "nn.functional.batch_norm": "an empty batch, for which torch takes float64 on a device of an extension"
}


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


def expectation(op: Any, dtype: torch.dtype, known: dict[str, Any]) -> str:
    """What torch's `TestConsistency.test_output_match` expects on mps: `WORKS`, `FAILS` or `UNCLEAR`."""
    key = op.name + op.variant_test_name
    dtypes, _ = _NO_REFUSAL.get(key, ((), ""))
    is_undefined = any(key in known[name] and _has(known[name][key], dtype) for name in _UNDEFINED)
    if is_undefined or _has(dtypes, dtype):
        return UNCLEAR
    return FAILS if _is_expected_to_fail(op, dtype, known) else WORKS


def _has(dtypes: Any, dtype: torch.dtype) -> bool:
    return dtypes is None or dtype in dtypes


def _is_expected_to_fail(op: Any, dtype: torch.dtype, known: dict[str, Any]) -> bool:
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


def outcome(op: Any, dtype: torch.dtype, mps: SimulatedDevice, samples: int) -> str:
    """The first refusal of a simulated mps, `accepted` without a refusal, or empty if the CPU accepts no sample."""
    result = ""
    for sample in islice(op.sample_inputs("cpu", dtype), samples):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        if any(one in WIDE or (isinstance(one, torch.Tensor) and one.dtype in WIDE) for one in leaves):
            continue
        given, args, kwargs = pytree.tree_unflatten(leaves, spec)
        try:
            op.op(given, *args, **kwargs)
        except Exception:
            continue
        # torch reads the indices of this operation on the CPU.
        staying = [*sample.args] if op.name == "tensor_split" else []
        with mps:
            there = [
                one.to(mps.device)
                if isinstance(one, torch.Tensor) and not any(one is other for other in staying)
                else one
                for one in leaves
            ]
        given, args, kwargs = pytree.tree_unflatten(there, spec)
        kwargs |= {"device": mps.device} if "device" in kwargs else {}
        try:
            with mps:
                op.op(given, *args, **kwargs)
            result = "accepted"
        except Exception as error:
            return f"refused: {type(error).__name__}: {str(error)[:90]}"
    return result


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare a simulated mps with torch's tests of mps.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="operations of torch's database (default: all)")
    parser.add_argument("--samples", type=int, default=60, help="samples of each operation and dtype (default: 60)")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known, counts = lists(), Counter[tuple[str, str, str]]()
    wrong, missed = defaultdict(list), defaultdict(list)
    mps = SimulatedDevice("mps")
    for op in operators():
        key = op.name + op.variant_test_name
        if op.name.startswith("jiterator") or (asked.names and key not in asked.names):
            continue
        for dtype in DTYPES:
            found = outcome(op, dtype, mps, asked.samples) if dtype in op.dtypes else ""
            if not found:
                continue
            expected = expectation(op, dtype, known)
            short = str(dtype).removeprefix("torch.")
            counts["complex" if dtype.is_complex else "real", expected, found.partition(":")[0]] += 1
            if expected == FAILS and found == "accepted":
                missed[key].append(short)
            elif expected == WORKS and found != "accepted" and key not in _REFUSED_HERE:
                wrong[key].append(f"{short}, {found}")
    print("| dtypes | in torch's tests | simulated mps | operations in a dtype |\n|---|---|---|---:|")
    for row, count in sorted(counts.items()):
        print(f"| {' | '.join(row)} | {count:,} |")
    for title, rows in (("works, refused", wrong), ("fails, accepted", missed)):
        for key, each in rows.items():
            print(f"{title}: {key}: {'; '.join(each)}")
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
