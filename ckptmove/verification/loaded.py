"""What ``torch.load`` returns for the files of a checkpoint, tensor by tensor under the names of the inventory.

Never lets torch unpickle anything but in weights-only mode.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_table
from safetensors.torch import load_file
from torch._utils import _get_obj_state
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # pickle stays outside
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptmove.checkpoint.layouts.distributed_part import DistributedPart
from ckptmove.verification.case.source_file import as_file
from ckptmove.verification.digests import StorageDigests
from ckptmove.verification.pages import is_mapping
from ckptmove.verification.program import program_pickles, program_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptmove.checkpoint.parts import FilePart, OpenPart
    from ckptmove.model import ContainerName, TensorRecord
    from ckptmove.verification.sampling import Sample
    from ckptmove.verification.state import StoredTensors

_COMPRESSED: Final[dict[torch.layout, tuple[str, ...]]] = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
#: Schemes whose scales and zero points are tensors, too.
_PER_CHANNEL: Final = frozenset(
    {torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams}
)
#: Kinds of tensors at whose values torch does not look while it loads them, as it does at the indices of sparse ones.
_UNSEEN: Final = frozenset({"tensor", "parameter", "storage", "meta"})
#: What torch raises for a file that it cannot load; at a damaged pickle its own unpickler falls over.
_LOAD_ERRORS: Final = (
    RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError, AssertionError, OSError,
    SafetensorError,
)  # fmt: skip
#: What follows in torch's own words is the same for every file.
_ADVICE: Final = (". This is an internal miniz error", " (Could this error message be improved?")


class NoWrapper(LookupError):
    """A tensor subclass that is not given, with the reason in words that are the same for every tensor alike."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of ``torch.load`` for one file.

    Attributes:
        tensors: dense tensors by name, those of a sparse or quantized one under its name and their own
            (``NAME.values``); several where two paths read alike.
        refusal: why weights-only mode refused the file; empty where it did not.
        error: why the load failed otherwise; empty where it did not.
        is_mapped: whether the tensors are a mapping of the file.
        digests: of storages whose bytes are gone: the tensors that view them have no values. None where all have.
    """

    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    refusal: str = ""
    error: str = ""
    is_mapped: bool = False
    digests: StorageDigests | None = None


class LoadedFiles:
    """What every file of a checkpoint is to a script, each loaded when it is first asked for.

    The members of an archive cannot be mapped: one at a time is held, in digests where that will do. A distributed
    checkpoint is loaded piece by piece by whoever compares it, and holds nothing here.
    """

    def __init__(
        self,
        parts: Iterable[OpenPart],
        stored: StoredTensors,
        known: Mapping[str, Loaded] | None = None,
        sample: Sample | None = None,
    ) -> None:
        """Begin with nothing loaded.

        Args:
            parts: of the checkpoint.
            stored: their tensors, as they lie in the files.
            known: what was loaded of some, by name.
            sample: the tensors that are looked at: files that hold none of them are not loaded. None for all.
        """
        self._parts = {part.name: part for part in parts}
        self._stored = stored
        self._loaded = dict(known or {})
        self._held = ""
        chosen = None if sample is None or sample.size.is_all else sample.names
        self._used = {
            name: part
            for name, part in self._parts.items()
            if chosen is None or any(record.name in chosen for record in part.inventory.tensors)
        }
        #: The file of each wrapper subclass, which has no storage to tell it.
        self._wrappers = {
            record.name: name
            for name, part in self._used.items()
            for record in part.inventory.tensors
            if record.kind == "wrapper-subclass"
        }

    def at(self, file: str) -> Loaded:
        """What was loaded of a file; the tensors of a member of an archive, until another one is asked for."""
        if file not in self._loaded:
            part = self._parts[file]
            if not part.is_file:
                self.release()
                self._held = file
            self._loaded[file] = _load_one(part, self._stored)
        return self._loaded[file]

    def release(self) -> None:
        """Let go of the member of an archive that is held, once it was compared."""
        if self._held:
            held = self._loaded[self._held]
            held.tensors.clear()
            self._loaded[self._held] = replace(held, digests=None)
            self._held = ""

    def has(self, file: str) -> bool:
        """Whether a file could be loaded."""
        loaded = self.at(file)
        return not (loaded.refusal or loaded.error)

    def alike(self, file: str, name: str) -> list[torch.Tensor]:
        """The tensors of a file that have a name in the checkpoint; none for a file that was not loaded."""
        return self.at(file).tensors.get(self._parts[file].own_name(name), [])

    def wrapper(self, record: TensorRecord) -> torch.Tensor:
        """A tensor subclass that wraps others, as ``torch.load`` returned it; it must not be written to.

        Raises:
            NoWrapper: its file was not loaded, is not held any more, or two paths of that file read alike.
        """
        home = self._wrappers.get(record.name)
        if home is not None and not self._parts[home].is_file:
            raise NoWrapper("tensor subclasses in archives are not restored")
        found = self.alike(home, record.name) if home is not None else []
        if len(found) != 1:
            raise NoWrapper("torch.load(weights_only=True) does not return it")
        return found[0]

    def digests(self, file: str) -> StorageDigests | None:
        """What is left of the storages of a file in place of their bytes; None where nothing of it is gone."""
        return self.at(file).digests

    def pieces(self, file: str) -> DistributedPart | None:
        """The distributed checkpoint of a name; None for a file."""
        part = self._parts[file]
        return part if isinstance(part, DistributedPart) else None

    @property
    def distributed(self) -> tuple[DistributedPart, ...]:
        """The distributed checkpoints, which are loaded piece by piece."""
        return tuple(part for part in self._used.values() if isinstance(part, DistributedPart))

    @property
    def mapped(self) -> frozenset[str]:
        """Names of the files that torch has mapped."""
        return frozenset(name for name, part in self._used.items() if part.is_file and self.at(name).is_mapped)

    @property
    def refused(self) -> dict[str, str]:
        """Why weights-only mode refused files that hold a tensor, or the only file."""
        return {
            name: loaded.refusal
            for name, loaded in self._all()
            if loaded.refusal and (self._parts[name].inventory.tensors or not name)
        }

    @property
    def missing(self) -> frozenset[str]:
        """Names of the files that could not be loaded, for whatever reason."""
        return frozenset(name for name in self._used if not self.has(name))

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the files that are not loaded, as they hold nothing of the sample."""
        return frozenset(self._parts.keys() - self._used.keys())

    @property
    def released(self) -> frozenset[str]:
        """Names of what is not held once it was compared: members of an archive, and distributed checkpoints."""
        return frozenset(name for name, part in self._parts.items() if not part.is_file)

    @property
    def error(self) -> str:
        """Why a load failed otherwise, with the file where there are several; empty where none did."""
        errors = ((name, loaded.error) for name, loaded in self._all() if loaded.error)
        return next((f"{name}: {error}" if name else error for name, error in errors), "")

    @property
    def what(self) -> str:
        """Who returns what was loaded: ``torch.load returns``."""
        parts = self._used.values()
        if any(part.inventory.container == "torch-export" for part in parts):
            return "torch's readers return"
        kinds = [part.inventory.container == "safetensors" for part in parts if part.inventory.tensors]
        if any(kinds) and not all(kinds):
            return "torch.load and safetensors return"
        return "safetensors returns" if any(kinds) else "torch.load returns"

    def _all(self) -> Iterable[tuple[str, Loaded]]:
        return ((name, self.at(name)) for name in self._used)


def _load_one(part: OpenPart, stored: StoredTensors) -> Loaded:
    if isinstance(part, DistributedPart):
        return Loaded()
    kind = part.inventory.container
    if part.name and kind == "pickle":
        # By itself it would have been meant for torch.load; beside checkpoints it is something that a script keeps.
        return Loaded(refusal="it is a bare pickle, which pickle.load restores")
    if kind == "torch-export":
        return _load_program(part)
    if part.is_file:
        return load(kind, part.path, is_packed=any(fact.kind == "compressed-storage" for fact in part.inventory.facts))
    with as_file(cast("FilePart", part).source) as file:
        digests = stored.digests(part) if _has_unseen_values(part) else {}
        # torch before 2.10 takes a storage for as long as the pickle says, also where its record is shorter.
        if digests and len(digests) == len(part.inventory.storages):
            loaded = load(kind, file, digests=StorageDigests(digests))
            if not loaded.error:
                return loaded
            file.seek(0)  # whether torch takes the file is to be seen where it keeps all of it
        return load(kind, file)


def _has_unseen_values(part: OpenPart) -> bool:
    """Whether a file can be loaded without values: torch looks at none, and swaps no bytes of any."""
    kinds = {record.kind for record in part.inventory.tensors}
    return part.inventory.container == "torch-zip" and part.byteorder == sys.byteorder and kinds <= _UNSEEN


def load(
    kind: ContainerName, place: str | BinaryIO, *, is_packed: bool = False, digests: StorageDigests | None = None
) -> Loaded:
    """Load a file as a careful script would: ``weights_only=True, mmap=True, map_location="cpu"``.

    Deflated storages and members of an archive cannot be mapped, and are loaded without. A safetensors file goes
    through that library, which is what a newer ``torch.load`` would ask, too.

    Args:
        kind: what it is.
        place: its path, or what reads it.
        is_packed: whether it has deflated storages.
        digests: takes the bytes of each storage of an archive of ``torch.save``; None to keep them.
    """
    if kind == "torchscript":
        return Loaded(
            refusal="it is a TorchScript archive, of which that mode reads none since torch 2.6, and torch.jit.load all"
        )
    if kind == "torch-tar":
        return Loaded(refusal="it is a tar of torch 0.1, of which that mode reads none since torch 2.6")
    is_mapped = kind == "torch-zip" and not is_packed and isinstance(place, str)  # torch maps no other one
    try:
        if kind == "safetensors":
            return _load_table(place)
        where: Any = "cpu" if digests is None else digests.take
        root = torch.load(place, map_location=where, weights_only=True, mmap=is_mapped)
    except UnpicklingError as error:
        return Loaded(refusal=_reason(error))
    except _LOAD_ERRORS as error:
        return Loaded(error=_first_line(error))
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named_tensors(root):
        tensors.setdefault(name, []).append(tensor)
    return Loaded(tensors, is_mapped=is_mapped, digests=digests)


def _load_program(part: OpenPart) -> Loaded:
    """Read an archive of ``torch.export``, of whatever device, without running it."""
    tensors: dict[str, list[torch.Tensor]] = {}
    try:
        with as_file(cast("FilePart", part).source) as file:
            found = [*program_tensors(part, file)]
            file.seek(0)
            for path, root in program_pickles(file):
                inside = path + "." * (not isinstance(root, torch.Tensor))
                found += ((f"{inside}{name}", tensor) for name, tensor in named_tensors(root))
    except UnpicklingError as error:
        return Loaded(refusal=_reason(error))
    except _LOAD_ERRORS as error:
        return Loaded(error=_first_line(error))
    for name, tensor in found:
        tensors.setdefault(name, []).append(tensor)
    return Loaded(tensors)


def _load_table(place: str | BinaryIO) -> Loaded:
    weights = load_file(place) if isinstance(place, str) else load_table(place.read())
    # The library maps the file where torch can; it does not say so.
    first = next((tensor.data_ptr() for tensor in weights.values() if tensor.numel()), 0)
    is_mapped = isinstance(place, str) and is_mapping(first, place)
    return Loaded({name: [tensor] for name, tensor in weights.items()}, is_mapped=is_mapped)


def named_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every dense tensor below an object that weights-only mode returned, named by its path.

    Tensors that hang on another one, as inside of a wrapper subclass, are named below it, in objects too. Walks without
    recursion, and never goes into a container that it is inside of, or twice into an object.
    """
    stack: list[tuple[Iterator[tuple[str, Any]], int]] = [(iter((("", root),)), 0)]
    inside: set[int] = set()
    objects: dict[int, object] = {}
    while stack:
        members, identity = stack[-1]
        for name, value in members:
            held: Any = value  # what has members of its own
            if isinstance(value, torch.Tensor):
                yield from _dense(name, value)
                held = _attributes(value)
            elif isinstance(value, (TypedStorage, UntypedStorage)):
                yield name, _flat(value)
                continue
            elif not isinstance(value, (dict, list, tuple, set)):
                held = {} if id(value) in objects else _attributes(value)
                objects[id(value)] = value
            if held and id(value) not in inside:
                inside.add(id(value))
                stack.append((_members(name, held), id(value)))
                break
        else:
            stack.pop()
            inside.discard(identity)


def _attributes(value: Any) -> dict[str, object]:
    """What torch pickles with a tensor or an object besides its values; nothing for a number, a text, or a class."""
    try:
        state = {} if isinstance(value, type) else _get_obj_state(value)  # type: ignore[no-untyped-call]
    except (AttributeError, TypeError):  # without attributes before Python 3.11, or not made to be pickled
        return {}
    both = state if isinstance(state, tuple) else (state,)  # those of `__dict__`, and those of `__slots__`
    return {name: one for part in both if isinstance(part, dict) for name, one in part.items()}


def _members(path: str, value: dict[Any, object] | list[object] | tuple[object, ...] | set[object]) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"{path}.{_key(key)}" if path else _key(key), member) for key, member in pairs)


def _key(key: object) -> str:
    """A key as a part of a path, as the inventory writes it."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    if isinstance(key, tuple):
        return f"({', '.join(_key(item) for item in key)})"
    return str(key)


def _dense(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    inside = name + "." * bool(name)  # the root has no name
    if tensor.layout == torch.sparse_coo:
        raw: Any = tensor
        yield f"{inside}indices", raw._indices()  # noqa: SLF001  # `indices()` refuses an uncoalesced tensor
        yield f"{inside}values", raw._values()  # noqa: SLF001  # `values()` refuses an uncoalesced tensor
    elif tensor.layout in _COMPRESSED:
        for part in _COMPRESSED[tensor.layout]:
            yield f"{inside}{part}", getattr(tensor, part)()
    elif tensor.is_quantized and tensor.qscheme() in _PER_CHANNEL:
        yield f"{inside}values", tensor.detach()
        yield f"{inside}scales", tensor.q_per_channel_scales()
        yield f"{inside}zero_points", tensor.q_per_channel_zero_points()
    else:
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        yield name, tensor if is_wrapper else tensor.detach()


def _flat(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage.untyped())


def _reason(error: UnpicklingError) -> str:
    """What the weights-only unpickler said, without the advice to turn it off that ``torch.load`` wraps around it."""
    cause = error.__context__
    if not isinstance(cause, (UnpicklingError, RuntimeError)):  # torch 2.4 raises the latter
        return "torch does not say why"
    return str(cause).strip().partition("\n")[0].partition(". Please use")[0].rstrip(".")


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    for advice in _ADVICE:
        line = line.partition(advice)[0].rstrip(" .")
    return f"{type(error).__name__}: {line or 'no message'}"
