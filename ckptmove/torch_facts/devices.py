"""The grammar of device tags and of ``map_location``: the only place that takes a device's name apart.

Never raises on a tag that a file holds, however odd; only the ``parse_`` functions, which read what a user typed, do.

Facts are those of torch 2.13: ``torch/serialization.py`` (``_backend_tag``, ``_cpu_tag``, ``_mps_tag``),
``torch/optim/optimizer.py`` (``_get_capturable_supported_devices``) and ``torch/utils/_foreach_utils.py``
(``_get_fused_kernels_supported_devices``); tests hold the tables against torch.
"""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import Final

from ckptmove.errors import UnknownDevice, UsageError
from ckptmove.torch_facts.dtypes import ITEM_BYTES, MPS_DTYPES

#: Stands for the device of a tensor where the format keeps none.
NO_DEVICE: Final = "unknown"
#: Device types of torch's own.
_TORCH_TYPES: Final = frozenset({
    "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
    "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
})  # fmt: skip
#: Names that vendors give to ``privateuseone`` (``torch.utils.rename_privateuse1_backend``).
_RENAMED: Final = frozenset({
    "npu", "mlu", "musa", "gcu", "sdaa", "ocl", "neuron", "spyre", "rbln", "openreg",
})  # fmt: skip
#: Types whose storages ``torch.save`` tags.
_TAGGED: Final = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "privateuseone"}) | _RENAMED
#: Types whose tag has no index; ``_backend_tag`` writes the others with one, since a real tensor always has one.
_UNINDEXED: Final = frozenset({"cpu", "mps"})
_CAPTURABLE: Final = frozenset({"cuda", "xpu", "hpu", "xla", "privateuseone"})
_FUSED: Final = frozenset({"mps", "cuda", "xpu", "hpu", "cpu", "mtia", "privateuseone"})

_NOT_ON_MPS: Final = frozenset(ITEM_BYTES) - MPS_DTYPES

#: torch keeps an index in eight bits; it takes a larger one without a word and makes another index of it.
_MAX_INDEX: Final = 127
_GRAMMAR: Final = re.compile(r"([a-z_][a-z0-9_]*)(?::(0|[1-9][0-9]{0,2}))?")
_WORD: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_WILDCARDS: Final = frozenset("*?[")

_XLA: Final = "xla tensors are saved as plain values and placed when they are loaded, so there is no tag to write"
_WHY_NOT: Final[dict[str, str]] = {
    "xla": _XLA,
    "tpu": f"torch names a TPU xla, and {_XLA}",
    "meta": "a meta tensor has no values, so nothing can be moved there",
    "hip": "torch names the devices of ROCm cuda, also in files",
}
#: What people call devices that torch calls otherwise.
_ALIASES: Final[dict[str, str]] = {
    "gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "rocm": "cuda", "amd": "cuda", "": "cuda",
    "metal": "mps", "apple": "mps", "mac": "mps", "intel": "xpu", "gaudi": "hpu", "habana": "hpu", "ascend": "npu",
    "cambricon": "mlu", "host": "cpu", "ram": "cpu", "privateuse": "privateuseone",
}  # fmt: skip


def split(tag: str) -> tuple[str, int | None]:
    """Take a tag apart.

    Args:
        tag: any text; what follows the first colon counts as an index only where it is a plain number.

    Returns:
        The device type, and the index or None.
    """
    kind, _, index = tag.partition(":")
    return kind, int(index) if _DIGITS.fullmatch(index) else None


def is_device_string(text: str) -> bool:
    """Whether ``torch.device(text)`` takes it, a renamed ``privateuseone`` included, and keeps its index as it is."""
    match = _GRAMMAR.fullmatch(text)
    return (
        match is not None and match[1] in _TORCH_TYPES | _RENAMED and (match[2] is None or int(match[2]) <= _MAX_INDEX)
    )


def same_device(first: str, second: str) -> bool:
    """Whether two tags name one device; without an index, the first of its type is meant."""
    kind, index = split(first)
    return (kind, index or 0) == (split(second)[0], split(second)[1] or 0)


def is_accelerator(tag: str) -> bool:
    """Whether a tag names a device with memory of its own; a word that torch lacks can only be one of a vendor."""
    kind, _ = split(tag)
    return _WORD.fullmatch(kind) is not None and kind not in {"cpu", "meta", NO_DEVICE}


def supports_capturable(tag: str) -> bool:
    """Whether an optimizer with ``capturable=True`` can step there (``_get_capturable_supported_devices``)."""
    return _is_listed(tag, _CAPTURABLE)


def supports_fused(tag: str) -> bool:
    """Whether an optimizer with ``fused=True`` can step there (``_get_fused_kernels_supported_devices``)."""
    return _is_listed(tag, _FUSED)


def _is_listed(tag: str, types: frozenset[str]) -> bool:
    """Whether a list of torch's has a device; they all take ``privateuseone``, whatever its vendor calls it."""
    kind, _ = split(tag)
    return kind in types or (kind not in _TORCH_TYPES and _WORD.fullmatch(kind) is not None)


def unsupported_dtypes(tag: str) -> frozenset[str]:
    """The dtypes that a device cannot compute with at all."""
    return _NOT_ON_MPS if split(tag)[0] == "mps" else frozenset()


def matches(glob: str, tag: str) -> bool:
    """Whether the source of a mapping means a tag.

    Args:
        glob: a glob over tags; without an index and without a wildcard it means every index of its type.
        tag: a tag; without an index, the first of its type is meant.
    """
    kind, index = split(tag)
    return fnmatchcase(tag, glob) or glob == kind or (index is None and fnmatchcase(f"{kind}:0", glob))


def parse_target(text: str) -> str:
    """Read the device that a checkpoint is to be moved to.

    Args:
        text: what the user typed: ``cuda``, ``cuda:1``, ``mps``; a ``torch.device`` reads the same.

    Returns:
        The tag as ``torch.save`` would write it there: ``cuda:0``, ``cuda:1``, ``mps``.

    Raises:
        UnknownDevice: torch knows no such device.
        UsageError: torch knows it, but no storage in a file can be tagged with it.
    """
    text = str(text)
    match = _GRAMMAR.fullmatch(text)
    kind, index = (match[1], int(match[2] or 0)) if match else ("", 0)
    why = _WHY_NOT.get(split(text.lower())[0])
    if why is not None or kind in _TORCH_TYPES - _TAGGED:
        raise UsageError(f"a checkpoint cannot be moved to '{text}': {why or 'torch.save has no tag for it'}")
    if kind not in _TAGGED or index > (0 if kind in _UNINDEXED else _MAX_INDEX):
        raise UnknownDevice(text, suggest(text))
    return kind if kind in _UNINDEXED else f"{kind}:{index}"


def parse_mapping(text: str) -> tuple[str, str]:
    """Read one ``SRC=DST`` of ``--map``.

    Args:
        text: what the user typed: ``cuda:*=cuda:0``.

    Returns:
        The glob over source tags, and the destination's tag.

    Raises:
        UnknownDevice: torch knows no such device.
        UsageError: it is no mapping, or the destination cannot be in a file.
    """
    source, equals, destination = (part.strip() for part in text.partition("="))
    if not (source and equals and destination):
        raise UsageError(f"'{text}' is not a mapping of devices, which is written SRC=DST")
    return parse_pair(source, destination)


def parse_pair(source: str, destination: str) -> tuple[str, str]:
    """Read one source and its destination, as a ``map_location`` dict pairs them.

    Args:
        source: a tag, or a glob over tags.
        destination: a device.

    Returns:
        The glob over source tags, and the destination's tag.

    Raises:
        UnknownDevice: torch knows no such device.
        UsageError: the destination cannot be in a file.
    """
    if not is_device_string(source) and _WILDCARDS.isdisjoint(source):
        raise UnknownDevice(source, suggest(source))
    return source, parse_target(destination)


def suggest(text: str) -> str | None:
    """The target that a word of no meaning to torch comes closest to, or None."""
    word = "".join(text[:64].lower().split())
    head = re.match(r"[a-z]*", word)
    name = head[0] if head else ""
    rest = word[len(name) :]
    digits = _DIGITS.search(rest)
    if (not name and not digits) or name in _WHY_NOT:
        return None  # no target is near what is none for a reason of its own
    close = difflib.get_close_matches(name, sorted(_TAGGED), n=1)
    kind = _ALIASES.get(name) or (close[0] if close else None)
    if kind is None or kind in _UNINDEXED:
        return kind
    index = int(digits[0]) if digits and "-" not in rest and kind != "privateuseone" else 0
    return f"{kind}:{index if index <= _MAX_INDEX else 0}"
