"""The verdict on a name in a pickle: safe, unknown or dangerous. Nothing is imported.

A name of the standard library, torch or numpy is dangerous unless it is known to be harmless. A name of any other
package is unknown if the pickle stores it or makes an object of the class, and dangerous if the pickle calls it as a
function.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptmove.model import GlobalUse
from ckptmove.torch_facts.harmless import is_harmless, words
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE, modern_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: What a pickle does with a name: it stores it, makes an object of the class without a call (NEWOBJ), or calls it.
Use: TypeAlias = Literal["stored", "made", "called"]
Verdict: TypeAlias = Literal["safe", "unknown", "dangerous"]

#: Prefix of an extension code. Its number means a name that only the registry of the reading process knows.
EXTENSION: Final = "copyreg.extension."
#: Placeholder for a part of a name that only executing the pickle would compute.
COMPUTED: Final = "<computed>"

#: Modules of the standard library of other versions of Python than this one, from Python 2 to 3.15.
_OTHER_PYTHONS: Final = words(
    "_aix_support _android_support _apple_support _bootsubprocess _colorize _compression _crypt _interpchannels "
    "_interpqueues _interpreters _ios_support _msi _osx_support _posixshmem _pydatetime _pyrepl _remote_debugging "
    "_sysconfig _winapi _xxinterpchannels _xxsubinterpreters _zstd aifc annotationlib asynchat asyncore audioop binhex "
    "cgi cgitb commands compiler compression crypt distutils dl dummy_thread dummy_threading hotshot ihooks imghdr imp "
    "imputil lib2to3 mailcap msilib msvcrt nis nntplib nt os2 ossaudiodev pipes popen2 posix posixfile rexec smtpd "
    "sndhdr spwd sunau telnetlib tomllib urllib2 uu winreg winsound xdrlib"
)
#: Tops of names that are dangerous unless they are harmless. torch's package installs torchgen and functorch.
_OWN: Final = (
    frozenset(sys.stdlib_module_names)
    | _OTHER_PYTHONS
    | {module.partition(".")[0] for module in IMPORT_MAPPING}
    | {"torch", "functorch", "torchgen", "numpy"}
) - {"test"}  # a folder of many projects
#: Of these, names that users give to folders, as in ``code.models.Net``.
_FOLDERS: Final = frozenset(
    {"cProfile", "code", "commands", "compiler", "compression", "glob", "profile", "timeit", "trace"}
)
#: Modules that run code or write, and that other modules import. Nobody names a folder of a project like one of them.
_REACHED: Final = words(
    "asyncio bltins builtins cPickle cloudpickle codeop ctypes dill distutils fileinput ftplib genericpath importlib "
    "joblib linecache marshal multiprocessing nt ntpath os pdb pickle pkgutil popen2 posix posixpath posixsubprocess "
    "pty pydoc runpy shutil smtplib socket socketserver subprocess sys tempfile threading urllib urllib2 webbrowser "
    "zipimport"
)
#: Packages that read code, run programs or use the network.
_RUNNING: Final = words(
    "Cython IPython _pytest aiohttp cffi cython fabric fire fsspec httpx hydra jinja2 jsonpickle mako mpmath paramiko "
    " pexpect pip pkg_resources plumbum pytest pyximport requests ruamel setuptools sympy tensorboardX triton "
    "urllib3 yaml"
)
#: Functions that call a method or a function of what they are given: harmless unless the pickle calls them.
_STORED: Final = frozenset({"builtins.max", "builtins.min", "builtins.print", "operator.mod", "_operator.mod"})
_RUNNING_MODULES: Final = (
    "pandas.core.computation.", "pandas.eval", "pandas.io.", "pandas.read_",
)  # fmt: skip
#: Classes that run programs, open files or connect when they are made, by any module that has imported them.
_HARMFUL_CLASSES: Final = words(
    "BZ2File CDLL CodeType CompilationUnit FTP FTP_TLS FileHandler FileIO FunctionType GzipFile HTTPServer IMAP4 "
    "IMAP4_SSL IMAP4_stream LZMAFile LambdaType MethodType NNTP NNTP_SSL NamedTemporaryFile OleDLL POP3 POP3_SSL "
    "PackageImporter Popen PyDLL PyZipFile RotatingFileHandler SMTP SMTP_SSL SpooledTemporaryFile TCPServer TarFile "
    "Telnet TemporaryDirectory TemporaryFile ThreadingHTTPServer ThreadingTCPServer ThreadingUDPServer "
    "TimedRotatingFileHandler UDPServer WatchedFileHandler WinDLL ZipFile ZstdFile"
)
#: Functions of other packages that pickles of healthy checkpoints call: they only make an object.
_CONSTRUCTORS: Final = frozenset({
    "dateutil.tz.tz.tzlocal", "dateutil.tz.tz.tzutc", "dill._dill._create_array",
    "pandas._libs.internals._unpickle_block", "pandas._libs.tslibs.nattype._nat_unpickle",
    "pandas._libs.tslibs.timedeltas._timedelta_unpickle", "pandas._libs.tslibs.timestamps._unpickle_timestamp",
    "pandas.core.indexes.base._new_Index", "pandas.core.indexes.datetimes._new_DatetimeIndex",
    "pandas.core.indexes.period._new_PeriodIndex", "pandas.core.internals.blocks.new_block", "pytz._UTC", "pytz._p",
})  # fmt: skip
#: The same in any package: of Cython, and copies of a function of torch that makes a tensor of a subclass.
_MAKING: Final = ("__pyx_unpickle_", "_rebuild_from_type")
#: Names that are harmless until they are called: pickles get attributes, the type of None and ufuncs with them.
LOOK_UPS: Final = frozenset({
    "builtins.getattr", "builtins.type", "dill._dill._load_type", "numpy._core._ufunc_reconstruct",
    "numpy.core._ufunc_reconstruct",
})  # fmt: skip
#: First parts of names of the user's own script and of TorchScript's own code.
_MAIN: Final = frozenset({"__main__", "__mp_main__", "__torch__"})


def classify(name: str, use: Use = "stored") -> GlobalUse:
    """Classify a name that a pickle imports, by what the pickle does with it."""
    modern = modern_name(name)
    return GlobalUse(modern, WEIGHTS_ONLY_SINCE.get(modern), verdict(modern, use))


def is_dangerous(name: str, use: Use = "stored") -> bool:
    """Whether a pickle that uses a name in this way can run code, write a file, or use the network."""
    return verdict(modern_name(name), use) == "dangerous"


def dangerous(uses: Iterable[tuple[str, Use]]) -> dict[str, None]:
    """The dangerous ones of some uses of names, as torch looks them up."""
    return {modern_name(name): None for name, use in uses if is_dangerous(name, use)}


def uses_of_names(names: Iterable[str], runs: Collection[str]) -> tuple[GlobalUse, ...]:
    """Classify the names that a pickle imports, and those among its dangerous ones that it reaches in another way."""
    found = dict.fromkeys((*map(classify, names), *map(classify, runs)))
    return tuple(dict.fromkeys(use._replace(verdict="dangerous") if use.name in runs else use for use in found))


@lru_cache(maxsize=8192)
def verdict(name: str, use: Use) -> Verdict:
    """The verdict on a name as Python 3 and torch look it up."""
    if is_harmless(name):
        return "safe"
    parts = name.split(".")
    if name in LOOK_UPS:
        return "dangerous" if use == "called" else "unknown"
    if name in _CONSTRUCTORS or (name in _STORED and use == "stored"):
        return "unknown"
    if _is_hidden(name, parts) or _is_own(parts) or _runs(name, parts):
        return "dangerous"
    leaf = parts[-1]
    if use == "stored" or (leaf not in _HARMFUL_CLASSES and (use == "made" or _makes(leaf))):
        return "unknown"
    return "dangerous"


def _is_hidden(name: str, parts: list[str]) -> bool:
    """Whether only executing the pickle shows what a name is: it has an attribute that reaches everything else."""
    inner = parts[1:] if parts[0] in _MAIN else parts
    return (
        name.startswith(EXTENSION)
        or COMPUTED in name
        or any(part.startswith("__") and part.endswith("__") for part in inner)
    )


def _is_own(parts: list[str]) -> bool:
    """Whether a name is one of the standard library, torch or numpy."""
    if parts[0] in _FOLDERS and len(parts) > 2:  # a module of the standard library has no modules in it, but imports
        is_imported = not _OWN.isdisjoint((parts[1], parts[1].lstrip("_"))) or parts[1] == "_pyprofile"
        return is_imported or parts[1][:1].isupper()
    return parts[0] in _OWN


def _runs(name: str, parts: list[str]) -> bool:
    """Whether a name of another package reads code, or is one of the standard library that it imports."""
    is_reached = any(part.lstrip("_") in _REACHED for part in parts)
    return is_reached or parts[0] in _RUNNING or name.startswith(_RUNNING_MODULES)


def _makes(leaf: str) -> bool:
    """Whether a name looks like a class, or like a known function that makes an object."""
    return leaf.lstrip("_")[:1].isupper() or leaf.startswith(_MAKING)
