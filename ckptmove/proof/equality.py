"""Compare two tensors: bit for bit, or within the tolerances of ``torch.testing.assert_close``."""

from __future__ import annotations

from typing import Final

import torch

#: Relative and absolute tolerances of ``torch.testing.assert_close``, by dtype.
TOLERANCES: Final[dict[torch.dtype, tuple[float, float]]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agreement(reference: str, *, exact: bool) -> str:
    """How results without a :func:`difference` agree with those of a reference, as text."""
    how = "bit for bit" if exact else "within the tolerances of torch.testing (float32: 1.3e-06, 1e-05)"
    return f"equal {how} to {reference}"


def difference(value: torch.Tensor, reference: torch.Tensor, *, exact: bool = True) -> str:
    """How two tensors differ, as text that follows *differs*; empty if they agree."""
    if form := other_form(value, reference.dtype, tuple(reference.shape)):
        return f": {form}"
    relative, absolute = TOLERANCES.get(value.dtype, (0.0, 0.0))
    if same_bits(value, reference) or (
        not exact and torch.allclose(value, reference, rtol=relative, atol=absolute, equal_nan=True)
    ):
        return ""
    apart = (bits(value) != bits(reference)).reshape(value.numel(), -1).any(dim=1)  # two numbers if complex
    return f" in {int(apart.sum()):,} of {value.numel():,} elements, by up to {gap(value, reference):.3g}"


def gap(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of two tensors with elements."""
    return float((value.to(torch.complex128) - reference.to(torch.complex128)).abs().max())


def other_form(
    value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
) -> str:
    """How a tensor differs in form from a dtype, a shape and a stride, if there is one; empty if it does not."""
    for what, wanted, found in (
        ("dtype", dtype, value.dtype),
        ("shape", shape, tuple(value.shape)),
        ("stride", stride, None if stride is None else tuple(value.stride())),
    ):
        if wanted != found:
            return f"{what} {found} in place of {wanted}"
    return ""


def has_values(now: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a tensor has the stored values, in its own dtype, bit for bit."""
    return same_bits(now.detach(), stored.detach().to(now.dtype))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements as integers, to compare bits: NaN equals itself, -0.0 differs from 0.0."""
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).view(_INTEGERS[flat.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits, compared as by :func:`bits`."""
    return one.shape == other.shape and same_integers(bits(one), bits(other))


def same_integers(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat integer tensors of one dtype are equal.

    Torch compares one element at a time. If both are aligned, eight bytes are one element.
    """
    per_word = 8 // one.element_size()
    if one.shape != other.shape:
        return False
    is_dense = one.stride() == other.stride() == (1,)  # a strided tensor of one axis stays strided
    if per_word == 1 or not is_dense or one.storage_offset() % per_word or other.storage_offset() % per_word:
        return torch.equal(one, other)
    end = one.numel() // per_word * per_word
    same = torch.equal(one[:end].view(torch.int64), other[:end].view(torch.int64))
    return same and torch.equal(one[end:], other[end:])
