"""Tensors that are read in one step give the inventory of those that are read operation by operation."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from ckptmove.checkpoint.inventory.walk import Walk
from ckptmove.errors import CkptMoveError, DamagedPickle
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles import plain_tensors
from ckptmove.pickles.compact_memo import NeedsEveryOperation
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.plain_tensors import interpret_tensors
from ckptmove.pickles.tree import PlainTensor, nodes

LIMITS = Limits()
#: As many tensors as put 256 values into the memo.
BEGIN = 40


def pickled(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    with zipfile.ZipFile(file) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def inventory(machine):
    walk = Walk(LIMITS, len(machine.data))
    walk.reader.gather(machine.persistents)
    walk.run(machine.root)
    storages = [one._replace(tag_sites=(), class_sites=()) for one in walk.reader.storages()]
    optimizers = [draft.freeze() for draft in walk.optimizers]
    return walk.tensors, storages, walk.reader.overruns, optimizers, walk.mentions, machine.globals, machine.foreign


def compact(data):
    try:
        return inventory(interpret_tensors(data, LIMITS))
    except (DamagedPickle, NeedsEveryOperation):
        return inventory(interpret(data, LIMITS))


def outcome(read, data):
    try:
        return read(data)
    except CkptMoveError as error:
        return type(error), str(error)


def plain(data):
    return sum(isinstance(node, PlainTensor) for node in nodes(interpret_tensors(data, LIMITS).root))


def model(**more):
    return {f"layers.{n}.weight": torch.full((2, n % 3 + 1), 1.0) for n in range(BEGIN)} | more


def trees():
    weights = torch.arange(24.0).view(2, 3, 4)
    shapes = {f"{n}": torch.zeros([1] * n) for n in range(6)}
    dtypes = {str(dtype): torch.zeros(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.bool)}
    yield "tensors of every number of axes", shapes, 6
    yield "dtypes", dtypes, 3
    yield "views", {"a": weights, "b": weights[1], "c": weights.transpose(0, 2), "empty": torch.zeros(0, 3)}, 4
    yield "one tensor under two names", {"a": weights, "b": weights}, 2
    yield "a gradient", {"a": torch.ones(2, requires_grad=True)}, 1
    yield "large", {"a": torch.zeros(2**33, device="meta"), "b": torch.zeros(70_000).expand(3, 70_000)}, 1
    yield "parameters", {"a": torch.nn.Parameter(torch.ones(2))}, 0
    yield "parts", {"a": torch.ones(2, 2).to_sparse(), "b": torch.nested.nested_tensor([torch.ones(2)])}, 0
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    yield "quantized", {"a": torch.quantize_per_channel(torch.ones(2, 2), scales, zeros, 0, torch.qint8)}, 0
    yield "storages", {"a": weights.clone().untyped_storage(), "b": weights}, 0
    yield "keys", {"a": {torch.ones(3): 1}}, 0
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    parameter.grad = torch.ones(2)
    optimizer.step()
    yield "an optimizer", {"optimizer": optimizer.state_dict()}, 3
    yield "an optimizer without keys", {"optimizer": {"state": {}, "param_groups": [{"params": [torch.ones(1)]}]}}, 1


@pytest.mark.filterwarnings("ignore")
def test_the_inventory_is_that_of_every_operation():
    for name, tree, count in trees():
        data = pickled(model(more=tree))
        assert compact(data) == inventory(interpret(data, LIMITS)), name
        assert plain(data) >= count + 1, name


def test_a_tag_may_be_new_text_in_each_tensor(monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "".join([*"cuda:1"]))
    data = pickled(model())
    found = compact(data)
    assert found == inventory(interpret(data, LIMITS))
    assert {record.device for record in found[0]} == {"cuda:1"}
    assert plain(data) > 0


def test_few_geometries_are_kept(monkeypatch):
    monkeypatch.setattr(plain_tensors, "_MOST_KNOWN", 1)
    data = pickled(model())
    assert compact(data) == inventory(interpret(data, LIMITS))


@pytest.mark.parametrize("tag", [lambda _: "cpu", lambda _: "".join([*"cuda:1"])], ids=["cpu", "cuda"])
def test_damage_is_that_of_every_operation(monkeypatch, tag):
    """Every byte of the last tensors is changed."""
    monkeypatch.setattr(torch.serialization, "location_tag", tag)
    shared = torch.ones(300)
    data = pickled(model(last=shared[1:], again=shared))
    assert plain(data) > 2
    negative = data.replace(b"M,\x01t", b"J\xff\xff\xff\xfft")
    changes = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(data.index(b"last"), len(data))]
    for at, changed in enumerate([*changes, negative]):
        assert outcome(compact, changed) == outcome(lambda one: inventory(interpret(one, LIMITS)), changed), at


def test_a_storage_that_differs_between_tensors_needs_every_operation():
    """The first tensors are read operation by operation, so their storage is known only to the inventory."""
    first = torch.ones(1000)
    data = pickled({"first": first, **model(last=first[1:])})
    at = data.rindex(b"M\xe8\x03t")
    changed = data[:at] + b"M\xe9\x03t" + data[at + 4 :]
    with pytest.raises(NeedsEveryOperation):
        inventory(interpret_tensors(changed, LIMITS))
    assert compact(changed) == inventory(interpret(changed, LIMITS))


@pytest.mark.parametrize(
    "data",
    [
        b"(cposix\nsystem\np0\ng0\nt.",  # protocol 0
        b"\x80\x02]q\x05.",  # an index out of order
        b"\x80\x02(h\x07t.",
    ],
)
def test_other_memos_are_read_operation_by_operation(data):
    with pytest.raises((NeedsEveryOperation, DamagedPickle)):
        interpret_tensors(data, LIMITS)


def test_without_its_tree_a_file_has_the_same_inventory(tmp_path):
    torch.save(model(optimizer={"state": {}, "param_groups": []}), tmp_path / "a.pt")
    with (
        open_checkpoint(str(tmp_path / "a.pt")) as whole,
        open_checkpoint(str(tmp_path / "a.pt"), tree="inventory") as one,
    ):
        assert one.inventory.tensors == whole.inventory.tensors
        assert [storage.key for storage in one.inventory.storages] == [
            storage.key for storage in whole.inventory.storages
        ]
        assert one.file.outline() == whole.file.outline()
        with one.file.content() as (_, machine):
            assert machine.root is not None
        assert one.check() == whole.check()


def test_only_a_tree_to_edit_has_no_plain_tensors(tmp_path):
    torch.save(model(), tmp_path / "a.pt")
    for use, has_plain in (("build", True), ("edit", False), ("inventory", False)):
        with open_checkpoint(str(tmp_path / "a.pt"), tree=use) as opened:
            assert any(isinstance(node, PlainTensor) for node in nodes(opened.file.tree())) is has_plain
            opened.file.forget_tensors()
            assert opened.inventory.tensors
            assert not opened.file.inventory.tensors
