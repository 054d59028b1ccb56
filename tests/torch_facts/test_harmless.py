"""The harmless names, compared with what is installed."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import pkgutil
import types
import typing
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ckptmove.torch_facts import harmless
from ckptmove.torch_facts.harmless import is_class, is_harmless

#: Packages with modules whose classes are harmless by a pattern.
PACKAGES = (
    "torch.ao.nn", "torch.ao.quantization", "torch.distributions", "torch.nn", "torch.optim", "torch.quantization",
    "torch.utils.data",
)  # fmt: skip
#: Types of values that do nothing if they are called, or that cannot be called.
ALIASES = (types.GenericAlias, types.UnionType, typing.TypeVar, tuple, torch.dtype, torch.layout, torch.memory_format)


def modules() -> list[types.ModuleType]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in PACKAGES:
            top = importlib.import_module(package)
            found.append(top)
            for module in pkgutil.walk_packages(top.__path__, f"{package}."):
                with contextlib.suppress(ImportError, RuntimeError):  # needs another package
                    found.append(importlib.import_module(module.name))
    return found


def test_what_the_patterns_accept_is_a_class_of_its_family():
    accepted = 0
    for module in modules():
        for leaf, value in vars(module).items():
            if not is_harmless(f"{module.__name__}.{leaf}"):
                continue
            accepted += 1
            is_torch = isinstance(value, type) and value.__module__.startswith(("torch", "collections"))
            is_alias = isinstance(value, ALIASES) or type(value).__name__ in {"TypeAliasType", "_CallableGenericAlias"}
            assert is_torch or is_alias or f"{module.__name__}.{leaf}" in harmless._TORCH, f"{module.__name__}.{leaf}"
    assert accepted > 1000


def test_what_modules_of_torch_import_is_not_accepted():
    """Names through a module that a module of a family imports, as ``torch.nn.modules.module.inspect.os``."""
    for module in modules():
        for name, inner in vars(module).items():
            if isinstance(inner, types.ModuleType) and inner.__name__ != f"{module.__name__}.{name}":
                reached = [leaf for leaf in vars(inner) if is_harmless(f"{module.__name__}.{name}.{leaf}")]
                values = [getattr(inner, leaf) for leaf in reached]
                assert all(isinstance(one, ALIASES) or one.__module__.startswith("torch.") for one in values), reached


@pytest.mark.parametrize("module", [torch.nn.functional, torch.nn.init], ids=["functional", "init"])
def test_listed_functions_are_those_of_torch(module):
    listed = {name for name in harmless._FUNCTIONAL | harmless._INIT if name.startswith(f"{module.__name__}.")}
    for name in listed:
        function = getattr(module, name.rpartition(".")[2], None)
        assert callable(function)
        assert not isinstance(function, type)


def resolved(name: str) -> Any:
    """What a name means here; None if this Python, torch or numpy does not have it."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            value = getattr(value, part, None)
        return value
    return None


@pytest.mark.filterwarnings("ignore")
def test_harmless_names_are_no_modules_and_have_no_harmful_origin():
    harmful = ("os", "posix", "subprocess", "importlib", "socket", "ctypes")
    for name in harmless._STANDARD_LIBRARY | harmless._NUMPY:
        value = resolved(name)
        assert not isinstance(value, types.ModuleType), name
        assert not (getattr(value, "__module__", None) or "").startswith(harmful), name


@pytest.mark.parametrize(
    "name",
    [
        "argparse.Namespace", "collections.ChainMap", "collections.UserDict", "fractions.Fraction", "io.BytesIO",
        "pathlib.PurePosixPath", "random.Random", "types.SimpleNamespace", "builtins.frozenset",
    ],
)  # fmt: skip
def test_a_harmless_class_is_made_without_a_side_effect(name, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    made = resolved(name)
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(builtins, "__import__", refuse)
    made()


def test_constants_of_harmless_classes_cannot_be_called():
    for name in harmless._HARMLESS:
        if is_class(name):
            value = resolved(name)
            constants = [leaf for leaf in dir(value) if harmless._CONSTANT.fullmatch(leaf)]
            assert not any(callable(getattr(value, leaf)) for leaf in constants), name


def test_names_of_numpy_are_those_of_numpy():
    names = [name for name in harmless._NUMPY if name.count(".") == 1]
    values = {name: getattr(np, name.rpartition(".")[2], None) for name in names}
    lacking = {name for name, value in values.items() if not callable(value)}
    assert lacking <= {"numpy.bool"}, "numpy 1 has no such name"
    assert {name for name, value in values.items() if isinstance(value, np.ufunc)} > {"numpy.less", "numpy.add"}
