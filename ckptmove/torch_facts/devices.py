"""Parse and compare device tags and ``map_location``. No other module splits a device name.

Odd tags in a file never raise; the ``parse_`` functions, which read user input, do.

Facts are from torch 2.13: ``torch/serialization.py`` (``_backend_tag``, ``_cpu_tag``, ``_mps_tag``),
``torch/optim/optimizer.py`` (``_get_capturable_supported_devices``) and ``torch/utils/_foreach_utils.py``
(``_get_fused_kernels_supported_devices``). Tests compare the tables with torch.
"""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import Final

from ckptmove.errors import UnknownDevice, UsageError
from ckptmove.torch_facts.dtypes import ITEM_BYTES, MPS_DTYPES

#: Device of a tensor in a format that does not store devices.
NO_DEVICE: Final = "unknown"
#: Device types that torch itself defines.
_TORCH_TYPES: Final = frozenset({
    "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
    "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
})  # fmt: skip
#: Vendors' names for ``privateuseone`` (``torch.utils.rename_privateuse1_backend``).
_RENAMED: Final = frozenset({
    "npu", "mlu", "musa", "gcu", "sdaa", "ocl", "neuron", "spyre", "rbln", "openreg",
})  # fmt: skip
#: Types whose storages ``torch.save`` tags.
_TAGGED: Final = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "privateuseone"}) | _RENAMED
#: Types whose tag has no index. ``_backend_tag`` writes the others with an index, which every real tensor has.
_UNINDEXED: Final = frozenset({"cpu", "mps"})
_CAPTURABLE: Final = frozenset({"cuda", "xpu", "hpu", "xla", "privateuseone"})
_FUSED: Final = frozenset({"mps", "cuda", "xpu", "hpu", "cpu", "mtia", "privateuseone"})

#: Key of a list of RNG states with one for each device: ``cuda_rng_state_all``, ``torch_hpu_manual_seed``.
DEVICE_RNG: Final = re.compile("|".join(sorted((_TAGGED - {"cpu"}) | {"gpu", "device"})), re.IGNORECASE)

_NOT_ON_MPS: Final = frozenset(ITEM_BYTES) - MPS_DTYPES

#: torch stores an index in eight bits. It accepts a larger one without an error, and changes it.
_MAX_INDEX: Final = 127
_GRAMMAR: Final = re.compile(r"([a-z_][a-z0-9_]*)(?::(0|[1-9][0-9]{0,2}))?")
_WORD: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_WILDCARDS: Final = frozenset("*?[")

_XLA: Final = "xla tensors are saved as plain values and placed when they are loaded, so files have no tag for it"
_WHY_NOT: Final[dict[str, str]] = {
    "xla": _XLA,
    "tpu": f"torch calls a TPU xla, and {_XLA}",
    "meta": "a meta tensor has no values",
    "hip": "torch calls ROCm devices cuda, also in files",
}
#: Common names for devices, and torch's names.
_ALIASES: Final[dict[str, str]] = {
    "gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "rocm": "cuda", "amd": "cuda", "": "cuda",
    "metal": "mps", "apple": "mps", "mac": "mps", "intel": "xpu", "gaudi": "hpu", "habana": "hpu", "ascend": "npu",
    "cambricon": "mlu", "host": "cpu", "ram": "cpu", "privateuse": "privateuseone",
}  # fmt: skip


def split(tag: str) -> tuple[str, int | None]:
    """Split a tag into type and index; what follows the first colon of any text is one only if it is a plain number."""
    kind, _, index = tag.partition(":")
    return kind, int(index) if _DIGITS.fullmatch(index) else None


def is_device_string(text: str) -> bool:
    """Whether ``torch.device(text)`` accepts it and keeps its index unchanged; also a renamed ``privateuseone``."""
    match = _GRAMMAR.fullmatch(text)
    return (
        match is not None and match[1] in _TORCH_TYPES | _RENAMED and (match[2] is None or int(match[2]) <= _MAX_INDEX)
    )


def same_device(first: str, second: str) -> bool:
    """Whether two tags name the same device; a tag without an index means the first device of its type."""
    kind, index = split(first)
    return (kind, index or 0) == (split(second)[0], split(second)[1] or 0)


def is_accelerator(tag: str) -> bool:
    """Whether a tag names a device with its own memory. A type that torch does not know can only be a vendor's."""
    kind, _ = split(tag)
    return _WORD.fullmatch(kind) is not None and kind not in {"cpu", "meta", NO_DEVICE}


def supports_capturable(tag: str) -> bool:
    """Whether an optimizer with ``capturable=True`` can step on the device (``_get_capturable_supported_devices``)."""
    return _is_listed(tag, _CAPTURABLE)


def supports_fused(tag: str) -> bool:
    """Whether an optimizer with ``fused=True`` can step on the device (``_get_fused_kernels_supported_devices``)."""
    return _is_listed(tag, _FUSED)


def _is_listed(tag: str, types: frozenset[str]) -> bool:
    """Whether a list of torch contains a device; all lists contain ``privateuseone``, under any vendor's name."""
    kind, _ = split(tag)
    return kind in types or (kind not in _TORCH_TYPES and _WORD.fullmatch(kind) is not None)


def unsupported_dtypes(tag: str) -> frozenset[str]:
    """Return the dtypes that a device cannot compute with at all."""
    return _NOT_ON_MPS if split(tag)[0] == "mps" else frozenset()


def matches(glob: str, tag: str) -> bool:
    """Whether the source glob of a mapping matches a tag.

    A glob without an index and wildcards matches every index of its type; a tag without one means the first device.
    """
    kind, index = split(tag)
    return fnmatchcase(tag, glob) or glob == kind or (index is None and fnmatchcase(f"{kind}:0", glob))


def parse_target(text: str) -> str:
    """Return the tag that ``torch.save`` writes on the device that a user names: ``cuda:0`` for ``cuda``, ``mps``."""
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
    """Return the glob for source tags and the destination tag of a ``--map`` option: ``cuda:*=cuda:0``."""
    source, equals, destination = (part.strip() for part in text.partition("="))
    if not (source and equals and destination):
        raise UsageError(f"'{text}' is not a mapping of devices: write SRC=DST")
    return parse_pair(source, destination)


def parse_pair(source: str, destination: str) -> tuple[str, str]:
    """Return the glob for source tags and the destination tag of a pair in a ``map_location`` dict."""
    if not is_device_string(source) and _WILDCARDS.isdisjoint(source):
        raise UnknownDevice(source, suggest(source))
    return source, parse_target(destination)


def suggest(text: str) -> str | None:
    """Return the target most similar to a text that torch does not know, or None."""
    word = "".join(text[:64].lower().split())
    head = re.match(r"[a-z]*", word)
    name = head[0] if head else ""
    rest = word[len(name) :]
    digits = _DIGITS.search(rest)
    if (not name and not digits) or name in _WHY_NOT:
        return None  # torch knows it, but it cannot be a target
    close = difflib.get_close_matches(name, sorted(_TAGGED), n=1)
    kind = _ALIASES.get(name) or (close[0] if close else None)
    if kind is None or kind in _UNINDEXED:
        return kind
    index = int(digits[0]) if digits and "-" not in rest and kind != "privateuseone" else 0
    return f"{kind}:{index if index <= _MAX_INDEX else 0}"
