"""Table of the operations that accept a 0-d CPU tensor together with tensors of the target, by argument.

A test compares these tables with torch's own list of operations and its kernels.

A real accelerator refuses a 0-d CPU tensor like any other CPU tensor, before the kernel is called
(``c10::impl::check_and_update_common_device``), except in operations that torch lists with ``device_check: NoCheck``.
Of those, ``TensorIterator`` accepts it if the operation allows it (``allow_cpu_scalars``; not for ``addcdiv``), others
read it on the CPU, and composite operations accept it if their parts do.
"""

from __future__ import annotations

from typing import Final

#: Operations that accept it as any argument that is only read; without the underscore of in-place operations.
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


def takes_scalar(operation: str, argument: str) -> bool:
    """Whether an operation accepts a 0-d CPU tensor together with tensors of the target.

    Args:
        operation: name of the operation (`aten::masked_fill_`); operations from outside torch are assumed to accept it.
        argument: name of the argument, which is only read.
    """
    library, _, name = operation.partition("::")
    if library != "aten" or name.startswith("_foreach_"):  # foreach ops are checked for each index
        return True
    name = name if name.endswith("__") else name.removesuffix("_")
    return name in _ANYWHERE or argument in _AS.get(name, ())
