"""Notes on what a conversion leaves unchanged, although the user may expect a change."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import unread_of
from ckptmove.checkpoint.inventory.mentions import is_in_code, named_ids
from ckptmove.conversion.keep import dragged_along, flag_paths
from ckptmove.model import LACKING
from ckptmove.moves import Unmatched
from ckptmove.text import Argument, amount, some
from ckptmove.torch_facts import devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.model import FactKind, Inventory, Mention
    from ckptmove.moves import MovePlan, MoveRequest

_SHOWN: Final = 3
_SHOWN_NAMES: Final = 6
#: Problems of the source, by the kinds of facts about them.
_PROBLEMS: Final[dict[FactKind, str]] = {
    "missing-rank": "files of ranks are missing (F808), and in the output too",
    "other-step": "files are of two saves (F807), and so is the output",
    "other-save": "files are of two saves (F807), and so is the output",
    "newer-file": "files were written after the .metadata (F806): the output may be of two saves",
    "other-replica": "replicas of tensors differ between ranks (F810): the output may be of two states",
    "absent-shard": "shards may be missing (F809), and the end of tensors in the output too",
}


def unmatched_options(inventory: Inventory, request: MoveRequest) -> Iterator[Unmatched]:
    """Options that match nothing."""
    names = [record.name for record in inventory.tensors] + [mention.where for mention in inventory.mentions]
    names += [path for path, _ in flag_paths(inventory)]
    for glob in request.keep:
        if not any(fnmatchcase(name, glob) for name in names):
            yield Unmatched("keep", glob, f"matches no whole name; {_neighbours(glob, names)}")
    tags = {record.device for record in inventory.tensors}
    for glob, _ in request.mapping if tags != {devices.NO_DEVICE} else ():
        if not any(devices.matches(glob, tag) for tag in tags):
            reason = f"matches no device; the file has {', '.join(sorted(tags)) or 'no tensors'}"
            yield Unmatched("map", glob, reason)


def conversion_notes(inventory: Inventory, plan: MovePlan) -> Iterator[str]:
    """Notes on tensors that are also kept, and on devices that are still named."""
    dragged = [one.name for one in dragged_along(plan.kept, plan.request.keep)]
    if dragged:
        yield f"also kept, because they share storage with a match of {Argument('keep')}: {some(dragged, _SHOWN)}"
    left = list(_left_behind(inventory, plan))
    in_configs = [mention for mention in left if not is_in_code(inventory, mention)]
    in_code = [mention for mention in left if is_in_code(inventory, mention)]
    if in_configs:
        moves_strings = not plan.request.rewrite_strings and any(mention.kind == "string" for mention in in_configs)
        hint = f" ({Argument('rewrite_strings', True)} moves strings)" if moves_strings else ""
        yield f"configs still name another device: {some(map(_named, in_configs), _SHOWN)}{hint}"
    if in_code:
        yield f"code still names another device, and is not edited: {some(map(_named, in_code), _SHOWN)}"
    if plan.inflates:
        stored = f"{amount(len(plan.inflates), 'deflated storage')} {'is' if len(plan.inflates) == 1 else 'are'} stored"
        yield f"{stored} uncompressed in the new file, so that it can be memory-mapped (F803)"


def is_refused(inventory: Inventory) -> bool:
    """Whether ``torch.load(weights_only=True)`` refuses a name or an opcode in the pickle."""
    return bool(inventory.foreign_opcodes) or not all(use.weights_only for use in inventory.globals)


def overflow_note(values: int) -> str:
    """Note on values that were too large for the dtype that they were cast to."""
    verb = "was" if values == 1 else "were"
    return f"{amount(values, 'value')} {verb} too large for the smaller dtype: inf in the new file"


def _neighbours(glob: str, names: Sequence[str]) -> str:
    """Names in the file that begin like a glob, up to the next part; otherwise the first parts of all names."""
    begin = ""
    for part in glob.split(".")[:-1]:
        if not any(name.startswith(f"{begin}{part}.") for name in names):
            break
        begin += f"{part}."
    parts = dict.fromkeys(
        begin + part + (".*" if dot else "")
        for name in names
        if name.startswith(begin)
        for part, dot, _ in [name[len(begin) :].partition(".")]
    )
    return f"the file has {some(parts, _SHOWN_NAMES) or 'no tensors'}"


def _left_behind(inventory: Inventory, plan: MovePlan) -> Iterator[Mention]:
    """Devices in configs that stay unchanged, and differ from the device of the converted model.

    Kept names are left out. Every machine has a CPU: it counts only if tensors leave it.
    """
    targets = {name: edit.target for edit in plan.edits for name in edit.names}
    model = [record for record in inventory.tensors if record.role == "model"] or inventory.tensors
    homes = {targets.get(record.name, record.device) for record in model}
    if plan.request.to is not None:
        homes.add(plan.request.to)  # also if the model has no stored device, this is its target
    before = {edit.source for edit in plan.edits}
    edited = {flag.where for flag in plan.flags}
    for mention in inventory.mentions:
        if mention.where in edited or any(fnmatchcase(mention.where, glob) for glob in plan.request.keep):
            continue
        if mention.kind == "device_ids":
            ids = named_ids(mention)
            if ids & _indices(before) and not ids & _indices(homes):
                yield mention
            continue
        is_elsewhere = not any(_means(mention.value, tag) for tag in homes)
        if is_elsewhere and (
            devices.is_accelerator(mention.value) or any(_means(mention.value, tag) for tag in before)
        ):
            yield mention


def _indices(tags: Iterable[str]) -> set[int]:
    return {devices.split(tag)[1] or 0 for tag in tags if devices.is_accelerator(tag)}


def _named(mention: Mention) -> str:
    return f"{mention.where} = {mention.value}"


def _means(value: str, tag: str) -> bool:
    """Whether a named device matches a tag; a name without an index matches every device of its type."""
    return devices.same_device(value, tag) or value == devices.split(tag)[0]


def source_warnings(source: Inventory, new: Inventory, *, is_one_file: bool) -> Iterator[str]:
    """Warnings of problems of the source that the output has too, or no longer shows."""
    kept = {storage.key for storage in new.storages}
    lost = [fact for fact in source.facts if fact.kind in LACKING and (not is_one_file or fact.storage_key in kept)]
    if lost:
        nbytes = sum(fact.nbytes for fact in lost)
        storages = f"{amount(len(lost), 'storage')} {'is' if len(lost) == 1 else 'are'} incomplete"
        yield f"{storages} (F802): {nbytes:,} bytes are missing in the new file too"
    if any(fact.kind == "missing-end" for fact in source.facts):
        yield "the tar is cut off (F802), and the new file too: members at its end may be missing"
    yield from _dangerous_names(new, copies_others=not is_one_file)
    for kind, text in _PROBLEMS.items():
        own = [fact.record for fact in source.facts if fact.kind == kind]
        if own:
            yield f"{text}: {some(own, _SHOWN)}"
    inner = [fact.record for fact in source.facts if fact.kind == "inner-archive"]
    if inner:
        done = "left out" if is_one_file else "copied unchanged"
        yield f"nested archives are {done}, including any checkpoints in them (F804): {some(inner, _SHOWN)}"


def _dangerous_names(new: Inventory, *, copies_others: bool) -> Iterator[str]:
    """Warnings of names that can run code when the output is unpickled."""
    hostile = [file.path for file in unread_of(new) if file.runs]
    if hostile and copies_others:
        yield f"files that can run code when they are unpickled (S702) are copied as they are: {some(hostile, _SHOWN)}"
    dangerous = [use.name for use in (*new.globals, *new.apart) if use.verdict == "dangerous"]
    if dangerous:
        yield f"the new file can still run {some(dangerous, _SHOWN)} when it is unpickled (S702): do not load it"
