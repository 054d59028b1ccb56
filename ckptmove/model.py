"""The values that flow between the rooms: what a checkpoint holds, what is wrong with it, what is to change.

Never does any work and never imports another room: everything here is frozen, and tuples inside.

Here as in every room, a plain value is a named tuple: its class is made in a fifth of the time that a frozen dataclass
takes, of which a command would make forty before it begins, and a value in a third, of which a checkpoint has a hundred
thousand. What a call of the API returns stays a dataclass, so that it can gain a field; so does what has heirs, or a
field that is made anew for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias


class OneLine:
    """Base of results: their ``repr`` is their one line, so that a notebook does not print every tensor."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


Role: TypeAlias = Literal["model", "optimizer", "scheduler", "ema", "scaler", "rng", "criterion", "other"]
ContainerName: TypeAlias = Literal[
    "torch-zip", "torch-legacy", "torch-tar", "torchscript", "torch-export", "safetensors", "dcp", "pickle",
    "directory", "archive"]  # fmt: skip
ArchiveForm: TypeAlias = Literal["zip", "tar"]
FactKind: TypeAlias = Literal[
    "short-storage", "missing-storage", "past-end", "orphan-record", "crc-mismatch", "compressed-storage",
    "encoded-storage", "stray-bytes", "kept-for-undo", "unnamed-file", "damaged-piece", "missing-end",
    "inner-archive", "graph-device"]  # fmt: skip
LACKING: Final = frozenset({"missing-storage", "short-storage", "past-end"})  # bytes are not there: nor in any copy
LayoutName: TypeAlias = Literal[
    "plain", "lightning", "hf-trainer", "accelerate", "deepspeed", "dcp", "sharded", "ultralytics", "mmengine",
    "detectron2", "fairseq", "nemo", "megatron", "stable-baselines3", "module", "other"]  # fmt: skip


class Span(NamedTuple):
    """A run of bytes.

    Attributes:
        start: offset of the first byte.
        end: offset after the last byte (exclusive).
    """

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


class StorageRef(NamedTuple):
    """A storage: one run of bytes that one or more tensors view.

    Attributes:
        key: its name in the container, unique there.
        device: its location tag as written, for example ``cuda:3``.
        dtype: dtype of its elements; ``uint8`` for an untyped storage.
        numel: number of its elements.
        nbytes: ``numel`` times the size of an element.
        tag_sites: starts, in the object pickle, of every operation that pushes its location tag.
        class_sites: likewise for its storage class; empty where there is none.
    """

    key: str
    device: str
    dtype: str
    numel: int
    nbytes: int
    tag_sites: tuple[int, ...]
    class_sites: tuple[int, ...]


class TensorRecord(NamedTuple):
    """A tensor by name.

    Attributes:
        name: path from the root, parts joined by dots.
        role: what it is for.
        device: tag of the device that it was saved from.
        dtype: torch's name without ``torch.``.
        shape: its sizes.
        stride: steps in elements; empty for layouts without strides.
        storage: key of its storage, or None where its bytes are not in a storage.
        storage_offset: in elements, from the start of the whole storage, also where torch before 0.4 saved a view.
        nbytes: number of elements times the size of one: what the tensor's own values take. 0 for a wrapper subclass:
            the tensors inside of it have records of their own, named ``NAME.inner``.
        kind: ``tensor``, ``parameter``, ``sparse_coo``, ``sparse_csr``, ``quantized``, ``nested``, ``meta``,
            ``device-data`` (bytes inside the pickle, as xla tensors have), ``wrapper-subclass`` or ``storage``;
            ``conj``, ``neg`` or ``conj-neg`` for a view that torch conjugates or negates where it is used.
        subclass: full name of its class where that is neither Tensor nor Parameter, else an empty string.
        requires_grad: as saved.
        parts: the dense tensors of a sparse, nested or quantized one, named ``NAME.indices`` and so on.
        device_site: start of the operation that pushes a device that is *not* a storage tag (``xla:0``), or None; it
            decides where the tensor goes, whatever the tag of the storage that its bytes are kept in.
    """

    name: str
    role: Role
    device: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: str | None
    storage_offset: int
    nbytes: int
    kind: str = "tensor"
    subclass: str = ""
    requires_grad: bool = False
    parts: tuple[TensorRecord, ...] = ()
    device_site: int | None = None

    def dense(self) -> tuple[TensorRecord, ...]:
        """The tensors that view storages: its parts, or itself."""
        return self.parts or (self,)


class Mention(NamedTuple):
    """A device that is named outside of any tensor.

    Attributes:
        where: path from the root.
        kind: ``torch.device``, ``string``, ``device_ids``, or ``device_mesh`` for the device type of a ``DeviceMesh``.
        value: as written: ``cuda:0``, ``cuda`` for a mesh, or ``[0, 1]`` for device ids.
        site: start of the operation that pushes the device string, or None where it cannot be edited.
        index_site: for a ``torch.device`` with an index: start of the operation that pushes the index.
        tuple_site: for a ``torch.device``: start of what makes its argument tuple; in TorchScript, ``site`` itself.
    """

    where: str
    kind: Literal["torch.device", "string", "device_ids", "device_mesh"]
    value: str
    site: int | None = None
    index_site: int | None = None
    tuple_site: int | None = None


#: The oldest torch that is supported.
OLDEST_TORCH: Final = "2.4"


class GlobalUse(NamedTuple):
    """A name that the pickle would import.

    Attributes:
        name: full name, as torch would look it up.
        weights_only_since: the first torch whose ``torch.load(weights_only=True)`` takes it without being told to, of
            those from 2.4 on; None where none does.
        verdict: ``safe``: known and harmless; ``dangerous``: nothing that a checkpoint needs; else ``unknown``.
    """

    name: str
    weights_only_since: str | None
    verdict: Literal["safe", "unknown", "dangerous"]

    @property
    def weights_only(self) -> bool:
        """Whether the newest ``torch.load(weights_only=True)`` takes it without being told to."""
        return self.weights_only_since is not None


class Opaque(Enum):
    """What stands for a value that only an execution of the pickle could build."""

    OBJECT = "an object"


OPAQUE: Final = Opaque.OBJECT


class FlagValue(NamedTuple):
    """A boolean option of a parameter group, with the place of its value.

    Attributes:
        name: ``capturable`` or ``fused``.
        value: as written.
        site: start of the operation that pushes it.
    """

    name: str
    value: bool
    site: int


class ParamGroup(NamedTuple):
    """One of an optimizer's ``param_groups``.

    Attributes:
        where: path from the root.
        params: the keys of its parameters in the state: indices, or names.
        param_names: their names where the optimizer was given named parameters, else empty.
        options: its hyperparameters in order: plain values and tuples of them as they are, else :data:`OPAQUE`.
        flags: ``capturable`` and ``fused``, where they are booleans.
    """

    where: str
    params: tuple[str, ...]
    param_names: tuple[str, ...]
    options: tuple[tuple[str, object], ...]
    flags: tuple[FlagValue, ...]

    def is_set(self, name: str) -> bool:
        """Whether a flag is there and true."""
        return any(flag.name == name and flag.value for flag in self.flags)


class StateEntry(NamedTuple):
    """What an optimizer keeps for one parameter.

    Attributes:
        key: the parameter's key, as it stands in ``ParamGroup.params``.
        tensors: state key (``exp_avg``) and tensor, in order.
        scalars: state key and plain value (an ``int`` step of old torch), in order.
        nested: paths of lists and dicts in it, outer before inner, each with its kind; members are above: ``al.0``.
            The path of the entry itself, which is empty, is listed only where it cannot be rebuilt.
        keys: paths of dict members whose key is not text, each with its key: ``buf.0`` and 0.
    """

    key: str
    tensors: tuple[tuple[str, TensorRecord], ...]
    scalars: tuple[tuple[str, object], ...]
    nested: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, object], ...] = ()

    def tensor(self, state_key: str) -> TensorRecord | None:
        """The tensor of a state key, or None."""
        return dict(self.tensors).get(state_key)

    def without_inner(self) -> StateEntry:
        """The entry as its optimizer keeps it: a wrapper subclass stands for everything inside of it."""
        inside = tuple([f"{key}." for key, record in self.tensors if record.kind == "wrapper-subclass"])
        if not inside:
            return self
        return self._replace(
            tensors=tuple([pair for pair in self.tensors if not pair[0].startswith(inside)]),
            scalars=tuple([pair for pair in self.scalars if not pair[0].startswith(inside)]),
            nested=tuple([pair for pair in self.nested if not pair[0].startswith(inside)]),
        )


class OptimizerRecord(NamedTuple):
    """The state_dict of an optimizer, found anywhere in a checkpoint.

    Attributes:
        where: path from the root; empty for the root itself.
        groups: its ``param_groups``.
        state: its ``state``, in the order of the file.
        algorithm: class in ``torch.optim`` that its keys point to, or None.
        candidates: every class in ``torch.optim`` that writes these keys; several for Adam and AdamW of old torch.
        mistyped: keys that are text in the state and numbers in the groups, or the other way round.
        is_flat: whether the file has options for each parameter in place of groups: each is a group of its own here.
    """

    where: str
    groups: tuple[ParamGroup, ...]
    state: tuple[StateEntry, ...]
    algorithm: str | None = None
    candidates: tuple[str, ...] = ()
    mistyped: tuple[str, ...] = ()
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveFact:
    """Something about the container's bytes that a finding rests on.

    Attributes:
        kind: ``short-storage`` is a record smaller than its storage, ``orphan-record`` one that no storage refers to;
            ``stray-bytes`` are in no record, or behind a pickle; ``kept-for-undo`` is there on purpose; an
            ``unnamed-file`` lies beside a ``.metadata`` that does not name it, a ``damaged-piece`` is not what that
            says; a tar of files may have a ``missing-end``, an archive an ``inner-archive`` that is not looked into; a
            ``graph-device`` is a weight that its graph expects on another device.
        record: the record's name or the storage's key; in a stream, which has no names, what it is.
        nbytes: bytes concerned: missing, unreachable or stored.
    """

    kind: FactKind
    record: str
    nbytes: int

    @property
    def storage_key(self) -> str:
        """The key of the storage that it is about, if it is about one: its record is ``X/data/KEY``, or ``X/KEY``."""
        _, is_data, key = self.record.rpartition("/data/")
        return key if is_data or self.record.count("/") <= 1 else self.record.partition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inventory(OneLine):
    """Everything that ``inspect`` says of one checkpoint and ``convert`` decides on.

    Attributes:
        path: as it was given.
        container: what the bytes are.
        layout: whose checkpoint it is.
        size_bytes: size of the file.
        torch_version: version of torch that wrote it, where the file says so.
        producer: what else wrote it (``pytorch-lightning 2.1.0``), where the file says so.
        root_keys: keys of the root, where it is a dict.
        tensors: every tensor, in the order of the file.
        storages: every storage, in the order of their first use.
        mentions: devices named outside of tensors.
        globals: names that the pickle would import.
        foreign_opcodes: names of opcodes that torch's weights-only unpickler lacks.
        filled_classes: names of classes that it puts no items into, even where it is told to take them.
        optimizers: optimizers' state_dicts.
        facts: about the container's bytes.
        contents: which parts of a resume are there besides tensors: ``scheduler``, ``scaler``, ``rng``, ``counter``.
        rng_devices: for each list of per-device RNG states, its path and its length.
        last_rates: for each scheduler, the path and the values of the learning rates that it has set.
    """

    path: str
    container: ContainerName
    layout: LayoutName
    size_bytes: int
    torch_version: str | None = None
    producer: str | None = None
    root_keys: tuple[str, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    storages: tuple[StorageRef, ...] = ()
    mentions: tuple[Mention, ...] = ()
    globals: tuple[GlobalUse, ...] = ()
    foreign_opcodes: tuple[str, ...] = ()
    filled_classes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    facts: tuple[ArchiveFact, ...] = ()
    contents: frozenset[str] = frozenset()
    rng_devices: tuple[tuple[str, int], ...] = ()
    last_rates: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def __str__(self) -> str:
        """Path, container, layout and the number of tensors, in one line."""
        return f"{self.path}: {self.container}, {self.layout}, {len(self.tensors):,} tensors"


class Severity(str, Enum):
    """How bad a finding is: a resume fails, a resume may fail, worth knowing. Equal to its value: ``"error"``."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Finding(NamedTuple):
    """A problem of the file.

    Attributes:
        code: stable code, for example ``D102``.
        name: its kebab-case name.
        severity: how bad it is.
        message: one line: what is wrong, with figures.
        where: paths of the tensors or objects concerned, in the order of the file.
        fix: the command or the line of code that mends it; empty where nothing has to be done.
    """

    code: str
    name: str
    severity: Severity
    message: str
    where: tuple[str, ...] = ()
    fix: str = ""
