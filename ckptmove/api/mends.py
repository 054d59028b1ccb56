"""The options that mend a conversion which has failed. Each is tried on the checkpoint before a hint names it."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import singledispatch
from typing import TYPE_CHECKING, Final

from ckptmove import errors
from ckptmove.conversion.convert import convert
from ckptmove.conversion.remap import errors as remap_errors
from ckptmove.conversion.remap.options import with_options
from ckptmove.formats.facts import facts_of
from ckptmove.io.locations import exists, without_suffix
from ckptmove.io.outputs import do_nothing
from ckptmove.io.remote.address import Address
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted

#: Number of conversions that are planned for one error, and of mends that follow each other.
_TRIALS: Final = 8
_STEPS: Final = 3
#: Maximum number of ``--drop`` options in one mend.
_SHOWN_DROPS: Final = 4


def mend(error: errors.CkptMoveError, request: ConvertRequest) -> None:
    """Set the options for an error of a conversion: the first ones with which it would succeed.

    None are set for a URL, because each trial would open it again.
    """
    if not isinstance(request.path, Address):
        error.mends = _tried(error, request, iter(range(_TRIALS)), _STEPS)


def arguments_of(phrase: Phrase) -> Iterator[Argument]:
    """The options in a hint."""
    return (part for part in phrase.parts if isinstance(part, Argument))


def _tried(
    fault: errors.CkptMoveError, request: ConvertRequest, trials: Iterator[int], steps: int
) -> tuple[Phrase, ...]:
    for phrase in _mends(fault, request) if steps else ():
        if next(trials, None) is None:
            break
        changed = _with(request, phrase)
        try:
            made = convert(changed)
        except errors.CkptMoveError as error:
            later = _tried(error, changed, trials, steps - 1) if str(error) != str(fault) else ()
            if later:
                return phrase, *later
        else:
            if _keeps_model(made, request, changed) and not (request.in_place and exists(changed.target)):
                return (phrase,)
    return ()


def _with(request: ConvertRequest, phrase: Phrase) -> ConvertRequest:
    """A dry run of the request with the options of a mend."""
    options = {one.name: one for one in arguments_of(phrase)}
    moves = [one for one in arguments_of(phrase) if one.name not in {"in_place", "output"}]
    return replace(
        request,
        move=with_options(request.move, moves),
        output=str(options["output"].value) if "output" in options else request.output,
        in_place=request.in_place and "in_place" not in options,
        dry_run=True,
        progress=None,
        settle=do_nothing,
    )


def _keeps_model(made: Converted, request: ConvertRequest, changed: ConvertRequest) -> bool:
    """Whether the options of a mend drop no tensor of the model, besides those that the user drops."""
    own = request.move.remap.drop
    if changed.move.remap.drop == own:
        return True
    lost = {one.name for one in made.plan.dropped if one.reason == "drop"}
    inside = tuple(f"{name}." for name in lost)
    with open_checkpoint(request.path, request.limits, tree="inventory") as checkpoint:
        model = [tensor.name for tensor in checkpoint.inventory.tensors if tensor.role == "model"]
    left_out = (name for name in model if name in lost or name.startswith(inside))
    return "model" in own or all(any(fnmatchcase(name, glob) for glob in own) for name in left_out)


def _drops(paths: Sequence[str]) -> Phrase:
    """The options that leave parts out; several of them are a list in Python."""
    lead = f"leave {'it' if len(paths) == 1 else 'them'} out: "
    options = [Argument("drop", path) for path in paths[:_SHOWN_DROPS]]
    drops = Phrase(lead, options[0], *(part for one in options[1:] for part in (" ", one)))
    if len(options) > 1:
        drops.in_python = f"{lead}drop={[one.value for one in options]!r}"
    return drops


@singledispatch
def _mends(error: errors.CkptMoveError, request: ConvertRequest) -> Iterator[Phrase]:
    """What may mend a conversion, the best first: each a text and its options."""
    del error, request
    yield from ()


@_mends.register(remap_errors.NotInFormat)
def _(error: remap_errors.NotInFormat, request: ConvertRequest) -> Iterator[Phrase]:
    if error.root:
        name = "only" if "*" in error.root else "as_root"
        yield Phrase("write only this state_dict: ", Argument(name, error.root))
    if any(found.startswith("an object") for _, found in error.entries):
        yield Phrase("replace objects by plain values: ", Argument("plain", True))
    keys = [key for key, _ in error.entries if key]
    if keys:
        yield _drops(keys)
    yield Phrase("write another format: ", Argument("output", _torch_file(request)))


def _torch_file(request: ConvertRequest) -> str:
    """An output that ``torch.load`` reads, and that does not exist."""
    named = f"{without_suffix(request.output or request.target)}.pth"
    return f"{without_suffix(named)}.new.pth" if exists(named) else named


@_mends.register(remap_errors.NotPlain)
def _(error: remap_errors.NotPlain, _request: ConvertRequest) -> Iterator[Phrase]:
    paths = [where for where, _, _ in error.objects if where]
    if paths and not error.is_dangerous:
        yield _drops(paths)


@_mends.register(remap_errors.InsideObject)
def _(_error: remap_errors.InsideObject, _request: ConvertRequest) -> Iterator[Phrase]:
    yield Phrase("replace objects by plain values, whose parts can be removed: ", Argument("plain", True))


@_mends.register(remap_errors.NoMatch)
def _(error: remap_errors.NoMatch, _request: ConvertRequest) -> Iterator[Phrase]:
    if not error.known and error.option in {"--strip-prefix", "--add-prefix", "--rename"}:
        yield Phrase("it holds no state_dict; turn a pickled model into one: ", Argument("plain", True))


@_mends.register(remap_errors.NeededByOptimizer)
def _(_error: remap_errors.NeededByOptimizer, _request: ConvertRequest) -> Iterator[Phrase]:
    yield Phrase("remove the optimizer too: ", Argument("drop", "optimizer"))


@_mends.register(remap_errors.ListItems)
def _(error: remap_errors.ListItems, _request: ConvertRequest) -> Iterator[Phrase]:
    if error.where:
        yield Phrase("remove the whole list: ", Argument("drop", error.where))


@_mends.register(remap_errors.SharedPart)
def _(error: remap_errors.SharedPart, _request: ConvertRequest) -> Iterator[Phrase]:
    yield Phrase("remove both: ", Argument("drop", error.names[1]))


@_mends.register(remap_errors.PartialPrefix)
def _(error: remap_errors.PartialPrefix, _request: ConvertRequest) -> Iterator[Phrase]:
    renamed = Argument("rename", f"{error.prefix}*=*")
    yield Phrase("remove it from the keys that have it: ", renamed, " instead of ", Argument("strip_prefix", False))


@_mends.register(remap_errors.SharedStorage)
def _(error: remap_errors.SharedStorage, request: ConvertRequest) -> Iterator[Phrase]:
    dtype = request.move.remap.dtype[0][1]
    yield Phrase("cast both: ", Argument("dtype", f"{error.role}={dtype}"))


@_mends.register(remap_errors.NotCastable)
@_mends.register(remap_errors.SavedWhole)
def _(error: remap_errors.NotCastable | remap_errors.SavedWhole, _request: ConvertRequest) -> Iterator[Phrase]:
    yield _drops([error.name])


@_mends.register(remap_errors.NotRemappable)
def _(error: remap_errors.NotRemappable, request: ConvertRequest) -> Iterator[Phrase]:
    if not facts_of(error.container).has_code:
        yield Phrase("write one file instead: ", Argument("output", _torch_file(request)))


@_mends.register(errors.UnsupportedDtype)
def _(error: errors.UnsupportedDtype, _request: ConvertRequest) -> Iterator[Phrase]:
    yield Phrase(f"cast dtypes that {error.target} lacks to the next smaller one: ", Argument("cast", True))


@_mends.register(errors.UncastableDtype)
@_mends.register(remap_errors.ShardNotCastable)
def _(error: errors.CkptMoveError, _request: ConvertRequest) -> Iterator[Phrase]:
    del error
    yield from ()


@_mends.register(errors.InPlaceImpossible)
def _(_error: errors.InPlaceImpossible, _request: ConvertRequest) -> Iterator[Phrase]:
    yield Phrase("write a new file, without ", Argument("in_place", False))
