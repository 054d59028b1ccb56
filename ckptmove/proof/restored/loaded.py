"""Load the files of a checkpoint with ``torch.load``, and list the tensors under the names of the inventory.

torch unpickles in weights-only mode only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_table
from safetensors.torch import load_file
from torch._utils import _get_obj_state
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptmove.formats.facts import facts_of
from ckptmove.proof.refusal import UnpicklingError, reason_of
from ckptmove.proof.restored.byte_source_file import as_file
from ckptmove.proof.restored.digests import StorageDigests
from ckptmove.proof.restored.pages import is_mapping
from ckptmove.proof.restored.program import program_pickles, program_tensors
from ckptmove.torch_facts.weights_only import DTENSOR_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptmove.assembled.part import AssembledPart
    from ckptmove.checkpoint.parts import FilePart, OpenPart
    from ckptmove.formats.facts import FormatFacts
    from ckptmove.model import TensorRecord
    from ckptmove.proof.processes.shares import Share
    from ckptmove.proof.sampling import Sample
    from ckptmove.proof.tensors.stored import StoredTensors

_COMPRESSED: Final[dict[torch.layout, tuple[str, ...]]] = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
#: Quantization schemes whose scales and zero points are tensors.
_PER_CHANNEL: Final = frozenset(
    {torch.per_channel_affine, torch.per_channel_symmetric, torch.per_channel_affine_float_qparams}
)
#: Kinds of tensors that torch loads without reading their values; it reads the indices of sparse tensors.
_UNSEEN: Final = frozenset({"tensor", "parameter", "storage", "meta"})
#: Exceptions of ``torch.load`` for files that it cannot load; damaged pickles make its unpickler raise any of them.
_LOAD_ERRORS: Final = (
    RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError, AssertionError, OSError,
    SafetensorError,
)  # fmt: skip
#: Beginnings of torch's general advice in error messages, which is cut off.
_ADVICE: Final = (". This is an internal miniz error", " (Could this error message be improved?")


class NoWrapper(LookupError):
    """A wrapper subclass is not available. The message is a reason that does not name the tensor."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of ``torch.load`` for one file."""

    #: dense tensors by name. Parts of a sparse or quantized tensor are listed as ``NAME.values`` and so on. A name has
    #: several tensors if several paths are written the same.
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    refusal: str = ""  # why weights-only mode refused the file, or empty
    error: str = ""  # any other error of the load, or empty
    is_mapped: bool = False  # whether the tensors are a memory mapping of the file
    #: storages whose bytes were released; tensors that view them have no values. None if all have values.
    digests: StorageDigests | None = None


class LoadedFiles:
    """The files of a checkpoint as a script loads them, each on first use.

    Members of an archive cannot be mapped. One of them is held at a time, with digests in place of bytes if possible.
    A distributed checkpoint is not held here; it is loaded and compared piece by piece.
    """

    def __init__(
        self,
        parts: Iterable[OpenPart],
        stored: StoredTensors,
        sample: Sample | None = None,
        share: Share | None = None,
    ) -> None:
        """Begin with nothing loaded.

        Args:
            sample: tensors to check; files without any of them are not loaded. None for all.
            share: the part of the checkpoint that this process checks; None for all of it. Other processes load files
                without any of its tensors.
        """
        self._parts = {part.name: part for part in parts}
        self._stored = stored
        self._loaded: dict[str, Loaded] = {}
        self._held = ""
        self._of_ranks: dict[str, Loaded] = {}
        chosen = None if sample is None or sample.size.is_all else sample.names
        self._used = {
            name: part
            for name, part in self._parts.items()
            if chosen is None or any(record.name in chosen for record in part.inventory.tensors)
        }
        #: Files that this process loads, and results of other processes for the others.
        self._own = {
            name
            for name, part in self._used.items()
            if share is None
            or (share.is_first and not part.inventory.tensors)
            or any(record.name in share.names for record in part.inventory.tensors)
        }
        self._others: dict[str, Loaded] = {}
        #: File of each wrapper subclass, which has no storage that names its file.
        self._wrappers = {
            record.name: name
            for name, part in self._used.items()
            for record in part.inventory.tensors
            if record.kind == "wrapper-subclass"
        }

    def at(self, file: str) -> Loaded:
        """The result for a file. Tensors of an archive member are valid until another member is loaded."""
        if file not in self._loaded:
            part = self._parts[file]
            if not part.is_file:
                self.release()
                self._held = file
            self._loaded[file] = _load_one(part, self._stored)
        return self._loaded[file]

    def release(self) -> None:
        """Release the archive member that is held."""
        if self._held:
            held = self._loaded[self._held]
            held.tensors.clear()
            self._loaded[self._held] = replace(held, digests=None)
            self._held = ""

    def has(self, file: str) -> bool:
        """Whether torch loads a file."""
        loaded = self.at(file)
        return not (loaded.refusal or loaded.error)

    def alike(self, file: str, name: str) -> list[torch.Tensor]:
        """Tensors of a file with this name in the checkpoint; empty if the file was not loaded."""
        return self.at(file).tensors.get(self._parts[file].own_name(name), [])

    def wrapper(self, record: TensorRecord) -> torch.Tensor:
        """A wrapper subclass as ``torch.load`` returned it; it must not be written to."""
        home = self._wrappers.get(record.name)
        if home is not None and not self._parts[home].is_file:
            raise NoWrapper("tensor subclasses in archives are not restored")
        found = self.alike(home, record.name) if home is not None else []
        if len(found) != 1:
            raise NoWrapper("torch.load(weights_only=True) does not return it")
        return found[0]

    def digests(self, file: str) -> StorageDigests | None:
        """Digests of the released storages of a file; None if nothing was released."""
        return self.at(file).digests

    def assembled(self, name: str) -> AssembledPart | None:
        """The part with this name if its tensors are in several files, which are loaded one by one; None for a file."""
        part = self._parts[name]
        return cast("AssembledPart", part) if part.is_assembled else None

    def of_rank(self, part: FilePart) -> Loaded:
        """The result for one of the files of ranks."""
        if part.name not in self._of_ranks:
            self._of_ranks[part.name] = _load_one(part, self._stored)
        return self._of_ranks[part.name]

    @property
    def all_assembled(self) -> tuple[AssembledPart, ...]:
        """The parts whose tensors are in several files."""
        return tuple(cast("AssembledPart", part) for part in self._used.values() if part.is_assembled)

    @property
    def mapped(self) -> frozenset[str]:
        """Names of the files that torch mapped."""
        return frozenset(name for name in self._own if self._parts[name].is_file and self.at(name).is_mapped)

    @property
    def refused(self) -> dict[str, str]:
        """Reasons of weights-only mode by file name, for files that contain a tensor, or for the only file."""
        return {
            name: loaded.refusal
            for name, loaded in self._all()
            if loaded.refusal and (self._parts[name].inventory.tensors or not name)
        }

    @property
    def missing(self) -> frozenset[str]:
        """Names of the files that could not be loaded, for any reason."""
        return frozenset(name for name, loaded in self._all() if loaded.refusal or loaded.error)

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the files that were not loaded because they contain no tensor of the sample."""
        return frozenset(self._parts.keys() - self._used.keys())

    @property
    def released(self) -> frozenset[str]:
        """Names of parts that are released after the comparison: archive members and distributed checkpoints."""
        return frozenset(name for name, part in self._parts.items() if not part.is_file)

    @property
    def error(self) -> str:
        """First error other than a refusal, with the file name if it has one; empty without an error."""
        errors = ((name, loaded.error) for name, loaded in self._all() if loaded.error)
        return next((f"{name}: {error}" if name else error for name, error in errors), "")

    @property
    def what(self) -> str:
        """The functions that loaded the tensors, as subject and verb: ``torch.load returns``."""
        used = [part.inventory for part in self._used.values()]
        loaders = {facts_of(one.container).loader for one in used if one.tensors}
        if "torch.export.load" in loaders:
            return "torch's readers return"
        if "safetensors" not in loaders:
            return "torch.load returns"
        return "safetensors returns" if len(loaders) == 1 else "torch.load and safetensors return"

    def results(self) -> dict[str, tuple[str, str]]:
        """Reasons and errors of the files that this process loaded, by name."""
        return {name: (loaded.refusal, loaded.error) for name, loaded in self._all()}

    def add(self, results: Mapping[str, tuple[str, str]]) -> None:
        """Add results of other processes."""
        for name, (refusal, error) in results.items():
            self._others[name] = Loaded(refusal=refusal, error=error)

    def _all(self) -> Iterable[tuple[str, Loaded]]:
        """The results of this process and of others, in the order of the files."""
        own = ((name, self.at(name) if name in self._own else self._others.get(name)) for name in self._used)
        return ((name, loaded) for name, loaded in own if loaded is not None)


def _load_one(part: OpenPart, stored: StoredTensors) -> Loaded:
    if part.is_assembled:
        return Loaded()
    if any(use.name in DTENSOR_NAMES for use in part.inventory.globals):
        _know_dtensors()
    kind = facts_of(part.inventory.container)
    if part.name and kind.name == "pickle":
        # A bare pickle by itself may be meant for torch.load; next to checkpoints it is a script's own data.
        return Loaded(refusal="it is a bare pickle, which pickle.load restores")
    if kind.loader == "torch.export.load":
        return _load_program(part)
    if part.is_file:
        return load(kind, part.path, is_packed=any(fact.kind == "compressed-storage" for fact in part.inventory.facts))
    with as_file(cast("FilePart", part).source) as file:
        digests = stored.digests(part) if _has_unseen_values(part) else {}
        # torch before 2.10 gives a storage the length that the pickle states, also if its record is shorter.
        if digests and len(digests) == len(part.inventory.storages):
            loaded = load(kind, file, digests=StorageDigests(digests))
            if not loaded.error:
                return loaded
            file.seek(0)  # load again with all bytes, to see whether torch accepts the file
        return load(kind, file)


def _know_dtensors() -> None:
    """Import DTensor, if this torch has it; without it, weights-only mode refuses the file."""
    try:
        import torch.distributed.tensor  # for files with DTensors only
    except ImportError:  # built without torch.distributed
        return
    # It warns of each mesh whose process groups do not exist here.
    mesh: Any = torch.distributed.device_mesh
    mesh.logger.disabled = True


def _has_unseen_values(part: OpenPart) -> bool:
    """Whether a file can be loaded without values: torch reads none and swaps no bytes."""
    kinds = {record.kind for record in part.inventory.tensors}
    is_mappable = facts_of(part.inventory.container).is_mappable
    return is_mappable and part.byteorder == sys.byteorder and kinds <= _UNSEEN


def load(
    kind: FormatFacts, place: str | BinaryIO, *, is_packed: bool = False, digests: StorageDigests | None = None
) -> Loaded:
    """Load a file with ``weights_only=True, mmap=True, map_location="cpu"``.

    Files with deflated storages and members of an archive cannot be mapped and are loaded without ``mmap``. safetensors
    files are loaded with that library, as newer versions of ``torch.load`` do.

    Args:
        digests: receives the bytes of each storage of a ``torch.save`` archive; None to keep them.
    """
    if kind.not_weights_only:
        return Loaded(refusal=kind.not_weights_only)
    is_mapped = kind.is_mappable and not is_packed and isinstance(place, str)
    try:
        if kind.loader == "safetensors":
            return _load_table(place)
        where: Any = "cpu" if digests is None else digests.take
        root = torch.load(place, map_location=where, weights_only=True, mmap=is_mapped)
    except UnpicklingError as error:
        return Loaded(refusal=reason_of(error) or "torch gives no reason")
    except _LOAD_ERRORS as error:
        return Loaded(error=_first_line(error))
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named_tensors(root):
        tensors.setdefault(name, []).append(tensor)
    return Loaded(tensors, is_mapped=is_mapped, digests=digests)


def load_tensor(path: str, name: str, opened: dict[str, Any]) -> Loaded:
    """Load one tensor of a safetensors file.

    Args:
        opened: files that are open, by path; this one is added. To open one again takes as long as it has tensors.
    """
    try:
        if path not in opened:
            opened[path] = safe_open(path, "pt")
        return Loaded({name: [opened[path].get_tensor(name)]})
    except _LOAD_ERRORS as error:
        return Loaded(error=_first_line(error))


def _load_program(part: OpenPart) -> Loaded:
    """Read an archive of ``torch.export``, saved on any device, without running it."""
    tensors: dict[str, list[torch.Tensor]] = {}
    try:
        with as_file(cast("FilePart", part).source) as file:
            found = [*program_tensors(part, file)]
            file.seek(0)
            for path, root in program_pickles(file):
                inside = path + "." * (not isinstance(root, torch.Tensor))
                found += ((f"{inside}{name}", tensor) for name, tensor in named_tensors(root))
    except UnpicklingError as error:
        return Loaded(refusal=reason_of(error) or "torch gives no reason")
    except _LOAD_ERRORS as error:
        return Loaded(error=_first_line(error))
    for name, tensor in found:
        tensors.setdefault(name, []).append(tensor)
    return Loaded(tensors)


def _load_table(place: str | BinaryIO) -> Loaded:
    weights = load_file(place) if isinstance(place, str) else load_table(place.read())
    # safetensors maps the file if torch can, but does not report it.
    first = next((tensor.data_ptr() for tensor in weights.values() if tensor.numel()), 0)
    is_mapped = isinstance(place, str) and is_mapping(first, place)
    return Loaded({name: [tensor] for name, tensor in weights.items()}, is_mapped=is_mapped)


def named_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every dense tensor in the result of a weights-only load, with its path.

    Tensors inside a wrapper subclass, or in attributes of a tensor or an object, are listed under its path. The walk
    does not recurse, enters no container that it is inside of, and enters each object once.
    """
    stack: list[tuple[Iterator[tuple[str, Any]], int]] = [(iter((("", root),)), 0)]
    inside: set[int] = set()
    objects: dict[int, object] = {}
    while stack:
        members, identity = stack[-1]
        for name, value in members:
            held: Any = value  # the value whose members are listed next
            if isinstance(value, torch.Tensor):
                yield from _dense(name, value)
                held = _attributes(value)
            elif isinstance(value, (TypedStorage, UntypedStorage)):
                yield name, torch.empty(0, dtype=torch.uint8).set_(held.untyped())
                continue
            elif not isinstance(value, (dict, list, tuple, set)):
                held = {} if id(value) in objects else _attributes(value)
                objects[id(value)] = value
            if held and id(value) not in inside:
                inside.add(id(value))
                stack.append((_named_members(name, held), id(value)))
                break
        else:
            stack.pop()
            inside.discard(identity)


def _attributes(value: Any) -> dict[str, object]:
    """Attributes that torch pickles with a tensor or an object; empty for numbers, strings and classes."""
    try:
        state = {} if isinstance(value, type) else _get_obj_state(value)
    except (AttributeError, TypeError):  # no attributes before Python 3.11, or not picklable
        return {}
    both = state if isinstance(state, tuple) else (state,)  # of `__dict__` and of `__slots__`
    return {name: one for part in both if isinstance(part, dict) for name, one in part.items()}


def _named_members(path: str, value: dict[Any, object] | list[object] | tuple[object, ...] | set[object]) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((f"{path}.{_key(key)}" if path else _key(key), member) for key, member in pairs)


def _key(key: object) -> str:
    """A key as part of a path, in the notation of the inventory."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "backslashreplace")
    if isinstance(key, tuple):
        return f"({', '.join(_key(item) for item in key)})"
    return str(key)


def _dense(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    inside = name + "." * bool(name)  # the root has no name
    if tensor.layout == torch.sparse_coo:
        raw: Any = tensor
        yield f"{inside}indices", raw._indices()  # `indices()` refuses an uncoalesced tensor
        yield f"{inside}values", raw._values()  # `values()` refuses an uncoalesced tensor
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


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    for advice in _ADVICE:
        line = line.partition(advice)[0].rstrip(" .")
    return f"{type(error).__name__}: {line or 'no message'}"
