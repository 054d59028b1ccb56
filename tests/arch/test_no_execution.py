"""ckptmove's source has no way to execute the content of a file.

The lists here allow imports, uses of ``os``, and look-ups by a name that is not a constant. A new one needs a reason in
this file.
"""

from __future__ import annotations

import ast
import sys

#: Names that may not occur: these execute data.
EXECUTING = {
    "eval", "exec", "__import__", "import_module", "Unpickler", "find_class", "system", "popen", "_load_from_bytes",
    "__builtins__", "__globals__", "__subclasses__", "__code__", "methodcaller", "attrgetter", "FunctionType",
    "load_module", "exec_module", "spec_from_file_location", "add_safe_globals", "safe_globals", "startfile",
    "CodeType", "extract", "extractall", "unpack_archive",
}  # fmt: skip
#: The one module that imports by name, a case that the user typed, and what looks at the code of such a case. The
#: unpickler is replaced by one that refuses the checkpoint.
MAY_NAME = {
    "proof/step/optimizer_class.py": {"import_module"},
    "training/code/entrance.py": {"CodeType", "import_module", "exec_module", "spec_from_file_location"},
    "simulation/backward.py": {"__code__"},
    "training/case/check.py": {"__code__"},
    "training/code/source.py": {"CodeType"},
    "training/script/check.py": {"exec"},
    "training/script/hooks.py": {"Unpickler", "__subclasses__"},
    "training/code/watch.py": {"CodeType", "__code__"},
}
#: Whole names, with their owner.
EXECUTING_DOTTED = {
    "builtins.compile", "pickle.load", "pickle.loads", "torch.jit.load", "torch.hub", "torch.package", "torch.classes",
    "torch.ops.load_library", "torch.compile", "marshal.loads", "shelve.open", "runpy.run_path", "numpy.load",
}  # fmt: skip
#: Modules of the standard library that may be used. None executes its arguments, except those below.
HARMLESS_MODULES = {
    "__future__", "_compat_pickle", "abc", "array", "ast", "base64", "bisect", "bz2", "collections", "concurrent",
    "contextlib", "contextvars", "dataclasses", "datetime", "difflib", "enum", "errno", "fcntl", "filecmp", "fnmatch",
    "functools", "gc", "glob", "hashlib", "heapq", "html", "io", "itertools", "json", "keyword", "linecache", "lzma",
    "math", "mmap", "os", "pathlib", "pickletools", "platform", "posixpath", "queue", "random", "re", "shlex", "shutil",
    "signal", "stat", "struct", "sys", "sysconfig", "tarfile", "textwrap", "threading", "time", "tokenize", "traceback",
    "types", "typing", "uuid", "warnings", "weakref", "zipfile", "zlib",
}  # fmt: skip
#: Modules that can execute something, and the modules that may import them.
GUARDED_MODULES = {
    "subprocess": "proof/processes/child.py",  # starts the child, by a command of its own
    # ask the C library for one function of its own each; view the memory of a storage, to read a file into it
    "ctypes": "proof/restored/pages.py proof/tensors/stored.py proof/processes/child.py",
    "resource": "proof/processes/memory.py",  # lowers the limit of its own process
    "importlib": "training/run.py training/code/entrance.py proof/step/optimizer_class.py",
    # write bytes of tensors, and the output of the user's script; find the folder of generated files
    "tempfile": "io/spool.py training/script/check.py training/code/entrance.py",
    # end a script that does not end; run the exit functions of the child; silence the event loop of fsspec
    "atexit": "io/remote/filesystem.py training/script/check.py proof/processes/child.py",
    "urllib": "cli/render/sarif.py io/remote/address.py",  # quotes a path, splits URLs
    "asyncio": "io/remote/time_limits.py",  # waits for an answer of a server
    "socket": "io/remote/failures.py training/mesh/meeting.py",  # names an error; connects the ranks of one run
    "secrets": "training/mesh/meeting.py",  # makes the token that a rank has to know
    "xml": "cli/render/junit.py",  # writes XML, and reads none
    "pickle": "proof/loading/errors.py",  # the base class of an error
    # These read signatures.
    "inspect": "api/arguments.py cli/configured.py cli/options.py proof/step/recipe.py "
    "training/case/check.py proof/step/objective.py training/case/restore.py "
    "training/script/hooks.py",
}
#: Allowed names of ``os``: they open, read, write, link and name files. None starts or changes a process.
HARMLESS_OS = {
    "DirEntry", "O_APPEND", "O_CREAT", "O_DIRECTORY", "O_EXCL", "O_RDONLY", "O_RDWR",
    "O_WRONLY", "POSIX_FADV_DONTNEED", "POSIX_FADV_SEQUENTIAL", "PathLike", "SEEK_DATA", "SEEK_END", "SEEK_HOLE",
    "SEEK_SET", "altsep", "close", "copy_file_range", "cpu_count", "curdir", "dup", "dup2", "devnull", "environ",
    "fdatasync", "fdopen", "fsdecode", "fsencode", "fspath", "fstat", "fsync", "ftruncate", "getcwd",
    "geteuid", "getpgrp", "getpid", "isatty", "link", "listdir", "lseek", "open", "path", "pathsep", "posix_fadvise",
    "pipe", "posix_fallocate", "pread", "preadv", "pwrite", "read", "readlink", "readv", "rename", "replace",
    "scandir", "sched_getaffinity", "sep", "stat", "stat_result", "strerror", "umask", "uname", "unlink", "urandom",
    "utime", "walk", "write", "writev",
}  # fmt: skip
#: Names of ``os`` that can do harm, and where they may be used.
GUARDED_OS = {
    # end the child and its children
    "killpg": "proof/processes/child.py proof/processes/pipes.py",
    "kill": "proof/processes/strays.py proof/processes/forking.py",  # the same
    # ends the child itself
    "_exit": "training/script/check.py proof/processes/child.py proof/processes/group.py",
    # fork the child, and wait for it
    **dict.fromkeys(
        ("CLD_EXITED", "P_PID", "WEXITED", "WNOHANG", "WNOWAIT", "fork", "setpgid", "waitid", "waitpid"),
        "proof/processes/forking.py",
    ),
}
#: Look-ups by a name that is not a constant, with the reason why no file can choose the result.
BY_NAME = {
    "getattr(module, name, None)": "the name of the function that the caller passed as case",
    "getattr(case, field)": "the fields of our own dataclass, constants in the same room",
    "hasattr(owner, name)": "the functions that restore an RNG state; the names are constants in the same module",
    "vars(kind)": "whether a class has the method load_state_dict",
    "getattr(result, one.name)": "the fields of our own dataclass",
    "getattr(self, one.name)": "the fields of our own data class",
    "getattr(other, one.name)": "the fields of our own data class",
    "getattr(functions, name)": "the names are those of __init__, from an import statement",
    "getattr(real, name)": "attributes of torch._dynamo for torch, or for an optimizer that the user typed",
    "getattr(found, part, None)": "the class that the user typed after --optimizer",
    "vars(sys.modules[module_name])": "the module that the user typed after --optimizer",
    "getattr(module, self._name.function, None)": "the function that the user typed after --case",
    "vars(main)": "the variables of the script that the user typed after --script",
    "vars(one)": "the attributes of a user's module",
    "vars(torch._C.TensorBase)": "no look-up",
    "getattr(signal, name)": "the names are constants in the same module",
    "getattr(sys, name)": "stdin, stdout, stderr",
    "setattr(sys, name, open(os.devnull, mode))": "stdin, stdout, stderr",
    "getattr(tensor, part)": "the parts of a compressed layout, constants in the same module",
    "getattr(value, name)": "the tensors that a wrapper subclass names itself, or the fields of our own data class",
    "getattr(torch, kind, None)": "a kind of device that the grammar of devices knows",
    "getattr(torch.backends, kind, None)": "a kind of device that the grammar of devices knows",
    "getattr(calls, name)": "the methods of our own class",
    "vars(DeviceCalls)": "no look-up",
    "vars(module)": "a module of torch; the replacements are methods of our own class",
    "getattr(torch.optim, name, None)": "a class of the table of optimizers, or one that --optimizer names",
    "getattr(backend_registration, _SETUP)": "a constant",
    "hasattr(backend_registration, _SETUP)": "a constant",
    "hasattr(signal, name)": "the names are constants in the same module",
    "getattr(torch, name)": "a dtype of the table of dtypes",
    "vars(TensorBase)": "no look-up",
    "vars(StorageBase)": "no look-up",
    "vars(owner)": "no look-up",
    "getattr(owner, name)": "the load functions for a script; the names are constants in the same module",
    "setattr(owner, name, value)": "functions of torch that are replaced; the names are constants",
    "setattr(self, one.name, how(value, getattr(other, one.name)))": "the fields of our own data class",
    "setattr(owner, name, own[name])": "the same, restored",
    "delattr(owner, name)": "the same, restored",
    "globals()": "no look-up",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def named(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Every name in a module that is looked up or imported, dotted as far as it is written so, with its line."""
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            found.append((node.lineno, dotted(node) or getattr(node, "attr", "")))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_no_module_can_execute_what_it_reads(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        allowed = MAY_NAME.get(path, set())
        for line, name in named(nodes):
            is_compile = name == "compile" and "exec" not in allowed
            is_forbidden = not (EXECUTING - allowed).isdisjoint(name.split("."))
            if is_compile or is_forbidden or any(f"{name}.".startswith(f"{one}.") for one in EXECUTING_DOTTED):
                faults.append(f"{path}:{line} names {name}")
    assert not faults


def test_only_harmless_modules_are_imported(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            for name in names:
                top = name.partition(".")[0]
                is_known = top in HARMLESS_MODULES or path in GUARDED_MODULES.get(top, "").split()
                if not top or (top in sys.stdlib_module_names and not is_known):
                    faults.append(f"{path}:{node.lineno} imports {name}")
    assert not faults


def test_of_the_system_only_files_are_used(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        for line, name in named(nodes):
            if name.startswith("os."):
                used = name.split(".")[1]
                if not (used in HARMLESS_OS or path in GUARDED_OS.get(used, "").split()):
                    faults.append(f"{path}:{line} uses {name}")
    assert not faults


def test_nothing_is_looked_up_by_a_name_that_a_file_chose(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            if name in {"getattr", "setattr", "delattr", "hasattr"}:
                is_known = isinstance(node.args[1], ast.Constant) or ast.unparse(node) in BY_NAME
            elif name in {"vars", "globals", "locals"}:
                is_known = ast.unparse(node) in BY_NAME
            else:
                is_known = name != "type" or len(node.args) == 1  # with more, it makes a class
            if not is_known:
                faults.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not faults


def test_no_text_is_a_template(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        for node in nodes:
            is_template = False
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method, is_constant = node.func.attr, isinstance(node.func.value, ast.Constant)
                is_template = method in {"format_map", "vformat", "safe_substitute", "substitute"}
                is_template = is_template or (method == "format" and not is_constant)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                is_template = isinstance(node.left, ast.JoinedStr)
            if is_template:
                faults.append(f"{path}:{node.lineno} formats what is no constant")
    assert not faults


def test_torch_load_is_called_in_weights_only_mode_and_only_by_verify(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        calls = 0
        for node in nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in {"torch.load", "torch.serialization.load"}:
                calls += 1
                modes = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "weights_only"]
                if not path.startswith(("proof/", "training/")) or modes != ["True"]:
                    faults.append(f"{path}:{node.lineno} {ast.unparse(node)}")
        # By no other name: not kept in a variable, and not imported as one.
        names = [name for _, name in named(nodes) if name in {"torch.load", "torch.serialization.load"}]
        if len(names) != calls:
            faults.append(f"{path} has torch.load by another name")
    assert not faults


def test_a_process_is_started_without_a_shell(modules) -> None:
    faults = []
    for path, _, nodes in modules:
        for node in nodes:
            if isinstance(node, ast.Call):
                is_shell = any(keyword.arg == "shell" for keyword in node.keywords)
                name = dotted(node.func)
                if is_shell or (name.startswith("subprocess.") and name != "subprocess.Popen"):
                    faults.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not faults


def test_every_exception_is_still_needed(modules) -> None:
    calls, imported = set(), set()
    for path, _, nodes in modules:
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                calls.add(ast.unparse(node))
            elif isinstance(node, ast.Import):
                imported |= {(alias.name.partition(".")[0], path) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(((node.module or "").partition(".")[0], path))
    assert set(BY_NAME) <= calls
    assert {(name, path) for name, paths in GUARDED_MODULES.items() for path in paths.split()} <= imported
