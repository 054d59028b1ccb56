"""Matching by shape only."""

from __future__ import annotations

from ckptmove.checkpoint.pairing import match_unordered
from ckptmove.model import TensorRecord

W, B = (4, 4), (4,)


def tensor(name, shape, dtype="float32"):
    return TensorRecord(name, "model", "cpu", dtype, shape, (), name, 0, 0)


def match(states, *tensors):
    found = match_unordered(states, tensors)
    if found is None:
        return None
    return [None if one is None else one.name for one in found[0]], found[1]


def test_each_shape_once_is_certain() -> None:
    states = [(W, "float32"), (B, "float32")]
    assert match(states, tensor("b", B), tensor("w", W)) == (["w", "b"], True)
    assert match(states, tensor("b", B), tensor("w", W), tensor("x", (9,))) == (["w", "b"], True)


def test_among_tensors_of_one_shape_people_count() -> None:
    names = ["layer.10", "layer.2", "layer.02"]
    found = match([(B, "float32")] * 3, *(tensor(name, B) for name in names))
    assert found == (["layer.02", "layer.2", "layer.10"], False)


def test_a_shape_that_others_have_too_is_not_certain() -> None:
    assert match([(B, "float32")], tensor("a", B), tensor("b", B)) == (["a"], False)


def test_the_dtype_of_a_moment_is_likely_that_of_its_parameter() -> None:
    states = [(B, "float32"), (B, "bfloat16"), (B, "float32")]
    found = match(states, tensor("a", B, "bfloat16"), tensor("b", B), tensor("c", B, "bfloat16"))
    assert found == (["b", "a", "c"], False)


def test_what_does_not_fit_is_no_match() -> None:
    assert match([(B, "float32")] * 2, tensor("a", B)) is None
    assert match([(W, "float32")], tensor("a", B)) is None


def test_a_parameter_of_which_nothing_is_known_is_left_out() -> None:
    assert match([None, (B, "float32")], tensor("a", B), tensor("w", W)) == ([None, "a"], True)


def test_where_nothing_is_known_of_any_the_next_will_do() -> None:
    assert match([None, None], tensor("b", B), tensor("a", W), tensor("c", B)) == (["a", "b"], False)
    assert match([None], tensor("b", B)) == (["b"], True)
