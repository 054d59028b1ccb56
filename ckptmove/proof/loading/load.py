"""Load a checkpoint into memory, with its state remapped, without executing its pickle."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from ckptmove.checkpoint.naming import naming
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Dict, nodes
from ckptmove.proof.loading.errors import NotLoadable, NotRebuilt, NotWeightsOnly
from ckptmove.proof.loading.objects import REJECTED, NotAllowed, build
from ckptmove.proof.loading.storages import Storages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import FilePart, OpenPart, TreeUse
    from ckptmove.model import GlobalUse, StorageRef
    from ckptmove.moves import MoveRequest
    from ckptmove.pickles.tree import Value


#: Characters of torch's message, which can list every backend.
_LONGEST: Final = 200
#: Names in a pickle whose objects have no device of their own, next to storages.
_WITHOUT_DEVICE: Final = frozenset({
    "collections.OrderedDict", "torch.Size", "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2",
})  # fmt: skip
#: Options of an optimizer that a move can change, as keys or as ends of keys.
_FLAGS: Final = ("capturable", "fused")


def on_current_device(device: str) -> str:
    """Add the index of the current device to ``cuda`` and ``xpu``, as ``torch.serialization._validate_device`` does."""
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device)
    return device if module is None or not module.is_available() else f"{device}:{module.current_device()}"


class LoadRequest(NamedTuple):
    """The options of :func:`ckptmove.load`."""

    path: str  # a file, a directory or an archive
    move: MoveRequest | None = None  # its moves and changes; None without any
    is_to_cpu: bool = False  # whether it moves to the CPU, without other changes; `move` is None then
    is_meta: bool = False  # whether every tensor is on the meta device, without bytes
    #: whether tensors that stay on the CPU are mapped from the files, instead of read into memory.
    is_mapped: bool = False
    limits: Limits = Limits()  # resource limits for reading it


#: A tree to build objects from; part and description of each storage by key; and new devices of storages by key, if
#: their persistent ids have the old ones.
_Prepared: TypeAlias = "tuple[Value, Mapping[str, tuple[OpenPart, StorageRef]], Mapping[str, str]]"


class _NeedsPlan(Exception):
    """A move to the CPU that changes more than the devices of storages."""


def load_checkpoint(request: LoadRequest) -> Any:
    """Run a request of :func:`ckptmove.load`; errors as there."""
    try:
        return _loaded(request)
    except (_NeedsPlan, NotRebuilt):
        if request.move is not None:
            raise
    from ckptmove.moves import MoveRequest

    # The whole inventory names what is damaged, and a plan finds what else moves.
    return _loaded(request._replace(move=MoveRequest("cpu" if request.is_to_cpu else None), is_to_cpu=False))


def _loaded(request: LoadRequest) -> Any:
    path = request.path
    with naming(path), ExitStack() as stack:
        checkpoint = stack.enter_context(
            open_checkpoint(path, request.limits, keep_trees=True, tree=_use(request.move))
        )
        for part in checkpoint.parts:
            if facts_of(part.inventory.container).has_code:
                raise NotLoadable(part.path, part.inventory.container)
        (root, homes, devices), uses = _prepared(checkpoint, request), checkpoint.inventory.globals
        # The inventory takes as much memory as the tree, and is not needed to build the objects.
        for part in checkpoint.parts:
            part.forget_tensors()
        del checkpoint
        with Storages(homes, devices, is_meta=request.is_meta, is_mapped=request.is_mapped) as storages:
            try:
                return build(root, storages.storage, request.limits.depth)
            except NotAllowed as error:
                raise _refusal(request, uses, str(error)) from None
            except CkptMoveError:
                raise
            except REJECTED as error:
                line = str(error).strip().partition("\n")[0][:_LONGEST] or type(error).__name__
                raise NotRebuilt(f"torch rejects an object: {line}", path=path) from error


def _prepared(checkpoint: OpenCheckpoint, request: LoadRequest) -> _Prepared:
    inventory = checkpoint.inventory
    has_devices = checkpoint.listing is None and facts_of(inventory.container).has_devices
    if not has_devices or _use(request.move) == "edit":
        return _remapped(checkpoint, request)
    part = checkpoint.file
    homes = {storage.key: (part, storage) for storage in inventory.storages}
    if request.move is not None:
        return _moved(part, homes, request.move)
    if request.is_to_cpu and not _moves_alone(part.tree(), inventory.globals):
        raise _NeedsPlan
    devices = [storage for storage in inventory.storages if storage.device != "meta"] if request.is_to_cpu else ()
    return part.whole_tree(), homes, {storage.key: "cpu" for storage in devices}


def _moves_alone(root: Value, uses: Iterable[GlobalUse]) -> bool:
    """Whether a move to the CPU changes only the devices of storages, so that it needs no plan.

    False if an option of an optimizer may change, or a value other than a storage may name a device.
    """
    if not all(use.name in _WITHOUT_DEVICE or use.name.endswith("Storage") for use in uses):
        return False
    pairs = (pair for node in nodes(root) if type(node) is Dict for pair in node.pairs())
    return not any(value is True and type(key) is str and key.endswith(_FLAGS) for key, value, _ in pairs)


def _moved(part: FilePart, homes: Mapping[str, tuple[OpenPart, StorageRef]], move: MoveRequest) -> _Prepared:
    """A tree with other devices, or some of its parts. The devices of storages are looked up: edits are slower."""
    from ckptmove.conversion.plan import plan_move
    from ckptmove.moves import MovePlan

    inventory, root = part.inventory, part.whole_tree()
    plan = plan_move(inventory, move) if move.to or move.mapping else MovePlan(move)
    rest = plan._replace(edits=tuple(edit for edit in plan.edits if edit.storage not in homes))
    if not rest.is_empty:
        from ckptmove.conversion.remap.combine import move_tree

        move_tree(root, rest)
    if move.remap.only:
        from ckptmove.conversion.remap.select import select

        root, _ = select(root, inventory, move.remap)
    return root, homes, {edit.storage: edit.target for edit in plan.edits}


def _remapped(checkpoint: OpenCheckpoint, request: LoadRequest) -> _Prepared:
    """The tree of a directory, an archive or a format without devices; or with other changes than devices and parts."""
    from ckptmove.conversion.plan import plan_before_remap, require_dtypes
    from ckptmove.conversion.remap.remapping import remap
    from ckptmove.moves import MovePlan, MoveRequest

    move = request.move or MoveRequest("cpu" if request.is_to_cpu else None)
    plan = plan_before_remap(checkpoint.inventory, move) if move.to or move.mapping else MovePlan(move)
    remapped = remap(checkpoint, plan, request.limits, as_file=True)
    if plan.edits:
        require_dtypes(remapped.inventory, move)
    return remapped.root, remapped.homes, {}


def _use(move: MoveRequest | None) -> TreeUse:
    """What a tree is for: an edit only if more of it changes than its devices and its parts."""
    if move is None:
        return "objects"
    from ckptmove.moves import Remap
    from ckptmove.torch_facts.devices import unsupported_dtypes

    only, targets = move.remap.only, [target for target in (move.to, *(to for _, to in move.mapping)) if target]
    # Tensors that are left out may have a dtype that the device lacks.
    is_edit = move.remap != Remap(only=only) or (bool(only) and any(map(unsupported_dtypes, targets)))
    return "edit" if is_edit else "build"


def _refusal(request: LoadRequest, uses: Iterable[GlobalUse], name: str) -> NotWeightsOnly:
    from ckptmove.findings.trials import loads
    from ckptmove.torch_facts.registered import modules_of

    refused = [use for use in uses if not use.weights_only]
    names = tuple(use.name for use in refused) or (name,)
    is_dangerous, instead = any(use.verdict == "dangerous" for use in refused), ""
    if not is_dangerous and loads(request.path, request.limits, plain=True):
        instead = "load plain values in place of its objects: plain=True"
    elif modules := modules_of(names):
        instead = f"torch.load(weights_only=True) accepts it after: import {', '.join(modules)}"
    return NotWeightsOnly(request.path, names, is_dangerous=is_dangerous, instead=instead)
