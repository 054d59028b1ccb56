"""Faults put into the conversion itself: ``convert --verify`` keeps no such output, and ``--against`` proves none."""

from __future__ import annotations

import pytest
import remaps
import torch
import zero_runs
from distributed_checkpoints import HALVES, Distributed
from safetensors.torch import save_file

import ckptmove
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.conversion import sharded_output
from ckptmove.conversion.remap import gather, new_files, remapping, storages
from ckptmove.conversion.remap.new_files import NewFiles
from ckptmove.conversion.remap.rename import KeyMap
from ckptmove.conversion.remap.select import _Selection
from ckptmove.io import segments
from ckptmove.lazy.chunked import Chunked
from ckptmove.model import Span
from ckptmove.proof.errors import ConversionDiffers


def saved_run(folder):
    torch.save(remaps.run(), folder / "run.pth")
    return folder / "run.pth"


def saved_bare(folder):
    """A state_dict at the root, with a tied weight."""
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"module.w": weight, "module.tied": weight, "module.b": torch.ones(2)}, folder / "bare.pth")
    return folder / "bare.pth"


def saved_twins(folder):
    """Two tensors whose names are written alike."""
    torch.save({"module.b": torch.ones(2), "module": {"b": torch.zeros(2)}}, folder / "twins.pth")
    return folder / "twins.pth"


def saved_models(folder):
    """Two files with tensors of the same names. The path of one file begins with that of the other."""
    (folder / "models").mkdir()
    for number, name in enumerate(("model", "model_ema")):
        torch.save({"w": torch.ones(3) * number}, folder / "models" / f"{name}.pt")
    return folder / "models"


def saved_halves(folder):
    return Distributed.save_ranks(folder / "dcp", HALVES)


def saved_zero(folder):
    return zero_runs.made(folder / "zero")


def saved_shards(folder):
    (folder / "shards").mkdir()
    for number, key in enumerate("ab", 1):
        save_file({key: torch.ones(3) * number}, folder / "shards" / f"model-0000{number}-of-00002.safetensors")
    return folder / "shards"


def memory_changed(change):
    """A function that reads into memory, with a change of what it has read."""

    def make(read):
        def broken(self, first, memory):
            read(self, first, memory)
            memory[:] = change(bytes(memory))

        return broken

    return make


def blocks_changed(change):
    """A function that yields blocks, with a change of each."""
    return lambda function: lambda *args: (change(bytes(block)) for block in function(*args))


def argument_changed(place, change):
    """A function whose argument at a place is changed."""

    def make(function):
        def broken(*args, **kwds):
            return function(*args[:place], change(args[place]), *args[place + 1 :], **kwds)

        return broken

    return make


def result_changed(change):
    """A function whose result is changed."""
    return lambda function: lambda *args, **kwds: change(function(*args, **kwds))


def end_zeroed(data):
    return data[:-8] + bytes(len(data[-8:]))


def bit_flipped(data):
    return bytes([data[0] ^ 1]) + data[1:] if data else data


def exchanged(one, other):
    """A name in the place of another one, and the reverse."""
    return lambda name: {one: other, other: one}.get(name, name)


def one_element_later(change):
    start = 4 if change.span.start == 0 else change.span.start - 4
    return change._replace(span=Span(start, start + change.span.nbytes))


def values_exchanged(value):
    flat = as_dict(value).flat
    flat[1], flat[3] = flat[3], flat[1]
    return value


def last_pair_lost(value):
    pairs = as_dict(value)
    del pairs.flat[-2:], pairs.starts[-2:]
    return value


def segments_exchanged(tensors):
    segments = [one.segments for one in tensors]
    return [one._replace(segments=new) for one, new in zip(tensors, segments[::-1], strict=True)]


def copied_over(value):
    """The EMA in place of the model."""
    flat = as_dict(value).flat
    flat[1] = flat[3]
    return value


def twins(value):
    """The value of one name at both paths that are written like it."""
    pairs = as_dict(value)
    inner = as_dict(pairs.get("module"))
    inner.flat[1] = pairs.get("module.b")
    return value


def tied_dropped(own):
    return [*own[:2], True, *own[3:]]


def first_lost(found):
    return dict([*found.items()][1:])


def bias_dropped(own):
    return [*own[:2], True, *own[3:]]


def without_cast(change):
    return change._replace(cast=None)


def from_the_start(change):
    return change._replace(span=Span(0, change.span.nbytes))


def first_half(span):
    return Span(span.start, span.end - span.nbytes // 2)


SHARDS = [f"model-0000{number}-of-00002.safetensors/{key}" for number, key in enumerate("ab", 1)]
HALF, COMPACT, STRIPPED = {"dtype": "half"}, {"compact": True}, {"strip_prefix": True}
#: A source, the options of a conversion, the function that is broken, and how.
FAULTS = {
    "cast: the last values": (saved_run, HALF, (segments, "cast_blocks"), blocks_changed(end_zeroed)),
    "cast: one bit": (saved_run, HALF, (segments, "cast_blocks"), blocks_changed(bit_flipped)),
    "cast: of ema": (saved_run, HALF, (storages, "_casts"), argument_changed(1, lambda _: [("ema", "float16")])),
    "cast: one storage is left out": (saved_run, HALF, (storages, "_casts"), result_changed(first_lost)),
    "cast: the tree keeps the dtype": (saved_run, HALF, (storages, "_apply"), argument_changed(3, without_cast)),
    "cut: another start": (saved_run, COMPACT, (new_files, "changed_bytes"), argument_changed(2, one_element_later)),
    "cut: offsets as before": (saved_run, COMPACT, (storages, "_apply"), argument_changed(3, from_the_start)),
    "cut: only the first half": (saved_run, COMPACT, (storages, "_reached"), result_changed(first_half)),
    "join: chunks from back to front": (saved_halves, {}, (Chunked, "_read"), memory_changed(lambda data: data[::-1])),
    "join: without the end": (saved_halves, {}, (Chunked, "_read"), memory_changed(end_zeroed)),
    "join: partitions": (saved_zero, {}, (Chunked, "_read"), memory_changed(bit_flipped)),
    "join: values of other shards": (saved_shards, {}, (gather, "_joined"), result_changed(values_exchanged)),
    "join: without the last shard": (saved_shards, {}, (gather, "_joined"), result_changed(last_pair_lost)),
    "join: bytes of other shards": (saved_shards, {}, (NewFiles, "storage"), argument_changed(1, exchanged(*SHARDS))),
    "shards: bytes of other tensors": (
        saved_shards, {"shard_size": 1000}, (sharded_output, "new_safetensors"), argument_changed(0, segments_exchanged)
    ),
    "keys: two are exchanged": (saved_run, STRIPPED, (KeyMap, "__call__"), result_changed(exchanged("rows", "column"))),
    "keys: one has another name": (
        saved_run, {"add_prefix": "x."}, (KeyMap, "__call__"), result_changed(exchanged("x.module.rows", "x.row"))
    ),
    "keys: no prefix of the root": (saved_bare, STRIPPED, (KeyMap, "_strip"), lambda _: lambda _, key: key),
    "keys: that are written alike": (saved_twins, COMPACT, (remapping, "combine"), result_changed(twins)),
    "parts: a tied tensor": (saved_bare, {"drop": "module.b"}, (_Selection, "drop"), argument_changed(1, tied_dropped)),
    "join: one model in place of the other": (saved_models, {}, (remapping, "gather"), result_changed(copied_over)),
    "keys: no prefix is removed": (saved_run, STRIPPED, (KeyMap, "_strip"), lambda _: lambda _, key: key),
    "parts: one more is dropped": (saved_run, {"drop": "rng"}, (_Selection, "drop"), argument_changed(1, bias_dropped)),
    "parts: another root": (saved_run, {"as_root": "ema"}, (_Selection, "find"), argument_changed(1, lambda _: "model"))
}  # fmt: skip
#: Faults whose output is that of other options, and equals the original: only the request tells that it is wrong.
VALID = {"cast: of ema", "keys: no prefix is removed", "keys: no prefix of the root"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_conversion_is_no_proof(tmp_path, monkeypatch, fault):
    save, options, (owner, name), make = FAULTS[fault]
    source = save(tmp_path)
    sound, output = tmp_path / "sound.pth", tmp_path / "out.pth"
    if "shard_size" in options:
        sound, output = tmp_path / "sound", tmp_path / "out"
    assert ckptmove.convert(source, output=sound, verify=True, **options).verified
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionDiffers) as caught:
        ckptmove.convert(source, output=output, verify=True, **options)
    assert caught.value.faults
    assert sorted(tmp_path.iterdir()) == before
    ckptmove.convert(source, output=output, **options)
    against = ckptmove.verify(output, against=source)
    restore = next(check for check in against.checks if check.name == "restore")
    assert (restore.status == "failed" or bool(dict(restore.evidence)["unseen"])) == (fault not in VALID)
    assert against.proven == (fault in VALID)
