"""Compare every operator of torch's own test database on a simulated device with the CPU, bit for bit.

    python benchmarks/operators.py [--to DEVICE] [--samples N] [--only NAME]

Each operator runs on its first samples in float32, float16, complex64 and int64, forward and backward. The exit code
is 1 if any result differs, or if a valid call raises an error other than "not supported by the simulation", or "not on
the target" for what mps lacks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ckptmove.simulation.device import SimulatedDevice
from ckptmove.simulation.errors import RefusedOnMps, unsupported_operation
from ckptmove.simulation.rules import refuse_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES: Final = (torch.float32, torch.float16, torch.complex64, torch.int64)
PASSED, ROUNDED, DIFFERS = "equal", "equal up to rounding", "differs"
REFUSED, UNSUPPORTED, LACKING = "refused", "not supported by the simulation", "not on the target"
#: Operators with uninitialized results.
_UNINITIALIZED: Final = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip


class Outcome(NamedTuple):
    """The result of one sample.

    Attributes:
        verdict: one of the constants of this module.
        detail: the error, or the first difference; empty if the results are equal.
    """

    verdict: str
    detail: str = ""


def operators() -> list[Any]:
    """Torch's operator database: objects of `torch.testing._internal.opinfo.core.OpInfo`."""
    gc.disable()  # it would run over the objects of the database again and again
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        gc.enable()
    return list(op_db)


def outcomes(operator: Any, device: SimulatedDevice, dtype: torch.dtype, samples: int) -> Iterator[Outcome]:
    """Run the first samples of an operator on the CPU and on a device.

    Args:
        operator: an entry of the database.
        device: the device.
        dtype: dtype of the samples.
        samples: maximum number of samples.
    """
    is_real = dtype.is_floating_point or dtype.is_complex
    differentiable = is_real and operator.supports_autograd and dtype in operator.backward_dtypes
    try:
        with device:
            torch.manual_seed(0)
            made = list(islice(operator.sample_inputs(device.device, dtype, requires_grad=differentiable), samples))
    except Exception as error:
        yield _refused(error)
        return
    for sample in made:
        try:
            expected = _results(operator, sample, lambda leaf: _on_cpu(leaf, device), differentiable)
        except Exception:  # of any operator: not a valid call
            continue
        try:
            with device:
                found = _results(operator, sample, lambda leaf: leaf, differentiable)
                found = pytree.tree_map_only(torch.Tensor, device.to_cpu, found)
        except Exception as error:
            yield _refused(error)
        else:
            yield _compared(expected, found, operator.name in _UNINITIALIZED)


def _refused(error: Exception) -> Outcome:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, RefusedOnMps) or (isinstance(error, TypeError) and "MPS" in text):
        return Outcome(LACKING, text)
    return Outcome(REFUSED if unsupported_operation(error) is None else UNSUPPORTED, text)


def _on_cpu(leaf: Any, device: SimulatedDevice) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _copy(device.to_cpu(leaf)).requires_grad_(leaf.requires_grad)
    is_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == device.target)
    return torch.device("cpu") if is_device else leaf


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with all of its storage: `as_strided` reads memory outside of a view."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _results(
    operator: Any, sample: Any, move: Callable[[Any], Any], differentiable: bool
) -> tuple[list[Any], list[Any]]:
    """The outputs of an operator, and the gradients of its inputs."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    known = {id(leaf): move(leaf) for leaf in leaves}
    value, args, kwargs = pytree.tree_unflatten([known[id(leaf)] for leaf in leaves], spec)
    torch.manual_seed(0)
    outputs = pytree.tree_leaves([sample.output_process_fn_grad(operator.op(value, *args, **kwargs))])
    inputs = [one for one in known.values() if isinstance(one, torch.Tensor) and one.requires_grad]
    ends = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    if not (differentiable and inputs and ends):
        return outputs, []
    given = [_random(end) for end in ends]
    return outputs, list(torch.autograd.grad(ends, inputs, given, allow_unused=True))


def _random(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)


def _compared(
    expected: tuple[list[Any], list[Any]], found: tuple[list[Any], list[Any]], is_uninitialized: bool
) -> Outcome:
    worst = Outcome(PASSED)
    for part, ones, others in zip(("output", "gradient"), expected, found, strict=True):
        if len(ones) != len(others):
            return Outcome(DIFFERS, f"{len(others)} {part}s instead of {len(ones)}")
        for number, (one, other) in enumerate(zip(ones, others, strict=True)):
            if _shape(one, part) != _shape(other, part):
                return Outcome(DIFFERS, f"{part} {number}: {_shape(other, part)} instead of {_shape(one, part)}")
            if is_uninitialized or _is_same(one, other):
                continue
            try:
                torch.testing.assert_close(other, one, rtol=_tolerance(one), atol=_tolerance(one), equal_nan=True)
            except AssertionError as error:
                return Outcome(DIFFERS, f"{part} {number}: {error}".replace("\n", " "))
            worst = Outcome(ROUNDED, f"{part} {number}")
    return worst


def _shape(one: Any, part: str) -> object:
    """All of a result except its values; torch is free to choose the strides of a gradient."""
    if not isinstance(one, torch.Tensor):
        return type(one)
    is_strided = one.layout is torch.strided and part == "output"
    return one.shape, one.dtype, one.layout, one.stride() if is_strided else ()


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other or one != one)  # noqa: PLR0124  # NaN
    return torch.equal(_bits(one), _bits(other))


def _tolerance(one: Any) -> float:
    is_rounded = isinstance(one, torch.Tensor) and (one.dtype.is_floating_point or one.dtype.is_complex)
    return 8 * torch.finfo(one.dtype).eps if is_rounded else 0.0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dense = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().reshape(-1)
    return torch.empty(dense.numel(), dtype=dense.dtype).copy_(dense).view(torch.uint8)


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare torch's operators on a simulated device with the CPU.")
    parser.add_argument("--to", default="cuda:0", help="the simulated device (default: cuda:0)")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator and dtype (default: 3)")
    parser.add_argument("--only", default="", help="operators with this text in their names")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    device = SimulatedDevice(asked.to)
    worst: dict[str, list[str]] = {PASSED: [], ROUNDED: [], LACKING: [], UNSUPPORTED: [], REFUSED: [], DIFFERS: []}
    calls: Counter[str] = Counter()
    for operator in operators():
        if asked.only not in operator.name:
            continue
        name = f"{operator.name} {operator.variant_test_name}".strip()
        ended: dict[str, str] = {}
        for dtype in DTYPES:
            if dtype not in operator.dtypes or not _has(asked.to, dtype):
                continue
            for outcome in outcomes(operator, device, dtype, asked.samples):
                calls[outcome.verdict] += 1
                ended.setdefault(outcome.verdict, f"{dtype}: {outcome.detail}")
        verdict = next((one for one in reversed(worst) if one in ended), None)
        if verdict is not None:
            worst[verdict].append(f"{name}: {ended[verdict]}")
    for verdict in list(worst)[1:]:
        for line in worst[verdict]:
            print(f"{verdict}: {line[:300]}")
    print("\n| result | operators | calls |\n|---|---:|---:|")
    for verdict, names in worst.items():
        print(f"| {verdict} | {len(names):,} | {calls[verdict]:,} |")
    return 1 if worst[DIFFERS] or worst[REFUSED] else 0


def _has(target: str, dtype: torch.dtype) -> bool:
    try:
        refuse_dtype(target, dtype)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
