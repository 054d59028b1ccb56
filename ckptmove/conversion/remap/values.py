"""Convert objects of the standard library and of numpy to plain values."""

from __future__ import annotations

import struct
from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.numpy_scalars import FORMATS, bytes_of, scalar_value
from ckptmove.pickles.build import new_list
from ckptmove.pickles.rebuild_arguments import NotATensor, sizes
from ckptmove.pickles.tree import Call, Dict, Global, Persistent, Sequence, Tuple, tuple_items
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.pickles.tree import Value

#: Longest list that replaces a range, and most elements of an array.
_MOST_ELEMENTS: Final = 100_000
#: ``NPY_MAXDIMS`` of numpy 2.
_MOST_AXES: Final = 64
#: Python writes integers of at most 4,300 digits as text.
_MOST_IN_TEXT: Final = 10**4000
#: Reason for refusing an object that a function makes.
UNKNOWN: Final = "only the call gives its value"
_PARTIAL: Final = "functools.partial"
_DILL_ARRAY: Final = "dill._dill._create_array"
_GETATTR: Final = "builtins.getattr"
#: Sizes in bytes of the states of ``datetime.date``, ``time`` and ``datetime``.
_DATE, _TIME = 4, 6
_HOUR, _MINUTE, _DAY = 3600, 60, 86400


class NoPlainValue(Exception):
    """An object has no plain value; ``why`` is the reason, as a clause."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def callable_name(value: Value) -> str:
    """Return the full name of a function, a class, a method or the function of a ``partial``."""
    attributes: list[str] = []
    while type(value) is Call and modern_name(value.name) in {_PARTIAL, _GETATTR}:
        items = value.arguments
        if value.name != _PARTIAL:
            if len(items) != 2 or type(items[1]) is not str:  # object and name
                raise NoPlainValue("another call computes its name")
            attributes.insert(0, items[1])
        value = items[0] if items else None
    if type(value) is Call:  # the object of a bound method
        value = value.func
    named = value.module if type(value) is Persistent else value
    if type(named) is not Global:
        raise NoPlainValue("another call computes its name")
    return ".".join((modern_name(named.full_name), *attributes))


# --- the standard library --------------------------------------------------------------------------------------------


def _path(separator: str) -> Callable[[Call], Value]:
    def join(call: Call) -> Value:
        parts = [part for part in call.arguments if type(part) is str]
        if len(parts) != len(call.arguments):
            raise NoPlainValue("its parts are not strings")
        anchor = parts[0] if parts and parts[0].endswith(separator) else ""
        return anchor + separator.join(parts[1:] if anchor else parts) or "."

    return join


def _uuid(call: Call) -> Value:
    """A UUID, from its state ``{'int': value}``."""
    number = call.state.get("int") if type(call.state) is Dict else None
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise NoPlainValue("its state is not the number of a UUID")
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _fraction(call: Call) -> Value:
    """A fraction as text: the arguments are that text until Python 3.10, and two integers since."""
    match call.arguments:
        case (int() as numerator, int() as denominator) if max(abs(numerator), abs(denominator)) < _MOST_IN_TEXT:
            return f"{numerator}/{denominator}"
        case (str() as text,):
            return text
    raise NoPlainValue(UNKNOWN)


def _range(call: Call) -> Value:
    match call.arguments:
        case (int() as start, int() as stop, int() as step) if step:
            found = range(start, stop, step)[: _MOST_ELEMENTS + 1]  # `len` of a very long range raises OverflowError
            if len(found) <= _MOST_ELEMENTS:
                return new_list(list(found))
    raise NoPlainValue("the range is too long for a list")


def _collection(call: Call) -> Value:
    """The items of a set, a frozenset or a deque."""
    items = call.arguments
    if call.appended is not None:
        return call.appended
    if not items:
        return new_list([])
    if not isinstance(items[0], Sequence):
        raise NoPlainValue("its items are not in the file")
    return new_list(list(items[0].items))


def _datetime(call: Call) -> Value:
    """ISO format of a datetime, from ``datetime.datetime.__reduce_ex__``."""
    raw = _packed(call, _DATE + _TIME, 2)
    return f"{_day_text(raw)}T{_time_text(raw[_DATE:])}{_zone(call.arguments[1:])}"


def _packed(call: Call, size: int, most: int) -> bytes:
    """Return the state in the first argument of a date or a time."""
    items = call.arguments
    raw = bytes_of(items[0]) if items else None
    if raw is None or len(raw) != size or len(items) > most:
        raise NoPlainValue("its state is not one of this version of Python")
    return raw


def _day_text(raw: bytes) -> str:
    # The highest bit of the month is ``fold``.
    return f"{int.from_bytes(raw[:2], 'big'):04}-{raw[2] & 127:02}-{raw[3]:02}"


def _time_text(raw: bytes) -> str:
    micros = int.from_bytes(raw[3:6], "big")
    return f"{raw[0] & 127:02}:{raw[1]:02}:{raw[2]:02}" + (f".{micros:06}" if micros else "")


def _zone(rest: tuple[Value, ...]) -> str:
    """Return the offset of a ``datetime.timezone`` in ISO format; empty without one."""
    if not rest:
        return ""
    zone = rest[0]
    items = zone.arguments if type(zone) is Call and zone.name == "datetime.timezone" else ()
    if not items or type(items[0]) is not Call or items[0].name != "datetime.timedelta":
        raise NoPlainValue("only its class knows the offset of its time zone")
    days, seconds, micros = _delta(items[0])
    if micros or (days * _DAY + seconds) % _MINUTE:
        raise NoPlainValue("the offset of its time zone is not a number of minutes")
    total = days * _DAY + seconds
    sign, total = ("-", -total) if total < 0 else ("+", total)
    return f"{sign}{total // _HOUR:02}:{total % _HOUR // _MINUTE:02}"


def _timedelta(call: Call) -> Value:
    """Seconds, as of ``timedelta.total_seconds``."""
    days, seconds, micros = _delta(call)
    return ((days * _DAY + seconds) * 10**6 + micros) / 10**6


def _delta(call: Call) -> tuple[int, int, int]:
    match call.arguments:
        case (int() as days, int() as seconds, int() as micros) if max(abs(days), abs(seconds), abs(micros)) < 10**9:
            return days, seconds, micros
    raise NoPlainValue("its state is not one of this version of Python")


def _type_of(call: Call) -> Value:
    """The name of ``NoneType``, which a pickle writes as ``type(None)``."""
    if call.arguments != (None,):
        raise NoPlainValue(UNKNOWN)
    return "builtins.NoneType"


def _type_name(call: Call) -> Value:
    """Name of a builtin type in ``dill``."""
    match call.arguments:
        case (str() as name,):
            return name
    raise NoPlainValue(UNKNOWN)


# --- numpy -----------------------------------------------------------------------------------------------------------


def _array(call: Call) -> Value:
    """The values of an array in nested lists, as of ``ndarray.tolist``; an array without values is an empty list.

    ``_reconstruct(...)`` has the state ``(version, shape, dtype, is_fortran, content)``. From protocol 5 on, the call
    is ``_frombuffer(content, dtype, shape, order)``.
    """
    match _parts_of_array(call):
        case (_, shape, Call(name="numpy.dtype") as dtype, bool() as is_fortran, content):
            pass
        case (content, Call(name="numpy.dtype") as dtype, shape, str() as order):
            is_fortran = order == "F"
        case _:
            raise NoPlainValue("the array is not written as numpy does")
    try:
        axes = sizes(shape)
    except NotATensor:
        raise NoPlainValue("the array is not written as numpy does") from None
    if len(axes) > _MOST_AXES:
        raise NoPlainValue("the array is not written as numpy does")
    numel = prod(axes)
    if numel > _MOST_ELEMENTS:
        raise NoPlainValue(f"the array has more than {_MOST_ELEMENTS:,} elements")
    if not numel:
        return new_list([])
    elements = _elements(dtype, content, numel)
    if is_fortran:
        elements = [elements[offset] for offset in _fortran_offsets(axes)]
    return _nested(elements, axes)


def _parts_of_array(call: Call) -> tuple[Value, ...]:
    items = call.arguments
    if call.name == _DILL_ARRAY:  # (function, arguments, state, attributes)
        return tuple_items(items[2]) if len(items) > 2 else ()
    return items if call.name.endswith("._frombuffer") else tuple_items(call.state)


def _nested(elements: list[Value], axes: tuple[int, ...]) -> Value:
    if not axes:
        return elements[0]
    for size in reversed(axes[1:]):
        elements = [new_list(elements[begin : begin + size]) for begin in range(0, len(elements), size)]
    return new_list(elements)


def _fortran_offsets(axes: tuple[int, ...]) -> list[int]:
    """Return the position of each element in Fortran order, in C order."""
    offsets, stride = [0], 1
    for size in axes:
        offsets = [offset + place * stride for offset in offsets for place in range(size)]
        stride *= size
    return offsets


def _elements(dtype: Call, content: Value, numel: int) -> list[Value]:
    """Return the elements of an array in the order of its content."""
    code, order = dtype_code(dtype)
    if isinstance(content, Sequence) and code.startswith("O") and len(content.items) == numel:
        return list(content.items)
    raw, letter = bytes_of(content), FORMATS.get(code)
    if raw is not None and letter is not None and len(raw) == numel * struct.calcsize(order + letter):
        return list(struct.unpack(f"{order}{numel}{letter}", raw))
    width = 4 * int(code[1:]) if code[:1] == "U" and code[1:].isdecimal() and len(code) < 10 else 0
    if raw is not None and width and len(raw) == numel * width:
        codec = "utf-32-be" if order == ">" else "utf-32-le"
        try:
            return [raw[begin : begin + width].decode(codec).rstrip("\0") for begin in range(0, len(raw), width)]
        except UnicodeDecodeError:
            raise NoPlainValue("the text is not Unicode") from None
    raise NoPlainValue(f"numpy dtype '{code}' has no plain value")


def dtype_code(dtype: Call) -> tuple[str, str]:
    """Return the code of a pickled ``numpy.dtype`` without its byte order, and the order: ``<`` or ``>``."""
    code = dtype.arguments[:1]
    if not code or type(code[0]) is not str:
        raise NoPlainValue("the dtype is not written as numpy does")
    return code[0], ">" if ">" in tuple_items(dtype.state)[1:2] else "<"


def _dtype(call: Call) -> Value:
    code, order = dtype_code(call)
    return f"{order}{code}"


def _scalar(call: Call) -> Value:
    number = scalar_value(call)
    if number is not None:
        return number
    match call.arguments:
        case (Call(name="numpy.dtype") as dtype, content):
            return _elements(dtype, content, 1)[0]
    raise NoPlainValue("the scalar is not written as numpy does")


def _generator(call: Call) -> Value:
    """The state of a numpy generator: of its own, or of the bit generator in its arguments."""
    while call.state is None and type(inner := _first(call.arguments)) is Call:
        call = inner
    state = call.state
    if type(state) is Tuple:  # (state, seed sequence) since numpy 1.26
        state = _first(state.items)
    if type(state) is not Dict:
        raise NoPlainValue("the state of the generator is not in the file")
    return state


def _first(items: tuple[Value, ...]) -> Value:
    return items[0] if items else None


def _uninitialized(_: Call) -> Value:
    raise NoPlainValue("a lazy module has no tensor before its first forward pass")


_PATHLIB: Final = ("pathlib", "pathlib._local")  # Python 3.13 moved the classes
#: Plain values by the full name of a class or a constructor.
VALUES: Final[dict[str, Callable[[Call], Value]]] = {
    **{f"{module}.{name}": _path("/") for module in _PATHLIB for name in ("Path", "PosixPath", "PurePosixPath")},
    **{f"{module}.{name}": _path("\\") for module in _PATHLIB for name in ("WindowsPath", "PureWindowsPath")},
    "uuid.UUID": _uuid,
    "fractions.Fraction": _fraction,
    "builtins.range": _range,
    "builtins.slice": lambda call: call.args,
    "builtins.type": _type_of,
    "builtins.set": _collection,
    "builtins.frozenset": _collection,
    "collections.deque": _collection,
    _PARTIAL: callable_name,
    _GETATTR: callable_name,
    "datetime.date": lambda call: _day_text(_packed(call, _DATE, 1)),
    "datetime.datetime": _datetime,
    "datetime.time": lambda call: _time_text(_packed(call, _TIME, 2)) + _zone(call.arguments[1:]),
    "datetime.timedelta": _timedelta,
    **{f"numpy{core}.multiarray._reconstruct": _array for core in (".core", "._core")},
    **{f"numpy{core}.numeric._frombuffer": _array for core in (".core", "._core")},
    **{f"numpy{core}.multiarray.scalar": _scalar for core in (".core", "._core")},
    _DILL_ARRAY: _array,
    "dill._dill._load_type": _type_name,
    "numpy.dtype": _dtype,
    **{f"numpy.random._pickle.__{kind}_ctor": _generator for kind in ("randomstate", "generator", "bit_generator")},
    "torch.nn.parameter.UninitializedParameter": _uninitialized,
    "torch.nn.parameter.UninitializedBuffer": _uninitialized,
}
