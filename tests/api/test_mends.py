"""The options in the hint of a failed conversion: with them, it succeeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import ckptmove
from ckptmove.api import mends
from ckptmove.api.mends import arguments_of
from ckptmove.conversion.conversion import ConvertRequest
from ckptmove.errors import CkptMoveError
from ckptmove.moves import MoveRequest
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from pathlib import Path

W, HALF = torch.ones(2), torch.ones(2, dtype=torch.float16)


def training() -> dict[str, Any]:
    """Model, optimizer and an RNG state, which is a tensor at the root."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, "rng": torch.get_rng_state()}


class Opaque:
    """An object without a plain value: a call computes its class."""

    def __reduce__(self) -> Any:
        return type(self)._of, (1,)

    @staticmethod
    def _of(_: int) -> Opaque:
        return Opaque()


def shared() -> dict[str, Any]:
    part = {"x": W, "y": W.clone()}
    return {"model": {"w": W.clone()}, "a": part, "b": part}


VIEW = torch.ones(4)
#: Name: content, options of ``convert``, and the options that mend it.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "tensors beside a model": (training(), {"output": "out.safetensors"}, {"as_root": "model"}),
    "only a model": (training(), {"only": "model", "output": "out.safetensors"}, {"as_root": "model"}),
    "the model is not the first": (
        {"ema": {"w": W}, "model": {"w": W, "b": W}},
        {"output": "out.safetensors"},
        {"as_root": "model"},
    ),
    "a flat model": ({"w": W, "epoch": 3}, {"output": "out.safetensors"}, {"drop": ["epoch"]}),
    "a pickled model": (nn.Linear(2, 2), {"output": "out.safetensors"}, {"plain": True}),
    "a pickled model among others": (
        {"net": nn.Linear(2, 2), "epoch": 1},
        {"output": "out.safetensors"},
        {"as_root": "net", "plain": True},
    ),
    "no model": ({"losses": [1, 2], "n": 1}, {"drop": "n", "output": "out.safetensors"}, {"output": "out.pth"}),
    "a list": ([W, 3], {"output": "out.safetensors"}, {}),
    "a part of an object": (
        {"model": {"w": W}, "net": nn.Linear(2, 2)},
        {"drop": "net.weight"},
        {"plain": True},
    ),
    "an optimizer without its model": (training(), {"drop": "model.weight"}, {"drop": ["optimizer"]}),
    "a name that is not in the file": ({"model": {"w": W}}, {"drop": "modl"}, {}),
    "items of the root": ([W, 3], {"drop": "0"}, {}),
    "items of a list": ({"model": {"w": W}, "nets": [W, W]}, {"drop": "nets.0"}, {"drop": ["nets"]}),
    "two names of a part": (shared(), {"drop": "a.x"}, {"drop": ["b"]}),
    "a prefix of some": (
        {"model": {"net.w": W, "head.w": W}},
        {"strip_prefix": "net."},
        {"rename": ["net.*=*"], "strip_prefix": False},
    ),
    "a prefix for a pickled model": (nn.Linear(2, 2), {"add_prefix": "net."}, {"plain": True}),
    "two roles of a storage": (
        {"model": {"w": VIEW}, "ema": {"w": VIEW}},
        {"dtype": "float16"},
        {"dtype": ["ema=float16"]},
    ),
    "a model without a cast": ({"model": {"w": torch.ones(2, device="meta")}}, {"dtype": "float16"}, {}),
    "a dtype that the target lacks": ({"model": {"w": W.double()}}, {"to": "mps"}, {"cast": True}),
    "a cast in place": (
        {"model": {"w": W.double()}},
        {"to": "mps", "in_place": True},
        {"cast": True, "in_place": False},
    ),
    "a dtype without a cast": ({"model": {"w": W.to(torch.float8_e4m3fn)}}, {"to": "mps"}, {}),
}


def failed(path: Path, options: dict[str, Any]) -> CkptMoveError:
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.convert(path, **options)
    return caught.value


def given(error: CkptMoveError) -> dict[str, Any]:
    """The options of the mends; several values of one are a list."""
    found: dict[str, Any] = {}
    for one in (one for phrase in error.mends for one in arguments_of(phrase)):
        add(found, one)
    return found


def add(found: dict[str, Any], one: Argument) -> None:
    if one.name in {"drop", "rename", "dtype"}:
        found.setdefault(one.name, []).append(one.value)
    else:
        found[one.name] = one.value


def typed(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``convert`` with those of a mend."""
    both = {**options, **more}
    if "drop" in more:
        own = options.get("drop", [])
        both["drop"] = [*([own] if isinstance(own, str) else own), *more["drop"]]
    if "dtype" in more:
        both["dtype"] = {"model": options["dtype"], **dict(one.split("=") for one in more["dtype"])}
    if "rename" in more:
        both["rename"] = dict(one.split("=") for one in more["rename"])
    return both


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_conversion_succeeds_with_what_its_hint_names(name, tmp_path, monkeypatch) -> None:
    content, options, expected = CASES[name]
    monkeypatch.chdir(tmp_path)
    torch.save(content, "run.pth")

    error = failed(tmp_path / "run.pth", options)

    assert given(error) == expected
    assert not expected or all(word in error.hint for word in expected)
    assert [one.name for one in tmp_path.iterdir()] == ["run.pth"]
    if expected:
        ckptmove.convert(tmp_path / "run.pth", **typed(options, expected))


def test_several_parts_are_left_out_of_a_copy(tmp_path) -> None:
    torch.save({"model": {"w": W}, "x": Opaque(), "y": Opaque()}, tmp_path / "run.pth")
    torch.save({"model": {"w": W, "v": Opaque()}, "x": Opaque()}, tmp_path / "inside.pth")

    error = failed(tmp_path / "run.pth", {"plain": True})

    assert given(error) == {"drop": ["x", "y"]}
    assert error.hint == "leave them out: drop=['x', 'y']"
    assert given(failed(tmp_path / "inside.pth", {"plain": True})) == {"drop": ["model.v", "x"]}


def test_a_tensor_of_the_model_is_never_left_out(tmp_path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"model": {"w": jagged, "b": W}}, tmp_path / "run.pth")

    assert failed(tmp_path / "run.pth", {"plain": True}).mends == ()


def test_a_dangerous_file_has_no_remedy(tmp_path) -> None:
    import os

    torch.save({"model": {"w": W}, "x": os.system}, tmp_path / "run.pth")

    error = failed(tmp_path / "run.pth", {"plain": True})

    assert error.mends == ()
    assert error.hint.startswith("do not load it")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_distributed_checkpoint_becomes_one_file(tmp_path) -> None:
    torch.distributed.checkpoint.save({"model": {"w": W}}, checkpoint_id=tmp_path / "run", no_dist=True)

    error = failed(tmp_path / "run", {"dtype": "float16"})

    assert given(error) == {"output": f"{tmp_path}/run.pth"}
    ckptmove.convert(tmp_path / "run", dtype="float16", **given(error))


def test_another_output_does_not_exist(tmp_path) -> None:
    torch.save([W, 3], tmp_path / "run.pth")

    error = failed(tmp_path / "run.pth", {"compact": True, "output": tmp_path / "run.safetensors"})

    assert given(error) == {"output": f"{tmp_path}/run.new.pth"}


def test_an_output_in_the_way_is_no_remedy(tmp_path) -> None:
    torch.save({"w": W.double()}, tmp_path / "run.pth")
    (tmp_path / "run.mps.pth").touch()

    assert failed(tmp_path / "run.pth", {"to": "mps", "cast": True, "in_place": True}).mends == ()


@pytest.mark.parametrize(("limit", "value"), [("_TRIALS", 1), ("_STEPS", 1)])
def test_few_conversions_are_planned(limit, value, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mends, limit, value)
    torch.save({"net": nn.Linear(2, 2), "epoch": 1}, tmp_path / "run.pth")

    assert "plain" not in given(failed(tmp_path / "run.pth", {"output": tmp_path / "out.safetensors"}))


def test_a_bounded_number_of_conversions_is_tried(monkeypatch) -> None:
    """Each mend fails with another error, so that each is followed by more of them."""
    tried: list[str] = []

    def refuse(_request: Any) -> Any:
        tried.append("")
        raise CkptMoveError(f"refused {len(tried)} times")

    monkeypatch.setattr(mends, "convert", refuse)
    monkeypatch.setattr(mends, "_mends", lambda *_: iter([Phrase("leave it out: ", Argument("drop", "a"))] * 5))
    error = CkptMoveError("refused")
    mends.mend(error, ConvertRequest(path="a.pth", move=MoveRequest("cpu")))
    assert (len(tried), error.mends) == (8, ())
