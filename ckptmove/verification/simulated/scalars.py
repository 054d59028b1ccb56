"""Which operations take a 0-d CPU tensor beside tensors of the target, and as which of their arguments.

Never asks what is installed: a test holds these tables against torch's own list of operations and its kernels.

A real accelerator refuses such a tensor as it does any other, before the kernel is called
(``c10::impl::check_and_update_common_device``), save in operations that torch lists with ``device_check: NoCheck``.
Of those, ``TensorIterator`` takes it where it is told to (``allow_cpu_scalars``; not for ``addcdiv``), others read it
on the CPU, and what is composite takes it where its parts do.
"""

from __future__ import annotations

from typing import Final

#: By name, without the underscore of what is done in place: as any argument that is only read.
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
#: As these arguments alone.
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


def takes_scalar(operation: str, argument: str) -> bool:
    """Whether an operation takes a 0-d CPU tensor beside those of the target.

    Args:
        operation: its name, as in `aten::masked_fill_`; of one that is not torch's nothing is known, and it takes it.
        argument: that the tensor is given as, and that is only read.
    """
    library, _, name = operation.partition("::")
    if library != "aten" or name.startswith("_foreach_"):  # index by index, and by operations of any kind
        return True
    name = name if name.endswith("__") else name.removesuffix("_")
    return name in _ANYWHERE or argument in _AS.get(name, ())
