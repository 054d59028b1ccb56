"""The function ``load``, apart from the others: a script that loads a checkpoint needs none of their modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from ckptmove.api.arguments import NotAccepted, location, move_request, remap_of, targets
from ckptmove.api.hinting import hinted
from ckptmove.limits import Limits
from ckptmove.pickles.collector import collector_paused
from ckptmove.proof.errors import PackageMissing, TorchBroken
from ckptmove.torch_facts.devices import parse_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.arguments import FilePath, MapLocation
    from ckptmove.moves import MoveRequest


@hinted()
@collector_paused()  # imports create many objects too
def load(
    path: FilePath | BinaryIO,
    map_location: MapLocation | None = None,
    *,
    weights_only: bool | None = True,
    mmap: bool | None = False,
    only: str | Sequence[str] | None = None,
    plain: bool = False,
    limits: Limits | None = None,
) -> Any:
    """Load a checkpoint, as ``torch.load`` does, and remap its state for the device. Its pickle is never executed.

    With a device, RNG states stay on the CPU, ``step`` goes where its optimizer creates it, and ``capturable`` and
    ``fused`` become False where the device lacks them, as :func:`convert` writes them.

    Args:
        path: a file, or a directory or an archive of files, which becomes one dict; or a binary file
            object.
        map_location: as in ``torch.load``: a device, ``"meta"``, or a dict from globs of devices to them (default: the
            devices of the file).
        weights_only: True, as the pickle is never executed.
        mmap: whether tensors that stay on the CPU are mapped from the file, instead of read into memory. Writing to
            them never changes it. The file must not be overwritten while they exist: that kills the process.
        only: parts to load: globs of paths, or roles; the bytes of all others are not read.
        plain: whether objects that only code could build become plain values, instead of an error.
        limits: resource limits for reading it.

    Returns:
        The saved object: dicts, lists, tensors and numbers, with shared storages.

    Raises:
        PackageMissing, TorchBroken: if torch is not installed, or cannot be imported.
        UsageError: if ``weights_only`` is False, ``map_location`` is a function, ``only`` is empty, a device is
            unknown, or this machine lacks it.
        UnreadableInput: if it cannot be read, is damaged, or is not a checkpoint.
        Refused: if weights-only mode does not allow its objects, an object has no plain value, or the device lacks a
            dtype.
    """
    if weights_only is not None and not weights_only:
        raise NotAccepted(
            "weights_only=False would execute the pickle, which load never does",
            "load plain values in place of objects: plain=True",
        )
    try:
        from ckptmove.proof.loading.load import LoadRequest, load_checkpoint, on_current_device
    except ImportError as error:
        if error.name == "torch":
            raise PackageMissing("torch", "load builds tensors and needs") from error
        raise TorchBroken(f"{type(error).__name__}: {error}") from error

    is_meta = map_location is not None and str(map_location) == "meta"
    to, mapping = targets(None, None if is_meta else map_location)
    to = None if to is None else on_current_device(to)
    pairs = [(source, on_current_device(device)) for source, device in mapping.items()]
    has_parts = only is not None or plain
    is_to_cpu = to == "cpu" and not has_parts
    # On the meta device torch does not compare tensors with their storages: the whole inventory does.
    has_changes = (to is not None and not is_to_cpu) or bool(pairs) or has_parts or is_meta
    move = _changes(to, pairs, only, plain=plain) if has_changes else None
    request = LoadRequest(
        location(path), move, is_to_cpu, is_meta=is_meta, is_mapped=bool(mmap), limits=limits or Limits()
    )
    return load_checkpoint(request)


def _changes(
    to: str | None, pairs: Sequence[tuple[str, str]], only: str | Sequence[str] | None, *, plain: bool
) -> MoveRequest:
    """What changes between the file and memory. A load without changes needs none of the modules for them."""
    # A tensor on the meta device has no bytes: load can move it there, and convert cannot.
    parsed = [(parse_pair(source, "cpu" if device == "meta" else device), device) for source, device in pairs]
    remap = remap_of({"only": only, "plain": plain})
    return move_request(to, {}, (), cast=False, rewrite_strings=False, remap=remap)._replace(
        mapping=tuple((glob, device if device == "meta" else target) for (glob, target), device in parsed)
    )
