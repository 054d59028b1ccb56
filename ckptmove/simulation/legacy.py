"""Legacy tensor types of a simulated device: `torch.cuda.FloatTensor`."""

from __future__ import annotations

from typing import Any, Final

import torch

from ckptmove.simulation import targets

#: The dtype of each type.
_DTYPES: Final = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


_SET_DEFAULT_TYPE: Final = torch.set_default_tensor_type


class _Type(type):
    """Metaclass of the types: a call makes a tensor, and tensors are instances."""

    dtype: torch.dtype
    kind: str

    def __call__(cls, *args: Any) -> torch.Tensor:
        is_data = len(args) == 1 and not isinstance(args[0], (int, torch.Size))
        if is_data:
            return torch.tensor(args[0], dtype=cls.dtype, device=cls.kind)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=cls.kind)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.Tensor) and (one.dtype, one.device.type) == (cls.dtype, cls.kind)


def tensor_types(kind: str) -> dict[str, object]:
    """The types of a device type, by name."""
    return {name: _Type(name, (), {"dtype": dtype, "kind": kind}) for name, dtype in _DTYPES.items()}


def set_default_tensor_type(t: Any) -> None:
    """`torch.set_default_tensor_type`: the dtype and the device of new tensors.

    Args:
        t: a type, or its full name; the parameter has torch's name.
    """
    found = meant_by(t)
    if found is None:
        torch.set_default_device(None)
        _SET_DEFAULT_TYPE(t)
    else:
        torch.set_default_dtype(found[1])
        torch.set_default_device(targets.shown(found[0]))


def meant_by(asked: Any) -> tuple[torch.device, torch.dtype] | None:
    """The simulated device and the dtype of a type, or of its full name; None for another argument.

    Raises:
        AssertionError: if the target's machine has no CUDA device, with torch's message.
    """
    if isinstance(asked, _Type):
        return targets.translated(asked.kind), asked.dtype
    library, _, rest = asked.partition(".") if isinstance(asked, str) else ("", "", "")
    kind, _, name = rest.partition(".")
    device = targets.translated(kind) if library == "torch" and name in _DTYPES else kind
    return (device, _DTYPES[name]) if isinstance(device, torch.device) else None
