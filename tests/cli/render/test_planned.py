"""The counts after a conversion, compared with those of a file that was converted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmove.api.functions import convert
from ckptmove.api.inspection import InspectRequest, inspect_checkpoint
from ckptmove.cli.render.planned import conversion_of
from ckptmove.cli.render.renderer import InspectAnswer
from ckptmove.errors import UncastableDtype

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"
FILES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix not in {".py", ".json", ".md", ""})


def conversion(path, **options):
    request = InspectRequest(path=str(path), **options)
    found = inspect_checkpoint(request)
    return conversion_of(InspectAnswer(request, found, found.inventory.tensors, 0))


def counts(path):
    found = inspect_checkpoint(InspectRequest(path=str(path))).inventory.tensors
    return Counter((tensor.role, tensor.device) for tensor in found)


@pytest.mark.unmeasured
@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
@pytest.mark.parametrize("name", [*FILES, "hf-trainer-cuda3"])
def test_a_conversion_does_what_is_shown(name, device, tmp_path) -> None:
    source = SAMPLES / name
    shown = conversion(source, expect=device)
    if (name, device) == ("dtype-zoo.pt", "mps"):
        assert shown is None
        with pytest.raises(UncastableDtype):
            convert(source, to=device, cast=True, dry_run=True)
        return
    written = convert(source, to=device, cast=True, output=tmp_path / "out")
    assert counts(written.output) == (counts(source) if shown is None else shown.counts)


def test_the_command_goes_to_the_expected_device_or_else_to_that_of_the_model() -> None:
    path = SAMPLES / "optimizer-left-on-cpu.pth"
    home = next(tensor.device for tensor in inspect_checkpoint(InspectRequest(str(path))).inventory.tensors)
    assert conversion(path).command == f"ckptmove convert {path} --to {home}"
    assert conversion(path, target="mps").command.endswith(" --to mps")
    assert conversion(path, target="mps", expect="cpu").command.endswith(" --to cpu")
    assert conversion(SAMPLES / "float64-cpu.pt", expect="mps").command.endswith(" --to mps --cast")


def test_a_wrapper_subclass_moves_with_its_inner_tensors(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    source = tmp_path / "a.pth"
    torch.save({"model": {"w": wrapper_class(torch)(torch.ones(2)), "v": torch.ones(2)}}, source)
    shown = conversion(source, expect="cuda:0")
    assert shown.counts == {("model", "cuda:0"): 3}
    assert shown.counts == counts(convert(source, to="cuda:0", output=tmp_path / "b.pth").output)


def wrapper_class(torch):
    """A subclass without a storage, as quantization libraries have them."""
    global Wrapper  # noqa: PLW0603  # pickle finds a class by its name in its module

    class Wrapper(torch.Tensor):
        __qualname__ = "Wrapper"

        @staticmethod
        def __new__(cls, elem):
            return torch.Tensor._make_wrapper_subclass(cls, elem.size(), dtype=elem.dtype, device=elem.device)

        def __init__(self, elem):
            self.elem = elem

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*[getattr(arg, "elem", arg) for arg in args], **(kwargs or {}))

    return Wrapper


def test_a_format_without_devices_has_none() -> None:
    assert conversion(SAMPLES / "weights.safetensors") is None


@pytest.mark.parametrize("device", ["vendor:0", "cuda:999"])
def test_a_device_that_torch_cannot_name_has_none(device) -> None:
    request = InspectRequest(path=str(SAMPLES / "tutorial-sgd-cpu.pth"))
    found = inspect_checkpoint(request)
    tensors = tuple(tensor._replace(device=device) for tensor in found.inventory.tensors)
    found = replace(found, inventory=replace(found.inventory, tensors=tensors))
    assert conversion_of(InspectAnswer(request, found, tensors, 0)) is None
