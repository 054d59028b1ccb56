"""Parse the JSON of a ``torch.export`` archive, and find its devices.

From torch/_export/serde/schema.py: a ``Device`` is ``{"type": "cuda", "index": 0}``, the only object with these two
keys. After torch/export/passes ``move_to_device_pass``, an argument with the name ``device`` is a string instead:
``{"as_string": "cuda:0"}``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from ckptmove.errors import DamagedArchive, LimitExceeded
from ckptmove.torch_facts.devices import is_device_string, split

#: Maximum number of bytes of JSON and inflated pickles of an archive; and of objects, lists and values in the JSON. A
#: graph of 60,000 nodes has 84 MB and about 4 million values.
_MOST_BYTES: Final = 1 << 27
_MOST_VALUES: Final = 1 << 22
#: In valid JSON the brace is never inside a string: the quote after it would end the string, and a name cannot follow.
_DEVICE: Final = re.compile(
    rb'\{\s*(?:"type"\s*:\s*"[^"\\]*"\s*,\s*"index"\s*:\s*(?:null|-?\d+)'
    rb'|"index"\s*:\s*(?:null|-?\d+)\s*,\s*"type"\s*:\s*"[^"\\]*"'
    rb'|"as_string"\s*:\s*(?P<text>"[^"\\]*"))\s*\}'
)
#: torch names mps tensors ``mps:0`` in a graph, and ``mps`` in a file of ``torch.save``.
_WITHOUT_INDEX: Final = "mps"
_TYPE: Final = re.compile(r"[a-z][a-z0-9_]*")
_MOST_INDEX: Final = (1 << 15) - 1


class ExportDevice:
    """A device in the text; its tag is as ``torch.save`` would write it: ``cuda:0``."""

    __slots__ = ("is_string", "is_value", "tag")

    def __init__(self, kind: str, index: int | None, *, is_string: bool = False) -> None:
        self.tag = kind if index is None or (kind, index) == (_WITHOUT_INDEX, 0) else f"{kind}:{index}"
        self.is_value = False  # whether it is in a tensor's metadata; otherwise it is a node's argument
        self.is_string = is_string  # it may have another meaning: `torch.autocast` stores its device so


class JsonBudget:
    """Limits on the memory for all records of one archive together."""

    def __init__(self, path: str, factor: int) -> None:
        self._path, self._factor = path, factor
        self._taken = {"bytes": 0, "values": 0}

    def take(self, **counts: int) -> None:
        """Count ``bytes`` or ``values``."""
        for what, count in counts.items():
            self._taken[what] += count
            limit = self._factor * {"bytes": _MOST_BYTES, "values": _MOST_VALUES}[what]
            if self._taken[what] > limit:
                resource = f"the number of {what} in the JSON and the pickles of the archive"
                raise LimitExceeded(resource, limit=limit, actual=self._taken[what], path=self._path)


class ExportJson:
    """A JSON record; its value has an :class:`ExportDevice` for each device."""

    def __init__(self, name: str, text: bytes, path: str, budget: JsonBudget) -> None:
        self.name, self.text, self._path = name, text, path
        budget.take(values=sum(text.count(mark) for mark in (b"{", b"[", b",")))
        self.devices: list[ExportDevice] = []  # in the order of the text
        #: The distinct strings under these keys.
        self.strings: dict[str, set[str]] = {"expr_str": set(), "target": set()}
        try:
            self.value: Any = json.loads(text.decode("utf-8"), object_pairs_hook=self._object, parse_constant=_refuse)
        except RecursionError as error:
            raise self.damage("is nested too deeply") from error
        except ValueError as error:
            raise self.damage("is not JSON as torch writes it") from error

    def without_devices(self) -> bytes:
        """The text without its devices."""
        return _DEVICE.sub(
            lambda match: match[0] if match["text"] and not _is_device(match["text"]) else b"", self.text
        )

    def damage(self, detail: str) -> DamagedArchive:
        """The error for a record that torch would not write."""
        return DamagedArchive(self._path, f"{self.name} {detail}")

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("duplicate key")
        if found.keys() == {"type", "index"}:
            kind, index = found["type"], found["index"]
            is_index = index is None or (type(index) is int and 0 <= index <= _MOST_INDEX)
            if is_index and type(kind) is str and _TYPE.fullmatch(kind):
                self.devices.append(ExportDevice(kind, index))
                return self.devices[-1]
        if len(found) == 1 and type(text := found.get("as_string")) is str and _is_device(json.dumps(text).encode()):
            self.devices.append(ExportDevice(*split(text), is_string=True))
            return self.devices[-1]
        device, argument = found.get("device"), found.get("arg")
        if type(device) is ExportDevice and "sizes" in found:
            device.is_value = True
        if type(argument) is ExportDevice and found.get("name") == "device":
            argument.is_string = False
        for key, texts in self.strings.items():
            if type(found.get(key)) is str:
                texts.add(found[key])
        return found


def _is_device(quoted: bytes) -> bool:
    return is_device_string(quoted[1:-1].decode("utf-8", "replace"))


def _refuse(text: str) -> float:
    raise ValueError(text)
