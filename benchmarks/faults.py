"""Injected faults, each with the finding or the check that has to find it."""

from __future__ import annotations

import os
import struct
import zipfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trained import EXAMPLES, LAYOUTS, Training, device_by_path, example_tree

from ckptmove.proof.place import find_site

if TYPE_CHECKING:
    from collections.abc import Callable

    from trained import Tree

    Where = tuple[str, ...]

_CUDA = device_by_path("cuda:0", "AdamW")
#: Device of the step: cuda:0, or cpu if this torch cannot simulate a device.
_STEP = "cpu" if find_site("cuda:0").reason else "cuda:0"
_STEPPED = device_by_path(_STEP, "AdamW")


def _leave(_path: Path) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """A checkpoint with one fault.

    Attributes:
        name: the fault.
        caught_by: code of a finding, or name of a check.
        spoil: changes the tree before it is saved, or returns another dict.
        place: the device of each tensor, by its path.
        layout: key of ``LAYOUTS``.
        damage: changes the saved file or directory.
        to: the target.
        against: whether it is compared with the original checkpoint.
        unseen: reason why no check can find it; empty if one does.
        options: other options of ``verify``.
    """

    name: str
    caught_by: str
    spoil: Callable[[Tree], Any] = lambda tree: tree
    place: Callable[[Where], str] = _CUDA
    layout: str = "plain"
    damage: Callable[[Path], None] = _leave
    to: str | None = "cuda:0"
    against: bool = False
    unseen: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """Write the checkpoint; return its path and the options of ``verify``."""
        tree = Training("AdamW").train(3).tree()
        options: dict[str, Any] = {"to": self.to, **self.options}
        if self.against:
            options["against"] = LAYOUTS[self.layout](tree, folder / "original", _CUDA)
        changed = self.spoil(tree)
        path = LAYOUTS[self.layout](changed if isinstance(changed, dict) else tree, folder, self.place)
        self.damage(Path(path))
        return path, options


def _state(tree: Tree, key: int = 0) -> Any:
    return tree["optimizer"]["state"][key]


def _group(tree: Tree) -> Any:
    return tree["optimizer"]["param_groups"][0]


def _set(place: Callable[[Tree], Any], key: Any, value: Any) -> Callable[[Tree], None]:
    def spoil(tree: Tree) -> None:
        place(tree)[key] = value

    return spoil


def _drop(place: Callable[[Tree], Any], key: Any) -> Callable[[Tree], None]:
    def spoil(tree: Tree) -> None:
        del place(tree)[key]

    return spoil


def _swap_entries(first: int, second: int) -> Callable[[Tree], None]:
    def spoil(tree: Tree) -> None:
        state = tree["optimizer"]["state"]
        state[first], state[second] = state[second], state[first]

    return spoil


def _swap_moments(tree: Tree) -> None:
    state = _state(tree)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def _fill(name: str, value: float) -> Callable[[Tree], None]:
    def spoil(tree: Tree) -> None:
        for state in tree["optimizer"]["state"].values():
            state[name].fill_(value)

    return spoil


def _zero_moments(tree: Tree) -> None:
    for state in tree["optimizer"]["state"].values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def _half(tree: Tree) -> None:
    _state(tree)["exp_avg"] = _state(tree)["exp_avg"].half()


def _integers(tree: Tree) -> None:
    _state(tree)["exp_avg"] = torch.ones(5, 6, dtype=torch.int64)


def _split(tree: Tree) -> None:
    group = _group(tree)
    tree["optimizer"]["param_groups"] = [{**group, "params": list(range(4))}, {**group, "params": list(range(4, 8))}]


def _one_bit(tree: Tree) -> None:
    _state(tree)["exp_avg"].view(torch.int32)[0, 0] ^= 1


def _double(tree: Tree) -> Tree:
    for state in tree["optimizer"]["state"].values():
        state.update(exp_avg=state["exp_avg"].double(), exp_avg_sq=state["exp_avg_sq"].double())
    return {**tree, "model": {key: value.double() for key, value in tree["model"].items()}}


def _flag(name: str) -> Callable[[Tree], None]:
    return _set(_group, name, True)  # the value of the flag


def _another_width(tree: Tree) -> None:
    """Replace the optimizer by that of a model whose layers have 9 features instead of 5."""
    model = torch.nn.Sequential(*[torch.nn.Linear(*shape) for shape in ((6, 9), (9, 6), (6, 9), (9, 6))])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    tree["optimizer"] = {**optimizer.state_dict(), "param_groups": tree["optimizer"]["param_groups"]}


def _only_model(tree: Tree) -> Tree:
    return {"model": tree["model"], "optimizer": tree["optimizer"]}


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("true",)


def _on(device: str, *words: str) -> Callable[[Where], str]:
    """Devices as in a healthy run, except for the tensors under some keys."""
    return lambda path: device if set(words) & set(path) else _CUDA(path)


def _rewritten(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            records = [(item.filename, archive.read(item)) for item in archive.infolist()]
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in records:
                archive.writestr(name, change(name, content))

    return damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("checkpoint/data/0").header_offset
        at = content.index(archive.read("checkpoint/data/0"), start)
    content[at] ^= 1
    path.write_bytes(content)


def _change_data(content: bytearray, begin: int) -> None:
    """Change a byte of the first storage after a position."""
    header = content.rindex(b"PK\x03\x04", 0, content.index(b"/data/0", begin))
    name, extra = struct.unpack_from("<HH", content, header + 26)
    content[header + 30 + name + extra] ^= 1


def _flip_in_piece(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    _change_data(content, 0)
    path.write_bytes(content)


def _cut_off(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 100)


def _flip_in_member(path: Path) -> None:
    content = bytearray(path.read_bytes())
    _change_data(content, content.index(b"policy.pth"))
    path.write_bytes(content)


def _shorten(name: str, content: bytes) -> bytes:
    return content[:8] if name.endswith("data/0") else content


def _nothing(_tree: Tree) -> None:
    pass


def _of_example(name: str, spoil: Callable[[Tree], None]) -> Callable[[Tree], Tree]:
    def other(_tree: Tree) -> Tree:
        tree = example_tree(name)
        spoil(tree)
        return tree

    return other


def _swap_keys(one: str, other: str) -> Callable[[Tree], None]:
    def spoil(tree: Tree) -> None:
        tree[one], tree[other] = tree[other], tree[one]

    return spoil


def _case(name: str, function: str = "case") -> dict[str, Any]:
    return {"case": f"{EXAMPLES / name}.py:{function}"}


#: Faults that only a step of the user's model shows, on a device other than the CPU.
_ON_A_DEVICE = (
    Fault("the images of a discriminator left on the CPU", "case", _of_example("gan", _nothing), to=_STEP,
          options=_case("gan", "broken")),
    Fault("the batch of a module with its own loss left on the CPU", "case",
          _of_example("lightning_module", _nothing), to=_STEP, options=_case("lightning_module", "broken")),
)  # fmt: skip


def _extend(name: str, content: bytes) -> bytes:
    """Insert an extension code of ``copyreg`` into the object pickle, and pop its value."""
    return content[:2] + b"\x82\x050" + content[2:] if name.endswith("data.pkl") else content


def _call_before(path: Path) -> None:
    """Insert a shell command into the second pickle of a file in the format before torch 1.6."""
    tree = torch.load(path, map_location="cpu", weights_only=True)
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    call = b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R0M\xe9\x03."
    path.write_bytes(path.read_bytes().replace(b"\x80\x02M\xe9\x03.", call, 1))


_NO_ORIGINAL = "the file does not store the original value: use --against with the original"

FAULTS = (
    Fault("a layer on another device", "D101", place=_on("cpu", "1.weight")),
    Fault("the optimizer left on the CPU", "D102", place=_on("cpu", "exp_avg", "exp_avg_sq")),
    Fault(
        "a device that the machine lacks",
        "D103",
        place=device_by_path("cuda:3", "AdamW"),
        to=None,
        options={"devices": 1},
    ),
    Fault("a config with another device", "D104", _set(lambda tree: tree, "device", torch.device("cuda:1"))),
    Fault("step counts dragged to the GPU", "O201", place=_on("cuda:0", "step")),
    Fault("capturable for the CPU", "O202", _flag("capturable"), place=lambda _: "cpu", to="cpu"),
    Fault("fused with counts on the CPU", "O203", _flag("fused")),
    Fault("a moment of another width", "O204", lambda tree: _state(tree).update(exp_avg=torch.zeros(5, 7))),
    Fault("the optimizer of a model of another width", "O204", _another_width),
    Fault("the optimizer of another width in a Trainer folder", "O204", _another_width, layout="hf-trainer"),
    Fault("the state of one parameter lost", "O205", _drop(lambda tree: tree["optimizer"]["state"], 2)),
    Fault("more parameters than the model has", "O206", _set(_group, "params", list(range(40)))),
    Fault("one parameter too many in a Trainer folder", "O206", _set(_group, "params", list(range(9))),
          layout="hf-trainer"),
    Fault("a second moment lost", "O207", _drop(_state, "exp_avg_sq")),
    Fault("weight_decay lost", "step", _drop(_group, "weight_decay"), place=_STEPPED, to=_STEP),
    Fault("a stale step count, without the original", "O209", lambda tree: _state(tree)["step"].fill_(1.0)),
    Fault("states of two shapes swapped", "O208", _swap_entries(0, 1)),
    Fault("random states on the GPU", "R301", place=_on("cuda:0", "rng")),
    Fault("no scheduler, no random states", "R302", _only_model),
    Fault(
        "random states of four GPUs",
        "R303",
        _set(lambda tree: tree["rng"], "cuda", [torch.zeros(16, dtype=torch.uint8)] * 4),
        options={"devices": 1},
    ),
    Fault("a scheduler with another learning rate", "R304", _set(_group, "lr", 0.5)),
    Fault("float64 for mps", "T401", _double, place=device_by_path("mps", "AdamW"), to="mps"),
    Fault("float8 for mps", "T401", _set(lambda tree: tree, "teacher", torch.zeros(8).to(torch.float8_e4m3fn)),
          place=device_by_path("mps", "AdamW"), to="mps"),
    Fault("NaN in a weight", "N501", lambda tree: tree["model"]["0.weight"][0].fill_(torch.nan)),
    Fault("Inf in a moment", "N501", _fill("exp_avg", torch.inf)),
    Fault("negative second moments", "N502", _fill("exp_avg_sq", -1.0)),
    Fault("a negative step count", "N502", _fill("step", -1.0)),
    Fault(
        "the keys of DataParallel",
        "K601",
        lambda tree: {**tree, "model": {f"module.{key}": value for key, value in tree["model"].items()}},
    ),
    Fault("an argparse.Namespace", "S701", _set(lambda tree: tree, "args", Namespace(lr=1))),
    Fault("a shell command", "S702", _set(lambda tree: tree, "run", _Runs())),
    Fault("a shell command before the object", "S702", damage=_call_before),
    Fault("a shell command before the object fails the file", "file", damage=_call_before),
    Fault("an extension code", "S702", damage=_rewritten(_extend)),
    Fault("an extension code fails the file", "file", damage=_rewritten(_extend)),
    Fault("a set", "S703", _set(lambda tree: tree, "frozen", {"model.0"})),
    Fault("a changed byte", "F801", damage=_flip),
    Fault("a storage cut off", "F802", damage=_rewritten(_shorten)),
    Fault("zipped again", "F803", damage=_rewritten(lambda _, content: content, zipfile.ZIP_DEFLATED)),
    Fault("a view of four rows of a large table", "F804", _set(lambda tree: tree, "rows", torch.zeros(9000, 4)[:4])),
    # --- faults that checks find --------------------------------------------------------------------------------------
    Fault("a changed byte fails the file", "file", damage=_flip),
    Fault("an invalid random state", "restore", lambda tree: tree["rng"]["cpu"].zero_()),
    Fault("one changed bit", "restore", _one_bit, against=True),
    Fault("a moment in another dtype", "O210", _half, against=True),
    Fault("an original from another run", "restore", lambda _: Training("AdamW").train(4).tree(), against=True),
    Fault("another weight_decay", "restore", _set(_group, "weight_decay", 0.5), against=True),
    Fault("one group split into two", "restore", _split, against=True),
    Fault("a changed byte in a piece", "F801", layout="distributed", damage=_flip_in_piece),
    Fault("a changed byte in a piece fails the file", "file", layout="distributed", damage=_flip_in_piece),
    Fault("a piece cut off", "F802", layout="distributed", damage=_cut_off),
    Fault("a piece cut off fails the restore", "restore", layout="distributed", damage=_cut_off),
    Fault("one changed bit of a distributed checkpoint", "restore", _one_bit, layout="distributed", against=True),
    Fault("another weight_decay in a distributed checkpoint", "restore", _set(_group, "weight_decay", 0.5),
          layout="distributed", against=True),
    Fault("a step count of zero in a distributed checkpoint", "numbers", _fill("step", 0.0), layout="distributed"),
    Fault("a moment of another width in a distributed checkpoint", "structure",
          lambda tree: _state(tree).update(exp_avg=torch.zeros(5, 7)), layout="distributed"),
    Fault("a changed byte in a member", "F801", layout="archive", damage=_flip_in_member),
    Fault("one changed bit of a member", "restore", _one_bit, layout="archive", against=True),
    Fault("another weight_decay in a member", "restore", _set(_group, "weight_decay", 0.5), layout="archive",
          against=True),
    Fault("states of two shapes swapped in a member", "O208", _swap_entries(0, 1), layout="archive"),
    Fault("states of one shape swapped", "parity", _swap_entries(0, 4), against=True, place=_STEPPED, to=_STEP),
    Fault("a stale step count", "parity", lambda tree: _state(tree)["step"].fill_(1.0), against=True,
          place=_STEPPED, to=_STEP),
    Fault("random states on the GPU fail placement", "placement", place=_on("cuda:0", "rng")),
    Fault("a tensor lr on another GPU", "placement", _set(_group, "lr", torch.tensor(1e-3)), place=_on("cuda:1", "lr")),
    Fault("a moment of another width fails the structure", "structure",
          lambda tree: _state(tree).update(exp_avg=torch.zeros(5, 7))),
    Fault("the optimizer of another width in a Trainer folder fails the structure", "structure", _another_width,
          layout="hf-trainer"),
    Fault("one parameter too many in a Trainer folder fails the structure", "structure",
          _set(_group, "params", list(range(9))), layout="hf-trainer"),
    Fault("a parameter of the model missing", "structure",
          lambda tree: {**tree, "model": {"0.weight": tree["model"]["0.weight"]}, "ema": {}}),
    Fault("a parameter listed twice", "structure", lambda tree: _group(tree)["params"].append(0)),
    Fault("a step count of zero with moments", "numbers", _fill("step", 0.0)),
    Fault("a step count that is not an integer", "numbers", _fill("step", 2.5)),
    Fault("a loss scale of NaN", "N503", _set(lambda tree: tree["scaler"], "scale", float("nan"))),
    Fault("a scheduler with a rate of NaN", "numbers",
          _set(lambda tree: tree["scheduler"], "base_lrs", [float("nan")])),
    Fault("an infinite learning rate", "step", _set(_group, "lr", float("inf")), place=_STEPPED, to=_STEP),
    Fault("betas of 1", "step", _set(_group, "betas", (1.0, 0.999)), place=_STEPPED, to=_STEP),
    Fault("a moment of an integer dtype", "step", _integers, place=_STEPPED, to=_STEP),
    Fault("the two moments of a parameter swapped", "N502", _swap_moments),
    Fault("the two models of a GAN swapped", "case", _of_example("gan", _swap_keys("netG", "netD")),
          place=_STEPPED, to=_STEP, options=_case("gan")),
    Fault("the two optimizers of a GAN swapped", "case", _of_example("gan", _swap_keys("optimizerG", "optimizerD")),
          place=_STEPPED, to=_STEP, options=_case("gan")),
    Fault("the weight of a module's own loss lost", "case",
          _of_example("lightning_module", _drop(lambda tree: tree["model"], "loss_fn.pos_weight")), place=_STEPPED,
          to=_STEP, options=_case("lightning_module")),
    *(_ON_A_DEVICE if _STEP != "cpu" else ()),
    Fault("all moments zero after three steps", "fresh", _zero_moments, place=_STEPPED, to=_STEP),
    # --- faults not visible in a file alone ---------------------------------------------------------------------------
    Fault("another weight_decay, without the original", "step", _set(_group, "weight_decay", 0.5),
          place=_STEPPED, to=_STEP, unseen=_NO_ORIGINAL),
    Fault("states of one shape swapped, without the original", "step", _swap_entries(0, 4),
          place=_STEPPED, to=_STEP, unseen=_NO_ORIGINAL),
)  # fmt: skip
