"""Nothing that is printed or documented advises to run code of a file, or to allow a name of it."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import CkptMoveError
from ckptmove.findings.catalogue import CATALOGUE

HOME = Path(__file__).parents[2]
SAMPLES = sorted(
    path
    for path in (HOME / "sample_ckpts").iterdir()
    if path.suffix not in {".py", ".json", ".md"} and path.name[0] != "."
)
TEXTS = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md")), *sorted((HOME / "examples").glob("*.py"))]
#: Loaders that run code of the file that they load, and what allows names.
UNSAFE = re.compile(
    r"weights_only ?= ?False|safe_globals|(?<!torch_)pickle\.loads?\b|pickle\.Unpickler|jit\.load|export\.load|joblib"
    r"|dill\.load|cloudpickle|read_pickle|allow_pickle|checkpoint\.load\b|dcp_to_torch"
)
#: Sentences that say what these functions do, and advise nothing.
FACTS = {
    "catalogue": (
        "With weights_only=False the file may run any code it holds.",
        "torch.load(weights_only=False) and pickle.load would run it with your rights.",
    ),
    "formats.md": (
        "`verify` does not run `torch.distributed.checkpoint.load`, which unpickles `.metadata`.",
        "It has the keys of the file that `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE`",
    ),
    "python.md": (
        "Functions that `torch.serialization.add_safe_globals` allows are not.",
        "`weights_only=True` is accepted, and `weights_only=False` is an error.",
    ),
    "rules.md": (
        "With weights\\_only=False the file may run any code it holds.",
        "torch.load(weights\\_only=False) and pickle.load would run it with your rights.",
    ),
    "script.md": (
        "If the script asks for `weights_only=False`, `verify` loads it with `weights_only=True`.",
        "`pickle.load`, `pickle.Unpickler` and the functions that end in them",
        "(`joblib.load`, `dill.load`, `pandas.read_pickle`, `numpy.load`) refuse the checkpoint too",
    ),
    # Messages that say what a function would do, or what a script did.
    "loading.py": ("weights_only=False would execute the pickle, which load never does",),
    # Endings of file names.
    "archive.py": (r"\.(?:tar|tgz|tbz2?|txz|tzst|zip|7z|rar|pth?|ckpt|bin|safetensors|nemo|pkl|pickle|joblib)\b",),
    "safety.py": ("torch.export.load also runs code that weights_only=True refuses: ",),
    "loaded.py": ("it is a bare pickle, which pickle.load restores",),
    "pieces.py": (
        (
            " of *.distcp were loaded one at a time by torch.load(weights_only=True); "
            "torch.distributed.checkpoint.load was not run, because it unpickles .metadata"
        ),
    ),
}
#: The first words of the commands in fixes.
PROGRAMS = {"ckptmove", "python"}


def advice_in(text: str, name: str) -> list[str]:
    """The unsafe words of a text, without its sentences about facts."""
    words = " ".join(text.split())
    for fact in FACTS.get(name, ()):
        assert fact in words or name.endswith(".py"), f"{name} no longer says: {fact}"
        words = words.replace(fact, "")
    return UNSAFE.findall(words.replace("\\_", "_"))


@pytest.mark.parametrize("path", TEXTS, ids=[path.name for path in TEXTS])
def test_no_text_for_users_gives_unsafe_advice(path) -> None:
    assert advice_in(path.read_text(encoding="utf-8"), path.name) == []


def test_the_catalogue_gives_no_unsafe_advice() -> None:
    texts = [text for entry in CATALOGUE.values() for text in (entry.when, entry.why, entry.mend)]

    assert advice_in(" ".join(texts), "catalogue") == []
    assert not any(UNSAFE.search(entry.mend) for entry in CATALOGUE.values())


def strings_of(path: Path) -> list[str]:
    """The strings of a module that may be printed: no docstrings, and no names of attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_no_string_of_the_package_is_unsafe_advice() -> None:
    found = {}
    for path in sorted((HOME / "ckptmove").rglob("*.py")):
        if path.parent.name == "torch_facts" or path.name == "catalogue.py":
            continue  # lists of names; the catalogue has its own test
        facts = FACTS.get(path.name, ())
        texts = [text for text in strings_of(path) if UNSAFE.search(text) and text not in facts]
        # The name of a loader alone is compared or shown in a message.
        texts = [text for text in texts if not re.fullmatch(r"[\w.]+", text)]
        if texts:
            found[str(path.relative_to(HOME))] = texts
    assert found == {}


@pytest.mark.parametrize("path", SAMPLES, ids=[path.name for path in SAMPLES])
def test_each_fix_of_a_sample_is_a_command_or_a_sentence(path) -> None:
    for finding in ckptmove.inspect(path).findings:
        assert not UNSAFE.search(finding.fix)
        words = finding.fix.split(" ", 1)
        if words[0] in PROGRAMS:
            assert shlex.split(finding.fix)[0] in PROGRAMS
        elif finding.fix:
            with pytest.raises(SyntaxError):
                ast.parse(finding.fix)


def test_no_hint_of_an_error_is_unsafe_advice(tmp_path) -> None:
    from ckptmove.api.hints import _MENDS, _TEXTS

    assert [hint for hint in (*_MENDS.values(), *_TEXTS.values()) if UNSAFE.search(hint)] == []
    (tmp_path / "module.ptl").write_bytes(b"\0\0\0\0PTMF" + bytes(100))
    with pytest.raises(CkptMoveError) as raised:
        ckptmove.inspect(tmp_path / "module.ptl")
    assert not UNSAFE.search(raised.value.hint)
