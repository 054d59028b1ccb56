"""The streams of ``torch.save`` inside of a pickle, and the tree with what they hold in their places.

Never runs ``torch.storage._load_from_bytes``: it reads the bytes as it would read a file.

From torch/storage.py: ``TypedStorage.__reduce__`` saves itself into bytes, ``_load_from_bytes`` is ``torch.load``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive, DamagedPickle
from ckptmove.formats.merge_pickles import merge, nodes, replace_nodes
from ckptmove.formats.torch_legacy import TorchLegacy
from ckptmove.formats.torch_zip import TorchZip
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.io.part import MemorySource, PartSource
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Dict, Global, Tuple

if TYPE_CHECKING:
    from ckptmove.formats.contract import Container
    from ckptmove.formats.pickle_outline import PickleOutline
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Persistent, Value

_LOADER: Final = "torch.storage._load_from_bytes"
_ENCODE: Final = "_codecs.encode"
_ZIP: Final = b"PK\x03\x04"
_KEY_FIELD: Final = 2
#: POP and POP_MARK.
_DROPPING: Final = frozenset(b"01")


class NestedStream(NamedTuple):
    """A stream inside of the pickle.

    Attributes:
        call: the call that loads it.
        container: what it is.
        string: place, among the long strings of the outline, of the one that holds it; None where it is written as
            text, as the pickles of protocols 0 to 2 do: such bytes do not lie in the file as they are.
        start: offset of the stream in the file; 0 for text.
    """

    call: Call
    container: Container
    string: int | None
    start: int


def find_streams(root: Value, outline: PickleOutline, source: ByteSource, limits: Limits) -> tuple[NestedStream, ...]:
    """The streams that a pickle loads, in the order of the tree.

    Args:
        root: the tree of the outline.
        outline: the pickle without its long strings.
        source: the file.
        limits: what each stream may ask for.

    Raises:
        DamagedArchive, DamagedPickle, LimitExceeded: as the containers of ``torch.save``.
    """
    found: list[NestedStream] = []
    for node in nodes(root):
        if type(node) is not Call or node.name != _LOADER or type(node.args) is not Tuple or not node.args.items:
            continue
        argument = node.args.items[0]
        place = outline.find(argument)
        if place is not None and not outline.strings[place].is_text:
            span = outline.strings[place].span
            found.append(NestedStream(node, open_stream(PartSource(source, span), limits), place, span.start))
        elif type(argument) is bytes:
            _refuse_payload(MemorySource(source.path, argument), limits)
        elif type(argument) is Call and argument.name == _ENCODE:
            data = _encoded(argument, outline, source)
            found.append(NestedStream(node, open_stream(MemorySource(source.path, data), limits), None, 0))
    return tuple(sorted(found, key=lambda stream: stream.call.args_start))


def graft(machine: Machine, streams: tuple[NestedStream, ...], limits: Limits) -> None:
    """Read the object pickles of the streams, and put what they stand for into the tree.

    Afterwards the machine is one that has read all of them: its ``data`` are the pickles one after the other, and every
    start in it an offset there.

    Args:
        machine: the machine that has read the outline.
        streams: the streams in it. A storage of one gets the stream's place and a colon before its key.
        limits: what each pickle may ask for.
    """
    pickles = [machine.data, *(stream.container.object_pickle() for stream in streams)]
    machine.data = b"".join(pickles)
    roots: dict[int, Value] = {}
    begin = len(pickles[0])
    for place, stream in enumerate(streams):
        inner = interpret(machine.data, limits, begin, machine.excess)
        if inner.end != begin + len(pickles[place + 1]):
            raise DamagedArchive(stream.container.source.path, "bytes stand behind the pickle of a tensor in it")
        for persistent in inner.persistents:
            _rename(persistent, place)
        roots[id(stream.call)] = inner.root
        merge(machine, inner)
        if isinstance(stream.container, TorchLegacy):
            machine.note_names(stream.container.around)
        begin = inner.end
    replace_nodes(machine, roots)


def opened_calls(machine: Machine) -> frozenset[str]:
    """The loader of streams, where every call of it was found and read.

    Args:
        machine: the machine after :func:`graft`. A call that an opcode drops from the stack is in no tree.
    """
    calls = (type(node) is Global and node.full_name == _LOADER for node in nodes(machine.root))
    is_opened = machine.foreign.keys().isdisjoint(_DROPPING) and not any(calls)
    return frozenset({_LOADER}) if is_opened else frozenset()


def shared_streams(streams: tuple[NestedStream, ...], machine: Machine) -> frozenset[int]:
    """The places of those streams whose bytes, or arguments, are read back: as a key of a dict, for one.

    Args:
        streams: what :func:`find_streams` found.
        machine: the machine that has read the outline.
    """
    read = frozenset(machine.reads)  # a ``str`` of Python 2
    return frozenset(
        place
        for place, args in enumerate(stream.call.args for stream in streams)
        if type(args) is Tuple and ({id(args), id(args.items[0])} & machine.reread.keys() or args.starts[0] in read)
    )


def name_long_keys(root: Value, outline: PickleOutline) -> None:
    """Call the long strings that are keys of a dict by their place and length: the marks of an outline are no names."""
    tuples: dict[int, tuple[Tuple, Tuple]] = {}  # one may be a key of many dicts; it lives on, and so its id is its own

    def named(key: Value) -> Value:
        if type(key) is not Tuple:
            return _key_name(key, outline)
        if id(key) not in tuples:
            tuples[id(key)] = key, Tuple(tuple(_key_name(item, outline) for item in key.items), key.starts)
        return tuples[id(key)][1]

    for node in nodes(root) if outline.strings else ():
        if type(node) is Dict:
            node.flat[::2] = map(named, node.flat[::2])


def _key_name(key: Value, outline: PickleOutline) -> Value:
    place = outline.find(_text_of(key) if type(key) is Call and key.name == _ENCODE else key)
    return key if place is None else f"<string {place} of {outline.strings[place].span.nbytes} bytes>"


def open_stream(source: ByteSource, limits: Limits) -> Container:
    """The stream of ``torch.save`` that some bytes are, opened.

    Raises:
        DamagedArchive, DamagedPickle, LimitExceeded: as the containers of ``torch.save``.
    """
    if source.read(0, min(len(_ZIP), source.size)) == _ZIP:
        directory = read_directory(source, limits)
        if directory.shift:
            raise DamagedArchive(source.path, f"{directory.shift} bytes stand before the records of a tensor in it")
        return TorchZip(source, directory, limits)
    return TorchLegacy(source, limits)


def _refuse_payload(source: ByteSource, limits: Limits) -> None:
    """Refuse bytes that are too short for a stream of torch's, where they name something dangerous.

    Raises:
        DamagedArchive, DamagedPickle: a load of them could run that before it fails.
    """
    try:
        open_stream(source, limits)
    except (DamagedArchive, DamagedPickle) as error:
        if error.runs:
            raise


def _encoded(call: Call, outline: PickleOutline, source: ByteSource) -> bytes:
    """Bytes that are written as text: ``_codecs.encode(text, 'latin1')``."""
    text = _text_of(call)
    place = outline.find(text)
    try:
        if place is not None:
            span = outline.strings[place].span
            return source.read(span.start, span.end).decode("utf-8").encode("latin-1")
        return text.encode("latin-1") if type(text) is str else b""
    except UnicodeError as error:
        raise DamagedArchive(source.path, "the text of a tensor's bytes holds what is no byte") from error


def _text_of(call: Call) -> Value:
    """What is encoded."""
    return call.args.items[0] if type(call.args) is Tuple and call.args.items else None


def _rename(node: Persistent, place: int) -> None:
    """Tell apart the storages of several streams: each calls its own by an address that another may use again."""
    pid = node.pid
    if type(pid) is Tuple and len(pid.items) > _KEY_FIELD and type(pid.items[_KEY_FIELD]) is str:
        key = f"{place}:{pid.items[_KEY_FIELD]}"
        node.pid = Tuple((*pid.items[:_KEY_FIELD], key, *pid.items[_KEY_FIELD + 1 :]), pid.starts)
