"""Check the target's rules that the CPU does not have: operands on one device, and unsupported dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.simulation.errors import CrossDeviceError
from ckptmove.simulation.targets import home_of
from ckptmove.torch_facts.devices import unsupported_dtypes
from ckptmove.torch_facts.dtypes import SCRIPT_STORAGE_DTYPE, STORAGE_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch._ops import OpOverload

    Operation = OpOverload[..., Any]

#: Operations that copy values between devices.
COPIES = frozenset({"aten::_copy_from", "aten::_foreach_copy_", "aten::_to_copy", "aten::copy", "aten::copy_"})
# Arguments that may be on the CPU with any shape, by operation: indices, and lengths that the CPU reads.
_INDICES = frozenset({"indices"})
_LENGTHS = frozenset({"batch_sizes", "input_lengths", "lengths", "target_lengths"})
_FROM_CPU = {
    "aten::_index_put_impl_": _INDICES,
    "aten::_nested_view_from_jagged": frozenset({"dummy", "max_seqlen", "min_seqlen"}),
    "aten::_pack_padded_sequence": _LENGTHS,
    "aten::_pack_padded_sequence_backward": _LENGTHS,
    "aten::_unsafe_index": _INDICES,
    "aten::_unsafe_index_put": _INDICES,
    "aten::ctc_loss": _LENGTHS,
    "aten::gru": _LENGTHS,
    "aten::index": _INDICES,
    "aten::index_put": _INDICES,
    "aten::index_put_": _INDICES,
    "aten::lstm": _LENGTHS,
    "aten::rnn_relu": _LENGTHS,
    "aten::rnn_tanh": _LENGTHS,
}
# Ops that run whole on the CPU, with its exact results. Their parts differ by device: cuDNN, flash attention, the fused
# cells (which have no CPU kernel), kernels of mps, and parts that ATen computes in float64 on a device that it does not
# know (`get_atol_rtol`, `renorm_backward`).
WHOLE_OPS: tuple[Any, ...] = (
    torch.ops.aten.ctc_loss.Tensor,
    torch.ops.aten.gru.data,
    torch.ops.aten.gru.input,
    torch.ops.aten.gru_cell.default,
    torch.ops.aten.linalg_matrix_rank.atol_rtol_float,
    torch.ops.aten.linalg_matrix_rank.atol_rtol_tensor,
    torch.ops.aten.linalg_pinv.atol_rtol_float,
    torch.ops.aten.linalg_svd.default,
    torch.ops.aten.lstm.data,
    torch.ops.aten.lstm.input,
    torch.ops.aten.lstm_cell.default,
    torch.ops.aten.renorm.default,
    torch.ops.aten.rnn_relu.data,
    torch.ops.aten.rnn_relu.input,
    torch.ops.aten.rnn_tanh.data,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.scaled_dot_product_attention.default,
)
# Ops with kernels for CPU and CUDA, and a composite for other devices.
COMPOSITE_ELSEWHERE: tuple[Any, ...] = (
    torch.ops.aten.mish_backward.default,
    torch.ops.aten.native_channel_shuffle.default,
    torch.ops.aten.silu_backward.default,
)
# Message of the TypeError from `empty_mps` and `getMPSDataType` of ATen.
_NO_FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)
# Names of c10's ScalarType, taken from the names of the storage classes.
_SCALAR_TYPES = {
    dtype: name.removesuffix("Storage")
    for name, dtype in {**SCRIPT_STORAGE_DTYPE, **STORAGE_DTYPE}.items()
    if name != "UntypedStorage"
}
#: Operations that accept a 0-d CPU tensor as any argument that is only read; without the underscore of in-place
#: operations. A test compares this table and the next one with torch's own list of operations and its kernels.
_ANYWHERE: Final = frozenset({
    "__ilshift__", "__irshift__", "__lshift__", "__rshift__", "add", "addcmul", "allclose", "atan2", "bitwise_and",
    "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "copysign", "dist", "div", "eq",
    "floor_divide", "fmax", "fmin", "fmod", "ge", "gt", "heaviside", "hypot", "ldexp", "le", "lerp", "logical_and",
    "logical_or", "logical_xor", "lt", "maximum", "minimum", "mse_loss", "mul", "ne", "pow", "remainder", "rsub",
    "smooth_l1_loss", "special_chebyshev_polynomial_t", "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v", "special_chebyshev_polynomial_w", "special_hermite_polynomial_h",
    "special_hermite_polynomial_he", "special_laguerre_polynomial_l", "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t", "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v", "special_shifted_chebyshev_polynomial_w", "special_xlog1py",
    "special_zeta", "sub", "where", "xlogy",
})  # fmt: skip
#: Operations that accept it only as these arguments.
_AS: Final = {
    "_index_put_impl": frozenset({"values"}),
    "_unsafe_index_put": frozenset({"values"}),
    "bernoulli": frozenset({"p"}),
    "binary_cross_entropy_with_logits": frozenset({"pos_weight", "weight"}),
    "fill": frozenset({"value"}),
    "index_fill": frozenset({"value"}),
    "index_put": frozenset({"values"}),
    "linspace": frozenset({"end", "start"}),
    "logspace": frozenset({"end", "start"}),
    "masked_fill": frozenset({"value"}),
    "randint_like": frozenset({"high"}),
    "select_scatter": frozenset({"src"}),
}


def refuse_dtype(target: str, dtype: torch.dtype) -> None:
    """Raise torch's TypeError if `target` does not support the dtype.

    Torch makes some of these tensors on the device, and raises at the first operation.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in unsupported_dtypes(target):
        return
    if dtype == torch.float64:
        raise TypeError(_NO_FLOAT64)
    scalar_type = _SCALAR_TYPES.get(name, name)
    raise TypeError(f"Trying to convert {scalar_type} to the MPS backend but it does not have support for that dtype.")


def schema_of(func: Operation) -> torch.FunctionSchema:
    """The schema of an ATen operation: its name, and the arguments that it writes to."""
    return func._schema


def operand_devices(
    func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], name_of: Callable[[torch.device], str]
) -> list[torch.device]:
    """The device of each result of `func`: one for all, or one for each index of a foreach op's lists.

    The rule is torch's: all operands are on one device. A 0-d CPU tensor that is only read may be mixed with tensors
    of another device if the operation accepts it (`FakeTensor._find_common_device` allows it for nearly all).

    Raises:
        CrossDeviceError: if torch would refuse the operands' devices on the target.
        RuntimeError: if lengths of sequences are not on the CPU.
    """
    operation = schema_of(func).name
    if operation == "aten::_pack_padded_sequence":
        _refuse_lengths(args[1], name_of)
    if operation in COPIES:
        return [next(home_of(tensor) for _, value in bound_arguments(func, args, kwargs) for tensor in _tensors(value))]
    rows = _foreach_rows(func, args, kwargs) if "::_foreach_" in operation else [_row(func, args, kwargs)]
    devices = [_common_device(operation, row, name_of) for row in rows]
    if operation == "aten::_pack_padded_sequence":  # its second result, the batch sizes, is always on the CPU
        devices.append(torch.device("cpu"))
    return devices


def _refuse_lengths(lengths: torch.Tensor, name_of: Callable[[torch.device], str]) -> None:
    """From aten/src/ATen/native/PackedSequence.cpp ``checkLongTensor``: lengths are read on the CPU."""
    if home_of(lengths).type != "cpu":
        dtype = lengths.type().rpartition(".")[2].removesuffix("Tensor")
        got = f"{lengths.dim()}D {name_of(home_of(lengths))} {dtype} tensor"
        raise RuntimeError(f"'lengths' argument should be a 1D CPU int64 tensor, but got {got}")


def bound_arguments(func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The passed arguments of an operation, each with its schema."""
    for position, argument in enumerate(schema_of(func).arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _binds(func: Operation, argument: Any, tensor: torch.Tensor) -> bool:
    """Whether this operand determines the device; others may be on the CPU."""
    operation = schema_of(func).name
    if argument.name in _FROM_CPU.get(operation, ()):
        return home_of(tensor).type not in {"cpu", "meta"}
    if home_of(tensor).type != "cpu":
        return True
    if "::_fused_" in operation:  # the kernels read every operand through its pointer, 0-d or not
        return bool(argument.name != "lr")
    written = argument.alias_info is not None and argument.alias_info.is_write
    return bool(written or tensor.dim() > 0 or not takes_scalar(operation, argument.name))


def _row(func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [
        tensor
        for argument, value in bound_arguments(func, args, kwargs)
        for tensor in _tensors(value)
        if _binds(func, argument, tensor)
    ]


def _foreach_rows(func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[torch.Tensor]]:
    """The operands at each index; the lists of a foreach op may span devices."""
    bound = list(bound_arguments(func, args, kwargs))
    rows: list[list[torch.Tensor]] = [[] for _ in range(max(len(_tensors(value)) for _, value in bound))]
    for argument, value in bound:
        each = value if isinstance(value, (list, tuple)) else [value] * len(rows)
        for row, item in zip(rows, each, strict=False):
            row.extend(tensor for tensor in _tensors(item) if _binds(func, argument, tensor))
    return rows


def _common_device(
    operation: str, operands: list[torch.Tensor], name_of: Callable[[torch.device], str]
) -> torch.device:
    devices = sorted(dict.fromkeys(map(home_of, operands)), key=lambda device: device.type == "cpu")
    if len(devices) > 1:
        strays = tuple(tensor for tensor in operands if home_of(tensor) != devices[0])
        raise CrossDeviceError(operation, tuple(name_of(device) for device in devices), strays)
    return devices[0] if devices else torch.device("cpu")


def takes_scalar(operation: str, argument: str) -> bool:
    """Whether an operation accepts a 0-d CPU tensor as an argument that it only reads, with tensors of the target.

    A real accelerator refuses one like any other CPU tensor, before the kernel is called
    (``c10::impl::check_and_update_common_device``), except in operations that torch lists with ``device_check:
    NoCheck``. Of those, ``TensorIterator`` accepts it if the operation allows it (``allow_cpu_scalars``; not for
    ``addcdiv``), others read it on the CPU, and composite operations accept it if their parts do. Operations from
    outside torch are assumed to accept it.
    """
    library, _, name = operation.partition("::")
    if library != "aten" or name.startswith("_foreach_"):  # foreach ops are checked for each index
        return True
    name = name if name.endswith("__") else name.removesuffix("_")
    return name in _ANYWHERE or argument in _AS.get(name, ())
