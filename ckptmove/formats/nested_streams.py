"""Find ``torch.save`` streams inside a pickle, and put their contents into its tree.

``torch.storage._load_from_bytes`` is never run: the stream is read as a file would be.

From torch/storage.py: ``TypedStorage.__reduce__`` saves itself into bytes; ``_load_from_bytes`` is ``torch.load``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive, DamagedPickle
from ckptmove.formats.replaced_values import replace_nodes
from ckptmove.formats.torch_legacy import TorchLegacy
from ckptmove.formats.torch_zip import TorchZip
from ckptmove.formats.zip_archive.headers import LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.storage_id import prefix_keys
from ckptmove.pickles.tree import Call, Dict, Global, Tuple, nodes

if TYPE_CHECKING:
    from ckptmove.formats.contract import Container
    from ckptmove.formats.pickle_outline import PickleOutline
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

LOADER: Final = "torch.storage._load_from_bytes"
_ENCODE: Final = "_codecs.encode"
#: POP and POP_MARK.
_DROPPING: Final = frozenset(b"01")


class NestedStream(NamedTuple):
    """A stream inside the pickle."""

    call: Call  # the call that loads it
    container: Container  # the opened stream
    #: index of the long string in the outline that holds it; None if it is written as text, as pickle protocols 0 to 2
    #: write bytes. Such a stream has no span in the file.
    string: int | None
    start: int  # offset of the stream in the file; 0 for text


def find_streams(root: Value, outline: PickleOutline, source: ByteSource, limits: Limits) -> tuple[NestedStream, ...]:
    """The streams that a pickle loads, in file order."""
    found: list[NestedStream] = []
    for node in nodes(root):
        if type(node) is not Call or node.name != LOADER or type(node.args) is not Tuple or not node.args.items:
            continue
        argument = node.args.items[0]
        place = outline.find(argument)
        if place is not None and not outline.strings[place].is_text:
            span = outline.strings[place].span
            found.append(NestedStream(node, open_stream(PartSource(source, span), limits), place, span.start))
        elif isinstance(argument, bytes):
            _refuse_payload(MemorySource(source.path, argument), limits)
        elif type(argument) is Call and argument.name == _ENCODE and argument.arguments[1:] == ("latin1",):
            data = _encoded(argument, outline, source)
            found.append(NestedStream(node, open_stream(MemorySource(source.path, data), limits), None, 0))
    return tuple(sorted(found, key=lambda stream: stream.call.args_start))


def insert_streams(machine: Machine, streams: tuple[NestedStream, ...], limits: Limits) -> None:
    """Read the object pickles of the streams, and replace the calls that load them by their trees.

    Afterwards the data of the machine, which has read the outline, holds all pickles one after the other, and every
    start is an offset in it. The keys of storages get the index of their stream and a colon as a prefix.
    """
    pickles = [machine.data, *(stream.container.object_pickle() for stream in streams)]
    machine.data = b"".join(pickles)
    machine.data_bytes = len(machine.data)
    roots: dict[int, Value] = {}
    begin = len(pickles[0])
    for place, stream in enumerate(streams):
        inner = interpret(machine.data, limits, begin, machine.excess)
        if inner.end != begin + len(pickles[place + 1]):
            raise DamagedArchive(stream.container.source.path, "unexpected bytes after the pickle of a tensor")
        prefix_keys(inner.persistents, f"{place}:")  # a key is an address, which several streams may use
        roots[id(stream.call)] = inner.root
        machine.merge(inner)
        if isinstance(stream.container, TorchLegacy):
            machine.note_names(stream.container.around)
        begin = inner.end
    replace_nodes(machine, roots)


def split_key(key: str, count: int) -> tuple[int | None, str]:
    """The index of a stream and the key of a storage in it; the index is None if no stream has this number."""
    place, colon, inner = key.partition(":")
    is_known = bool(colon) and place.isdecimal() and place.isascii() and int(place) < count
    return int(place) if is_known else None, inner


def opened_calls(machine: Machine) -> frozenset[str]:
    """The loader of streams, if all calls of it were found and read by :func:`insert_streams`; else nothing."""
    # A call that an opcode drops from the stack is in no tree.
    calls = (type(node) is Global and node.full_name == LOADER for node in nodes(machine.root))
    is_opened = machine.foreign.keys().isdisjoint(_DROPPING) and not any(calls)
    return frozenset({LOADER}) if is_opened else frozenset()


def shared_streams(streams: tuple[NestedStream, ...], machine: Machine) -> frozenset[int]:
    """Indices of the streams whose bytes, or arguments, are read through the memo: for example as a key of a dict."""
    read = frozenset(machine.reads)  # a ``str`` of Python 2
    return frozenset(
        place
        for place, args in enumerate(stream.call.args for stream in streams)
        if type(args) is Tuple and ({id(args), id(args.items[0])} & machine.reread.keys() or args.starts[0] in read)
    )


def name_long_keys(root: Value, outline: PickleOutline) -> dict[int, tuple[str, int]]:
    """Rename dict keys that are long strings: their index and length replace the placeholder of the outline.

    Returns each new name and the index of its string, by the id of the name: another string may equal it.
    """
    names: dict[int, tuple[str, int]] = {}
    tuples: dict[int, tuple[Tuple, Tuple]] = {}  # one may be a key of many dicts; keeping it alive keeps its id unique

    def name_of(key: Value) -> Value:
        place = outline.find(_text_of(key) if type(key) is Call and key.name == _ENCODE else key)
        if place is None:
            return key
        name = f"<string {place} of {outline.strings[place].span.nbytes} bytes>"
        names[id(name)] = name, place
        return name

    def named(key: Value) -> Value:
        if type(key) is not Tuple:
            return name_of(key)
        if id(key) not in tuples:
            tuples[id(key)] = key, Tuple(tuple(map(name_of, key.items)), key.starts)
        return tuples[id(key)][1]

    for node in nodes(root) if outline.strings else ():
        if type(node) is Dict:
            node.flat[::2] = map(named, node.flat[::2])
    return names


def open_stream(source: ByteSource, limits: Limits) -> Container:
    """Open a ``torch.save`` stream."""
    if source.read(0, min(len(LOCAL_SIGNATURE), source.size)) == LOCAL_SIGNATURE:
        directory = read_directory(source, limits)
        if directory.shift:
            raise DamagedArchive(source.path, f"{directory.shift} unexpected bytes before the archive of a tensor")
        return TorchZip(source, directory, limits)
    return TorchLegacy(source, limits)


def _refuse_payload(source: ByteSource, limits: Limits) -> None:
    """Raise an error if bytes that are too short for a stream of torch name something dangerous."""
    try:
        open_stream(source, limits)
    except (DamagedArchive, DamagedPickle) as error:
        if error.runs:
            raise


def _encoded(call: Call, outline: PickleOutline, source: ByteSource) -> bytes:
    """Bytes that are written as text: ``_codecs.encode(text, 'latin1')``. Another encoding gives other bytes."""
    text = _text_of(call)
    place = outline.find(text)
    try:
        if place is not None:
            span = outline.strings[place].span
            return source.read(span.start, span.end).decode("utf-8").encode("latin-1")
        return text.encode("latin-1") if type(text) is str else b""
    except UnicodeError as error:
        raise DamagedArchive(source.path, "the text of a tensor holds a character that is not a byte") from error


def _text_of(call: Call) -> Value:
    return call.args.items[0] if type(call.args) is Tuple and call.args.items else None
