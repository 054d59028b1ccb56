"""Operations that run on the CPU as a whole: on compressed sparse tensors, and eager FlexAttention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ckptmove.proof.processes.uncompiled import uncompiled_calls
from ckptmove.simulation.errors import NotSimulated, unsupported_operation

LAYOUTS = {
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
}
PRODUCTS = {
    "@": lambda sparse, dense: sparse @ dense,
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.addmm(dense, sparse, dense),
}


def graph() -> torch.Tensor:
    return torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_of_a_compressed_tensor_is_that_of_the_cpu(cuda, product):
    values = torch.arange(6.0).reshape(3, 2)
    expected = values.clone().requires_grad_()
    reference = PRODUCTS[product](graph().to_sparse_csr(), expected)
    (reference * reference).sum().backward()
    with cuda:
        dense = values.to("cuda").requires_grad_()
        result = PRODUCTS[product](graph().to_sparse_csr().to("cuda"), dense)
        assert (result.device, result.layout) == (torch.device("cuda:0"), torch.strided)
        (result * result).sum().backward()
        assert torch.equal(cuda.to_cpu(result), reference)
        assert torch.equal(cuda.to_cpu(dense.grad), expected.grad)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compressed_layout_is_shown_and_read(cuda, layout):
    with cuda:
        sparse = LAYOUTS[layout](graph().to("cuda"))
        assert (sparse.device, sparse.layout) == (torch.device("cuda:0"), LAYOUTS[layout](graph()).layout)
        assert torch.equal(cuda.to_cpu(sparse.to_dense()), graph())
        assert (sparse * 2).layout == sparse.layout


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_gradient_of_a_compressed_tensor_is_not_simulated(cuda):
    with cuda:
        sparse = graph().to("cuda").to_sparse_csr()
        with pytest.raises(NotSimulated):
            sparse.requires_grad = True


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compressed_tensor_and_one_on_the_cpu_have_no_product(cuda):
    with cuda, pytest.raises(NotSimulated):
        torch.sparse.mm(graph().to("cuda").to_sparse_csr(), torch.ones(3, 2))


WHOLE = {
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "lstm": lambda x: nn.LSTM(3, 3).to(x.device)(x)[0],
    "renorm": lambda x: torch.renorm(x, 2, 0, 0.5),
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
}


def on_both(cuda, function):
    """The result of a function of a tensor on the CPU and on the device; the parameters that it makes are the same."""
    results = []
    with cuda:
        for home in ("cpu", "cuda"):
            torch.manual_seed(0)
            results.append(function(torch.randn(2, 4, 3).to(home).requires_grad_()).cpu())
    return results


@pytest.mark.parametrize("name", sorted(WHOLE.keys() - {"attention"}))  # the CPU has no second derivative of it
def test_second_derivatives_are_those_of_the_cpu(cuda, name):
    def penalty(x):
        with torch.backends.cudnn.flags(enabled=False):
            made = WHOLE[name](x)
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        (slope.square().sum() + x.sum()).backward()
        return x.grad

    torch.testing.assert_close(*on_both(cuda, penalty))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_cudnn_has_no_second_derivative_and_none_in_evaluation(cuda, mps, kind):
    def second(layer, x):
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    with cuda:
        layer, x = kind(3, 3).cuda(), torch.ones(2, 4, 3, device="cuda", requires_grad=True)
        layer(x)[0].sum().backward()
        with pytest.raises(NotImplementedError, match="Double backwards is not supported for CuDNN RNNs") as raised:
            second(layer, x)
        assert unsupported_operation(raised.value) is None
        layer.eval()
        with pytest.raises(RuntimeError, match="can only be called in training mode"):
            layer(x)[0].sum().backward()
        with torch.backends.cudnn.flags(enabled=False):
            layer(x)[0].sum().backward()
    with mps:
        kind(3, 3).eval().to("mps")(torch.ones(2, 4, 3, device="mps"))[0].sum().backward()


@pytest.mark.parametrize("name", WHOLE)
def test_a_graph_that_is_kept_has_a_second_backward(cuda, name):
    def twice(x):
        loss = WHOLE[name](x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        return x.grad

    torch.testing.assert_close(*on_both(cuda, twice))


@pytest.mark.filterwarnings("ignore:.*is deprecated")  # torch scripts its formulas for forward mode
@pytest.mark.parametrize("name", ["attention", "svd"])
def test_function_transforms_and_forward_mode(cuda, name):
    def loss(x):
        return WHOLE[name](x).square().sum()

    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss(forward_ad.make_dual(x.detach(), torch.ones_like(x)))).tangent

    for transform in (grad(loss), lambda x: jvp(loss, (x,), (x,))[1], tangent):
        torch.testing.assert_close(*on_both(cuda, lambda x: transform(x.detach())))  # noqa: B023  # called at once
    if name == "attention":
        torch.testing.assert_close(*on_both(cuda, lambda x: vmap(grad(loss))(x.detach())))


def test_an_operation_without_parts_is_not_simulated_in_a_transform(cuda):
    with cuda, pytest.raises(NotSimulated, match="aten::renorm"):
        grad(lambda x: torch.renorm(x, 2, 0, 0.5).sum())(torch.ones(2, 2, device="cuda"))


def attention(query, key, value, bias):
    """The same without FlexAttention."""
    place = torch.arange(query.shape[2])
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores + bias[:, None, None] * (place[:, None] - place)
    return scores.masked_fill(place[:, None] < place, -torch.inf).softmax(-1) @ value


@pytest.mark.filterwarnings("ignore")
def test_attention_with_a_score_and_a_mask_of_the_user(cuda):
    torch.manual_seed(0)
    tensors, bias = [torch.randn(2, 4, 8, 16) for _ in range(3)], torch.randn(4)
    expected = [one.clone().requires_grad_() for one in tensors]
    reference = attention(*expected, bias)
    reference.square().sum().backward()
    with uncompiled_calls(), cuda:  # as in the process of a case
        given = [one.to("cuda").requires_grad_() for one in tensors]
        own = bias.to("cuda")
        mask = create_block_mask(lambda _batch, _head, i, j: i >= j, None, None, 8, 8, device="cuda")
        found = flex_attention(
            *given, score_mod=lambda score, _batch, head, i, j: score + own[head] * (i - j), block_mask=mask
        )
        assert found.device == torch.device("cuda:0")
        found.square().sum().backward()
        torch.testing.assert_close(cuda.to_cpu(found), reference.detach())
        for one, other in zip(given, expected, strict=True):
            torch.testing.assert_close(cuda.to_cpu(one.grad), other.grad)


@pytest.mark.filterwarnings("ignore")
def test_a_score_that_reads_a_tensor_on_the_cpu_is_refused(cuda):
    bias = torch.randn(4)
    with uncompiled_calls(), cuda:
        query = torch.ones(1, 4, 8, 16, device="cuda")
        with pytest.raises(RuntimeError):
            flex_attention(query, query, query, score_mod=lambda score, _batch, head, _i, _j: score + bias[head])
