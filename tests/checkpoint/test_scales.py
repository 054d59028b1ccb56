"""Quantized weights and their scales, under the names of the libraries that write them."""

from __future__ import annotations

import pytest

from ckptmove.checkpoint.scales import scaled_weights
from ckptmove.model import TensorRecord


def tensor(name: str, dtype: str, role: str = "model") -> TensorRecord:
    return TensorRecord(
        name=name,
        role=role,
        device="cpu",
        dtype=dtype,
        shape=(4,),
        stride=(1,),
        storage=name,
        storage_offset=0,
        nbytes=4,
    )


@pytest.mark.parametrize(
    ("weight", "dtype", "scale"),
    [
        ("l.weight", "float8_e4m3fn", "l.weight_scale_inv"),
        ("l.weight", "float8_e4m3fn", "l.weight_scale"),
        ("l.weight", "float8_e4m3fn", "l.scale_weight"),
        ("weight", "int8", "SCB"),
        ("l.weight", "uint8", "l.weight.absmax"),
        ("l.weight", "uint8", "l.weight.quant_map"),
        ("l.weight", "uint8", "l.weight.nested_absmax"),
        ("l.weight_packed", "int32", "l.weight_scale"),
        ("l.qweight", "int32", "l.scales"),
        ("experts.gate_up_proj_blocks", "uint8", "experts.gate_up_proj_scales"),
        ("experts.gate_up_proj", "float8_e4m3fn", "experts.gate_up_proj_scale_inv"),
    ],
)
def test_a_quantized_weight_with_its_scale(weight, dtype, scale) -> None:
    tensors = [tensor(weight, dtype), tensor(scale, "float32"), tensor("l.bias", "float32")]

    assert [(one.weight.name, one.scale.name) for one in scaled_weights(tensors)] == [(weight, scale)]


@pytest.mark.parametrize(
    "tensors",
    [
        [tensor("l.weight", "bfloat16"), tensor("l.weight_scale", "float32")],
        [tensor("l.weight", "float8_e4m3fn"), tensor("other.weight_scale", "float32")],
        [tensor("emb.ids", "int32"), tensor("emb.ids_scale", "float32")],
        [tensor("state.0", "uint8", "optimizer"), tensor("state.0.absmax", "float32", "optimizer")],
    ],
)
def test_what_is_not_quantized_with_a_scale(tensors) -> None:
    assert scaled_weights(tensors) == ()
