"""Lists of the names that a pickle may import: those that torch's weights-only mode allows, and dangerous ones.

Nothing is imported. A name on neither list has the verdict ``unknown``.

From torch/_weights_only_unpickler.py ``_get_allowed_globals``, torch 2.4 to 2.15; a test compares the lists.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ckptmove.model import OLDEST_TORCH, GlobalUse
from ckptmove.torch_facts.dtypes import ITEM_BYTES, STORAGE_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

_NARROW_INTS: Final = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
_TENSOR_TYPES: Final = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_SPARSE_TYPES: Final = tuple(kind for kind in _TENSOR_TYPES if kind != "Bool")
_QSCHEMES: Final = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_REBUILDS: Final = (
    "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy", "_rebuild_meta_tensor_no_storage",
    "_rebuild_nested_tensor", "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_qtensor",
    "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
    "_rebuild_wrapper_subclass",
)  # fmt: skip
_STORAGES: Final = tuple(name for name in STORAGE_DTYPE if name != "UntypedStorage")
#: Storage classes without a counterpart in ``torch.cuda``.
_CPU_ONLY: Final = frozenset({"QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage"})

_GLOBALS: Final = frozenset({
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict",
    "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter",
    "torch._tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
    "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
    *(f"torch.{name}" for name in (*ITEM_BYTES, *_NARROW_INTS, *_QSCHEMES, *_STORAGES)),
    *(f"torch.cuda.{name}" for name in _STORAGES if name not in _CPU_ONLY),
    *(f"torch.{kind}Tensor" for kind in _TENSOR_TYPES),
    *(f"torch.cuda.{kind}Tensor" for kind in _TENSOR_TYPES),
    *(f"torch.sparse.{kind}Tensor" for kind in _SPARSE_TYPES),
    *(f"torch.cuda.sparse.{kind}Tensor" for kind in _SPARSE_TYPES),
    *(f"torch._utils.{name}" for name in _REBUILDS),
})  # fmt: skip

#: Names added to the list after the oldest supported torch, by version.
_ADDED: Final[dict[str, tuple[str, ...]]] = {
    "2.5": ("_codecs.encode", "builtins.bytearray", "torch._utils._rebuild_device_tensor_from_numpy"),
    "2.6": (
        "builtins.complex", "builtins.set", "torch._utils._rebuild_device_tensor_from_cpu_tensor", "torch.uint16",
        "torch.uint32", "torch.uint64",
    ),
    "2.7": ("torch.float8_e8m0fnu", *(f"torch.{name}" for name in _NARROW_INTS)),
    "2.8": ("torch.float4_e2m1fn_x2",),
    "2.14": ("torch.bcomplex32",),
}  # fmt: skip

#: The module that adds the classes of DTensor to the list when it is imported.
DTENSOR_MODULE: Final = "torch.distributed.tensor"
#: The names that it adds (torch/distributed/tensor/__init__.py, torch/distributed/device_mesh.py).
DTENSOR_NAMES: Final = frozenset({
    "torch.distributed.tensor.DTensor", "torch.distributed.device_mesh.DeviceMesh",
    *(f"torch.distributed.tensor._dtensor_spec.{name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *(f"torch.distributed.tensor.placement_types.{n}" for n in ("Partial", "Replicate", "Shard", "_StridedShard")),
    *(f"torch.distributed._mesh_layout.{name}" for name in ("_FlatLayout", "_MeshLayout")),
})  # fmt: skip

#: Names removed from the list, with the first torch that refuses them.
WEIGHTS_ONLY_UNTIL: Final[dict[str, str]] = {"torch._utils._rebuild_nested_tensor": "2.15"}
#: Every name that weights-only mode allows, with the first torch that allows it.
WEIGHTS_ONLY_SINCE: Final[dict[str, str]] = {
    **dict.fromkeys(_GLOBALS - {*WEIGHTS_ONLY_UNTIL}, OLDEST_TORCH),
    **{name: version for version, names in _ADDED.items() for name in names},
}

#: Harmless names in checkpoints that weights-only mode refuses.
_HARMLESS: Final = frozenset({
    "argparse.Namespace", "types.SimpleNamespace", "builtins.dict", "builtins.list", "builtins.tuple", "builtins.int",
    "builtins.float", "builtins.bool", "builtins.str", "builtins.frozenset", "builtins.slice", "builtins.range",
    "builtins.object", "collections.defaultdict", "collections.deque", "copyreg._reconstructor", "datetime.date",
    "datetime.datetime", "datetime.timedelta", "decimal.Decimal", "fractions.Fraction", "pathlib.Path",
    "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath", "pathlib.WindowsPath", "uuid.UUID",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.ndarray", "torch.torch_version.TorchVersion",
    *WEIGHTS_ONLY_UNTIL,
})  # fmt: skip

#: Modules whose names no checkpoint needs.
_DANGEROUS_MODULES: Final = frozenset({
    "os", "posix", "nt", "ntpath", "posixpath", "subprocess", "_posixsubprocess", "sys", "shutil", "socket", "pty",
    "runpy", "importlib", "imp", "pkgutil", "zipimport", "webbrowser", "ctypes", "_ctypes", "signal", "multiprocessing",
    "asyncio", "threading", "pickle", "_pickle", "cloudpickle", "marshal", "codeop", "pdb", "bdb", "urllib", "http",
    "ftplib", "smtplib", "requests", "popen2", "pip", "pydoc", "doctest", "ensurepip", "venv", "idlelib", "lib2to3",
    "tempfile", "fileinput", "linecache",
})  # fmt: skip
#: The same, but users have folders with these names: ``code.models.Net`` is not in the standard library's ``code``.
_DANGEROUS_FILES: Final = frozenset({"code", "timeit", "cProfile", "profile", "trace", "commands", "glob"})
#: Modules that are attributes of other modules, and whose names are not used for folders.
_REACHED_THROUGH: Final = frozenset(
    {"os", "posix", "nt", "subprocess", "sys", "builtins", "importlib", "ctypes", "pty"}
)
_DANGEROUS_NAMES: Final = frozenset({
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.open", "builtins.input",
    "builtins.breakpoint", "builtins.setattr", "builtins.delattr", "builtins.globals",
    "builtins.locals", "builtins.vars", "builtins.exit", "builtins.quit", "builtins.execfile", "builtins.apply",
    "operator.methodcaller", "builtins.__build_class__", "torch.utils.collect_env.run", "torch.load", "torch.hub.load",
    "torch.jit.load", "torch.serialization.load", "torch.utils._config_module.ConfigModule.load_config",
    "numpy.load", "numpy.testing._private.utils.runstring", "io.open", "_io.open", "_io.FileIO", "codecs.open",
    "types.CodeType", "types.FunctionType", "functools.reduce", "copyreg.add_extension", "copyreg.pickle",
    "torch.storage._load_from_bytes",
})  # fmt: skip

#: Prefix of an extension code. Its number means a name that only the registry of the reading process knows.
EXTENSION: Final = "copyreg.extension."
#: Placeholder for a part of a name that only executing the pickle would compute.
COMPUTED: Final = "<computed>"


@lru_cache(maxsize=4096)
def modern_name(name: str) -> str:
    """Return a full name as Python 3 and torch look it up: ``__builtin__`` of Python 2 becomes ``builtins``.

    From ``_compat_pickle``, as in ``pickle`` and torch/_weights_only_unpickler.py (``_read_global_instruction``).
    """
    module, _, attribute = name.rpartition(".")
    if (module, attribute) in NAME_MAPPING:
        return ".".join(NAME_MAPPING[module, attribute])
    return f"{IMPORT_MAPPING[module]}.{attribute}" if module in IMPORT_MAPPING else name


def classify(name: str) -> GlobalUse:
    """Classify a name that a pickle imports."""
    modern = modern_name(name)
    since = WEIGHTS_ONLY_SINCE.get(modern)
    if since is not None:
        return GlobalUse(modern, since, "safe")
    if modern in _DANGEROUS_NAMES or modern.startswith(EXTENSION) or COMPUTED in modern or _is_dangerous_module(modern):
        return GlobalUse(modern, None, "dangerous")
    return GlobalUse(modern, None, "safe" if modern in _HARMLESS else "unknown")


def dangerous(names: Iterable[str]) -> tuple[str, ...]:
    """Return the dangerous names among some, as torch looks them up."""
    return tuple(use.name for use in map(classify, names) if use.verdict == "dangerous")


def newest(versions: Iterable[str | None]) -> str:
    """Return the newest of some versions of torch (``2.10``), at least the oldest supported one; None is ignored."""
    return max((OLDEST_TORCH, *filter(None, versions)), key=lambda version: [int(part) for part in version.split(".")])


def _is_dangerous_module(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in _DANGEROUS_FILES:
        return "." not in rest or rest[0].isupper()
    # `torch.hub` imports `os`, so that `torch.hub` with `os.system` in STACK_GLOBAL names it too.
    return top in _DANGEROUS_MODULES or not _REACHED_THROUGH.isdisjoint(rest.split(".")[:-1])
