"""Define the values that the rooms share: the inventory of a checkpoint, its devices and findings. All are immutable.

Plain values are named tuples: a class is created in a fifth of the time of a frozen dataclass (a command would create
forty before it starts), and an instance in a third (a checkpoint has a hundred thousand). Annotations are evaluated
here, because ``typing.NamedTuple`` compiles each one that is text, which takes longer than all else. Results of the API
are dataclasses, so that they can gain fields; so are classes with subclasses or with a mutable default.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias


class OneLine:
    """Base class of results. Their ``repr`` is one line, so that a notebook does not print every tensor."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


Role: TypeAlias = Literal["model", "optimizer", "scheduler", "ema", "scaler", "rng", "criterion", "other"]
ArchiveForm: TypeAlias = Literal["zip", "tar"]
FactKind: TypeAlias = Literal[
    "short-storage", "missing-storage", "past-end", "orphan-record", "crc-mismatch", "compressed-storage",
    "encoded-storage", "stray-bytes", "kept-for-undo", "unnamed-file", "newer-file", "other-save",
    "damaged-piece", "missing-end", "missing-rank", "missing-replica", "other-step", "absent-shard",
    "other-replica", "replica-file", "inner-archive", "graph-device", "outside-member", "special-member",
    "second-reading"]  # fmt: skip
LACKING: Final = frozenset({"missing-storage", "short-storage", "past-end"})  # bytes are missing, and in every copy too


class Span(NamedTuple):
    """A range of bytes.

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
    """A storage: one range of bytes that one or more tensors view.

    Attributes:
        key: its name, unique in the container.
        device: its location tag as written, for example ``cuda:3``.
        dtype: dtype of its elements; ``uint8`` for an untyped storage.
        numel: number of its elements.
        nbytes: ``numel`` times the size of an element.
        tag_sites: offsets, in the object pickle, of every operation that pushes its location tag.
        class_sites: the same for its storage class; empty if it has none.
    """

    key: str
    device: str
    dtype: str
    numel: int
    nbytes: int
    tag_sites: tuple[int, ...]
    class_sites: tuple[int, ...]


class TensorRecord(NamedTuple):
    """A named tensor.

    Attributes:
        name: path from the root, parts joined by dots.
        role: the part of a training run that it belongs to.
        device: tag of the device that it was saved from.
        dtype: torch's name without ``torch.``.
        shape: its sizes.
        stride: strides in elements; empty for layouts without strides.
        storage: key of its storage; None if its bytes are not in a storage.
        storage_offset: in elements, from the start of the whole storage, also for views that torch before 0.4 saved.
        nbytes: number of elements times the size of one. 0 for a wrapper subclass: its inner tensors have records of
            their own, named ``NAME.inner``.
        kind: ``tensor``, ``parameter``, ``sparse_coo``, ``sparse_csr``, ``quantized``, ``nested``, ``meta``,
            ``device-data`` (bytes inside the pickle, as for xla tensors), ``wrapper-subclass`` or ``storage``;
            ``conj``, ``neg`` or ``conj-neg`` for a view that torch conjugates or negates on use.
        subclass: full name of its class if it is neither Tensor nor Parameter, else an empty string.
        requires_grad: as saved.
        parts: the dense tensors of a sparse, nested or quantized one, named ``NAME.indices`` and so on.
        device_site: offset of the operation that pushes a device that is *not* a storage tag (``xla:0``), or None. This
            device decides where the tensor is loaded, independent of the tag of its storage.
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
    parts: tuple["TensorRecord", ...] = ()
    device_site: int | None = None

    def dense(self) -> "tuple[TensorRecord, ...]":
        """Return the tensors that view storages: the parts, or the tensor itself."""
        return self.parts or (self,)


class Mention(NamedTuple):
    """A device that is named outside of any tensor.

    Attributes:
        where: path from the root.
        kind: ``torch.device``, ``string``, ``device_ids``, or ``device_mesh`` for the device type of a ``DeviceMesh``.
        value: as written: ``cuda:0``, ``cuda`` for a mesh, or ``[0, 1]`` for device ids.
        site: offset of the operation that pushes the device string; None if it cannot be edited.
        index_site: for a ``torch.device`` with an index: offset of the operation that pushes the index.
        tuple_site: for a ``torch.device``: offset of the operation that builds its argument tuple; in TorchScript the
            same as ``site``.
    """

    where: str
    kind: Literal["torch.device", "string", "device_ids", "device_mesh"]
    value: str
    site: int | None = None
    index_site: int | None = None
    tuple_site: int | None = None


#: The oldest supported torch.
OLDEST_TORCH: Final = "2.4"


class GlobalUse(NamedTuple):
    """A name that the pickle imports when it is loaded.

    Attributes:
        name: full name, as torch looks it up.
        weights_only_since: the first torch, from 2.4 on, whose ``torch.load(weights_only=True)`` allows it by default;
            None if no version does.
        verdict: ``safe``: known and harmless; ``dangerous``: never needed in a checkpoint; else ``unknown``.
        record: the part of the file that imports it, if a load of the checkpoint does not read that part; else empty.
    """

    name: str
    weights_only_since: str | None
    verdict: Literal["safe", "unknown", "dangerous"]
    record: str = ""

    @property
    def weights_only(self) -> bool:
        """Whether ``torch.load(weights_only=True)`` of the newest torch allows it by default."""
        return self.weights_only_since is not None


class OpaqueValue(Enum):
    """Placeholder for a value that only executing the pickle could build."""

    OBJECT = "an object"


OPAQUE: Final = OpaqueValue.OBJECT


class FlagValue(NamedTuple):
    """A boolean option of a parameter group, with its place in the pickle.

    Attributes:
        name: ``capturable`` or ``fused``.
        value: as written.
        site: offset of the operation that pushes it.
    """

    name: str
    value: bool
    site: int


class ParamGroup(NamedTuple):
    """One of an optimizer's ``param_groups``.

    Attributes:
        where: path from the root.
        params: keys of its parameters in the state: indices or names.
        param_names: names of its parameters if the optimizer was created with named parameters, else empty.
        options: its hyperparameters in order: plain values and tuples of them; :data:`OPAQUE` for all others.
        flags: ``capturable`` and ``fused``, if they are booleans.
    """

    where: str
    params: tuple[str, ...]
    param_names: tuple[str, ...]
    options: tuple[tuple[str, object], ...]
    flags: tuple[FlagValue, ...]

    def is_set(self, name: str) -> bool:
        """Whether a flag is present and true."""
        return any(flag.name == name and flag.value for flag in self.flags)


class StateEntry(NamedTuple):
    """The state of an optimizer for one parameter.

    Attributes:
        key: the parameter's key, as in ``ParamGroup.params``.
        tensors: state key (``exp_avg``) and tensor, in order.
        scalars: state key and plain value (for example the ``int`` step of old torch), in order.
        nested: paths of its lists and dicts, outer before inner, each with its kind. Their members are in ``tensors``
            and ``scalars``: ``al.0``. The path of the entry itself, which is empty, is listed only if it cannot be
            rebuilt.
        keys: paths of dict members whose key is not text, each with its key: ``buf.0`` and 0.
    """

    key: str
    tensors: tuple[tuple[str, TensorRecord], ...]
    scalars: tuple[tuple[str, object], ...]
    nested: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, object], ...] = ()

    def tensor(self, state_key: str) -> TensorRecord | None:
        """Return the tensor of a state key, or None."""
        return dict(self.tensors).get(state_key)

    def without_inner(self) -> "StateEntry":
        """Return the entry as its optimizer stores it, without the contents of wrapper subclasses."""
        inside = tuple([f"{key}." for key, record in self.tensors if record.kind == "wrapper-subclass"])
        if not inside:
            return self
        return self._replace(
            tensors=tuple([pair for pair in self.tensors if not pair[0].startswith(inside)]),
            scalars=tuple([pair for pair in self.scalars if not pair[0].startswith(inside)]),
            nested=tuple([pair for pair in self.nested if not pair[0].startswith(inside)]),
        )


class OptimizerRecord(NamedTuple):
    """The state_dict of an optimizer, at any place in a checkpoint.

    Attributes:
        where: path from the root; empty for the root itself.
        groups: its ``param_groups``.
        state: its ``state``, in the order of the file.
        algorithm: class in ``torch.optim`` that its keys match, or None.
        candidates: every class in ``torch.optim`` that writes these keys; several for Adam and AdamW of old torch.
        mistyped: keys that are text in the state and numbers in the groups, or the reverse.
        is_flat: whether the file stores options for each parameter instead of groups; here each becomes its own group.
        obstacle: why it cannot be stepped, if the checkpoint does not record enough; else empty.
        ranks: number of ranks that share its state, in ZeRO; this one may have the share of one.
    """

    where: str
    groups: tuple[ParamGroup, ...]
    state: tuple[StateEntry, ...]
    algorithm: str | None = None
    candidates: tuple[str, ...] = ()
    mistyped: tuple[str, ...] = ()
    is_flat: bool = False
    obstacle: str = ""
    ranks: int = 1


class BrokenNumber(NamedTuple):
    """A plain number of a scheduler or a ``GradScaler`` that training cannot go on from.

    Attributes:
        where: path from the root.
        is_scale: whether it is the scale of a ``GradScaler``, and not a number of a scheduler.
        value: the number as text.
    """

    where: str
    is_scale: bool
    value: str


class ArchiveFact(NamedTuple):
    """A property of the container's bytes that a finding is based on.

    Attributes:
        kind: kind of the fact. ``short-storage``: the record is smaller than its storage. ``orphan-record``: no storage
            refers to it. ``stray-bytes``: bytes in no record, or after a pickle. ``kept-for-undo``: stray bytes of a
            conversion in place. ``unnamed-file``: a file that the ``.metadata`` in its directory does not name.
            ``newer-file``: a file that was written later than its ``.metadata``; ``other-save`` if its step counts are
            those of another save. ``damaged-piece``: a piece that differs from its entry in the ``.metadata``.
            ``missing-rank``: a file of a rank that is not there, unlike those of other ranks;
            ``missing-replica`` if the others have all parts of its tensors. ``other-step``: a file of a rank whose step
            count is not that of the other ranks. ``absent-shard``: a file that may be missing, of those that each have
            one chunk of a tensor. ``other-replica``: a tensor whose replicas on several ranks differ;
            ``replica-file``: a file whose replica is not that of most ranks.
            ``missing-end``: a tar of files may be cut off. ``inner-archive``: an archive in an archive, which is not
            read. ``graph-device``: a weight that its graph expects on another device. ``second-reading``: what another
            reader sees in the same file.
            ``outside-member``: a member of an archive whose name, or the target of its link, leads out of the folder
            that it is unpacked to; ``special-member``: one with a setuid or setgid bit, a device or a pipe.
        record: name of the record or key of the storage; for a stream, which has no names, a description.
        nbytes: number of bytes that are missing, unreachable or stored.
        storage: key of the storage, if its record has another name than in an archive: in a directory, for example.
    """

    kind: FactKind
    record: str
    nbytes: int
    storage: str | None = None

    def below(self, path: str) -> "ArchiveFact":
        """Return the fact as one of the directory that contains the file at ``path``."""
        prefix = f"{path}/" if path else ""
        return self._replace(record=prefix + self.record, storage=prefix + self.storage_key)

    @property
    def storage_key(self) -> str:
        """The key of the storage, if the record is one. Records of storages are named ``X/data/KEY`` or ``X/KEY``."""
        if self.storage is not None:
            return self.storage
        _, is_data, key = self.record.rpartition("/data/")
        return key if is_data or self.record.count("/") <= 1 else self.record.partition("/")[2]


@dataclass(frozen=True, kw_only=True, repr=False)
class Inventory(OneLine):
    """Everything that ``inspect`` reports about a checkpoint, and that ``convert`` uses.

    Attributes:
        path: as given by the user.
        container: format of the file.
        layout: trainer or library whose layout it has.
        size_bytes: size of the file.
        torch_version: version of torch that wrote it, if the file contains it.
        producer: the other program that wrote it (``pytorch-lightning 2.1.0``), if the file contains it.
        root_keys: keys of the root, if it is a dict, without numbers of plain values.
        tensors: every tensor, in the order of the file.
        storages: every storage, in the order of first use.
        mentions: devices named outside of tensors.
        globals: names that the pickle imports when it is loaded.
        foreign_opcodes: names of opcodes that torch's weights-only unpickler does not support.
        filled_classes: names of classes whose items the weights-only unpickler cannot set, even if they are allowed.
        optimizers: state_dicts of optimizers.
        apart: names that are imported by pickles that a load of the checkpoint does not read.
        facts: properties of the container's bytes.
        contents: other contents needed for a resume: ``scheduler``, ``scaler``, ``rng``, ``counter``.
        rng_devices: path and length of each list of per-device RNG states.
        last_rates: for each scheduler, the path and the values of its last learning rates.
        broken_numbers: numbers of schedulers and scalers that training cannot go on from.
        sections: path and role of each container whose role differs from that of the container around it.
        objects: paths of pickled modules and optimizers, without those inside of another one. No ``load_state_dict``
            moves their tensors.
        epoch: epoch of the training; None if the file has no such counter. Some trainers count parts of an epoch.
        step: step of the training; None if the file has no such counter.
    """

    path: str
    container: str
    layout: str
    size_bytes: int
    torch_version: str | None = None
    producer: str | None = None
    root_keys: tuple[str, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    storages: tuple[StorageRef, ...] = ()
    mentions: tuple[Mention, ...] = ()
    globals: tuple[GlobalUse, ...] = ()
    apart: tuple[GlobalUse, ...] = ()
    foreign_opcodes: tuple[str, ...] = ()
    filled_classes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    facts: tuple[ArchiveFact, ...] = ()
    contents: frozenset[str] = frozenset()
    rng_devices: tuple[tuple[str, int], ...] = ()
    last_rates: tuple[tuple[str, tuple[float, ...]], ...] = ()
    broken_numbers: tuple[BrokenNumber, ...] = ()
    sections: tuple[tuple[str, Role], ...] = ()
    objects: tuple[str, ...] = ()
    epoch: float | None = None
    step: int | None = None

    def __str__(self) -> str:
        """Return path, container, layout and the number of tensors in one line."""
        return f"{self.path}: {self.container}, {self.layout}, {len(self.tensors):,} tensors"


class Severity(str, Enum):
    """How serious a finding is: a resume fails, a resume may fail, for information. Equal to its value: ``"error"``."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Finding(NamedTuple):
    """A problem in a checkpoint.

    Attributes:
        code: stable code, for example ``D102``.
        name: its kebab-case name.
        severity: how serious it is.
        message: the problem in one line, with figures.
        where: paths of the tensors or objects concerned, in the order of the file.
        fix: the command or the line of code that fixes it; empty if no action is needed.
    """

    code: str
    name: str
    severity: Severity
    message: str
    where: tuple[str, ...] = ()
    fix: str = ""


def fails_run(findings: Iterable[Finding], *, strict: bool) -> bool:
    """Whether findings fail a run: errors do, and with ``--strict`` warnings too."""
    grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return any(finding.severity in grave for finding in findings)
