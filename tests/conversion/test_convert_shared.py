"""Objects with several paths or parts are converted as one object."""

from __future__ import annotations

import pytest

import ckptmove
from ckptmove.errors import UncastableDtype

torch = pytest.importorskip("torch")


class Wrapper(torch.Tensor):
    """A subclass without a storage, as quantization libraries have them."""

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype, device=elem.device)

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[arg.elem if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))


@pytest.fixture
def convert(tmp_path):
    """Save an object, convert the file, and return the plan with the devices that the output names by path."""

    def run(obj: object, **options: object):
        source, output = tmp_path / "source.pt", tmp_path / "moved.pt"
        torch.save(obj, source)
        plan = ckptmove.convert(str(source), output=str(output), force=True, **options).plan
        inventory = ckptmove.inspect(str(output)).inventory
        named = {mention.where: mention.value for mention in inventory.mentions}
        return plan, {tensor.name: tensor.device for tensor in inventory.tensors} | named

    return run


@pytest.mark.parametrize("kept", ["model.a", "model.b"])
def test_a_tied_tensor_stays_under_each_of_its_names(convert, kept) -> None:
    tied = torch.ones(3)
    plan, devices = convert({"model": {"a": tied, "b": tied, "c": torch.ones(2)}}, to="cuda:0", keep=[kept])
    assert devices == {"model.a": "cpu", "model.b": "cpu", "model.c": "cuda:0"}
    assert [(entry.name, entry.reason) for entry in plan.kept] == [("model.a", "keep"), ("model.b", "keep")]


@pytest.mark.parametrize("kept", ["args.device", "ema.device"])
def test_a_device_that_hangs_on_two_paths_stays_on_both(convert, kept) -> None:
    device = torch.device("cpu")
    objects = {"model": {"w": torch.ones(2)}, "args": {"device": device}, "ema": {"device": device}}
    plan, devices = convert(objects, to="cuda:0", keep=[kept])
    assert devices == {"model.w": "cuda:0", "args.device": "cpu", "ema.device": "cpu"}
    assert not plan.flags


def test_a_config_that_hangs_on_two_paths_stays_on_both(convert) -> None:
    config = {"device": "cpu"}
    objects = {"model": {"w": torch.ones(2)}, "args": config, "hparams": config, "other": {"device": "cpu"}}
    _, devices = convert(objects, to="cuda:0", keep=["hparams.*"], rewrite_strings=True)
    assert devices == {
        "model.w": "cuda:0", "args.device": "cpu", "hparams.device": "cpu", "other.device": "cuda:0",
    }  # fmt: skip


@pytest.mark.parametrize("kept", ["first.*capturable", "second.*capturable"])
def test_a_group_that_hangs_on_two_paths_keeps_its_flags_on_both(convert, kept) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = torch.optim.Adam([weight]).state_dict()
    state["param_groups"][0]["capturable"] = True
    plan, _ = convert({"first": state, "second": state}, to="cpu", keep=[kept])
    assert not plan.flags


def test_the_parts_of_sparse_tensors_that_share_some_stay_together(convert) -> None:
    indices = torch.tensor([[0, 2]])
    first, second = (
        torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
        for values in (torch.ones(2), torch.zeros(2))
    )
    assert first._indices().data_ptr() == second._indices().data_ptr()
    plan, devices = convert({"a": first, "b": second, "c": torch.ones(1)}, to="cuda:0", keep=["a"])
    assert devices == {"a": "cpu", "b": "cpu", "c": "cuda:0"}
    assert {edit.names for edit in plan.edits} == {("c",)}


# --- wrapper subclasses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "home"),
    [
        ({"to": "cuda:0"}, "cuda:0"),
        ({"to": "mps"}, "mps"),
        ({"map_location": {"cpu": "cuda:1"}}, "cuda:1"),
        ({"to": "cuda:0", "keep": ["model.w"]}, "cpu"),
        ({"to": "cuda:0", "keep": ["model.w.elem"]}, "cpu"),
        ({"to": "cuda:0", "keep": ["model.w.device"]}, "cpu"),
        ({"to": "cuda:0", "keep": ["model.tied"]}, "cpu"),
    ],
)
def test_a_wrapper_is_where_its_values_are(convert, options, home) -> None:
    wrapper = Wrapper(torch.ones(3))
    plan, devices = convert({"model": {"w": wrapper, "tied": wrapper, "u": torch.ones(2)}}, **options)
    stays = home == "cpu"
    assert devices.pop("model.u") != "cpu"
    assert devices.keys() == {f"model.{name}{end}" for name in ("w", "tied") for end in ("", ".elem", ".device")}
    assert set(devices.values()) == {home}
    assert [entry.name for entry in plan.kept] == (
        ["model.w", "model.w.elem", "model.tied", "model.tied.elem"] if stays else []
    )


def test_a_wrapper_far_from_the_model_moves_with_its_values_too(convert) -> None:
    _, devices = convert(
        {"model": {"w": torch.ones(2)}, "extra": Wrapper(torch.ones(3))}, to="cuda:0", keep=["model.*"]
    )
    assert devices == {"model.w": "cpu", "extra": "cuda:0", "extra.elem": "cuda:0", "extra.device": "cuda:0"}


def test_a_wrapper_alone_in_a_file_there_and_back(tmp_path) -> None:
    source, away, back = (tmp_path / name for name in ("source.pt", "away.pt", "back.pt"))
    torch.save(Wrapper(torch.arange(3.0)), source)
    ckptmove.convert(str(source), to="mps", output=str(away))
    assert [tensor.device for tensor in ckptmove.inspect(str(away)).inventory.tensors] == ["mps", "mps"]
    ckptmove.convert(str(away), to="cpu", output=str(back))
    assert torch.equal(torch.load(back, weights_only=False).elem, torch.arange(3.0))


@pytest.mark.parametrize("cast", [False, True])
def test_a_wrapper_is_never_cast_by_half(convert, cast) -> None:
    with pytest.raises(UncastableDtype) as caught:
        convert({"w": Wrapper(torch.ones(3, dtype=torch.float64))}, to="mps", cast=cast)
    assert caught.value.tensors == (("w", "float64"), ("w.elem", "float64"))
    assert caught.value.reason == "its Tensor subclass stores the dtype a second time"


def test_what_is_inside_of_a_wrapper_is_not_cast_either(convert) -> None:
    wrapper = Wrapper(torch.ones(3))
    wrapper.scale = torch.ones(1, dtype=torch.float64)
    with pytest.raises(UncastableDtype) as caught:
        convert({"w": wrapper}, to="mps", cast=True)
    assert caught.value.tensors == (("w.scale", "float64"),)
    _, devices = convert({"w": wrapper, "v": torch.ones(1, dtype=torch.float64)}, to="mps", cast=True, keep=["w"])
    assert devices["v"] == "mps"
