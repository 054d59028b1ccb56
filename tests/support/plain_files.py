"""Convert a file of torch to plain values, and load it in weights-only mode."""

from __future__ import annotations

import io
import pickle
import sys
import types
import warnings
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from ckptmove.conversion.remap.plain import make_plain
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.write import write_pickle

if TYPE_CHECKING:
    from ckptmove.moves import Replaced


class Plain(NamedTuple):
    """What ``torch.load(weights_only=True)`` returns, and the replacements."""

    value: Any
    replaced: tuple[Replaced, ...]


def saved(value: object, protocol: int = 2) -> bytes:
    """The bytes of a file of ``torch.save`` that weights-only mode rejects."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(pickle.UnpicklingError):
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def loaded(source: bytes) -> Plain:
    """Load a file after its conversion to plain values: the same records with another pickle."""
    replaced: tuple[Replaced, ...] = ()
    output = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as archive, zipfile.ZipFile(output, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("/data.pkl"):
                root, replaced = make_plain(interpret(data, Limits()).root, Limits())
                data = write_pickle(root)
            copy.writestr(name, data)
    output.seek(0)
    return Plain(torch.load(output, weights_only=True, map_location="cpu"), replaced)


def plain(value: object, protocol: int = 2) -> Any:
    """Save a value, convert the file to plain values, and load it."""
    return loaded(saved(value, protocol)).value


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a class of a library that is not installed."""

    def make(full_name: str, *bases: type, **members: object) -> Any:
        module, _, name = full_name.rpartition(".")
        parts = module.split(".")
        for parent in (".".join(parts[: count + 1]) for count in range(len(parts))):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or types.ModuleType(parent))
        made = type(name, bases, {"__module__": module, **members})
        monkeypatch.setattr(sys.modules[module], name, made, raising=False)
        return made

    return make
