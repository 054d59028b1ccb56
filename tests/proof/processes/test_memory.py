"""The memory limit of the child process: a small file that needs more is refused with a message."""

from __future__ import annotations

import resource

import pytest
import torch

import ckptmove
from ckptmove.limits import Limits
from ckptmove.proof.evidence import CheckResult
from ckptmove.proof.place import Site
from ckptmove.proof.processes import memory
from ckptmove.proof.processes.memory import limit_memory, memory_hint, with_hint
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.request import VerifyRequest
from ckptmove.text import spelled_for_python
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of

DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE.replace(b"cuda:0", b"cpu").replace(
    b"X\6\0\0\0cpu", b"X\3\0\0\0cpu"
)
#: Bytes that torch makes for an operation of a weights-only pickle, in as many letters.
ASKED = 9 * 2**30


@pytest.fixture
def set_to(monkeypatch, tmp_path):
    """The limits that were set, which this process does not get; it has ten pages."""
    found = []
    (tmp_path / "statm").write_text("900 800 700 600 500 10 0\n")
    monkeypatch.setattr(memory, "_FIGURES", tmp_path / "statm")
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.append((which, limits)))
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 2)
    for name in memory._STACKS:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.skipif(
    "builtins.bytearray" not in torch._weights_only_unpickler._get_allowed_globals(),
    reason="this torch makes no bytes in weights-only mode",
)
def test_a_small_file_that_asks_for_gigabytes_is_refused_in_words(tmp_path):
    asked = b"cbuiltins\nbytearray\n\x8a\x05" + ASKED.to_bytes(5, "little") + b"\x85R"
    path = tmp_path / "hostile.pt"
    path.write_bytes(archive_of(b"\x80\x02}(" + text("w") + DENSE + text("b") + asked + b"u.", {"0": bytes(16)}))
    checks = {check.name: check for check in ckptmove.verify(path, to="cpu").checks}
    assert checks["restore"].status == "failed"
    with spelled_for_python():
        assert checks["restore"].detail.endswith(f"MemoryError: {memory_hint()}")


def test_the_limit_follows_the_size_of_the_files(set_to):
    page = resource.getpagesize()
    for nbytes, factor in ((0, 1), (1000, 1), (1000, 3)):
        assert limit_memory(VerifyRequest(path="a.pt", nbytes=nbytes, limits=Limits().times(factor)))
        which, (soft, _) = set_to.pop()
        assert which == resource.RLIMIT_DATA
        assert soft == 10 * page + factor * (2**32 + 256 * nbytes) + 2 * 2**26


@pytest.mark.parametrize(("hard", "expected"), [(2**20, 2**20), (2**60, 10 * resource.getpagesize() + 2**32 + 2**27)])
def test_a_lower_limit_of_the_system_stays(set_to, monkeypatch, hard, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, hard))
    assert limit_memory(VerifyRequest(path="a.pt"))
    assert set_to == [(resource.RLIMIT_DATA, (expected, hard))]


def test_a_case_takes_what_it_needs(set_to):
    assert not limit_memory(VerifyRequest(path="a.pt", case="mine.py:make"))
    assert set_to == []


def test_a_real_accelerator_reserves_what_it_needs(set_to, monkeypatch):
    monkeypatch.setattr(memory, "find_site", lambda target: Site(target, "real"))
    assert not limit_memory(VerifyRequest(path="a.pt", to="cuda:0"))
    assert set_to == []


def test_where_the_system_does_not_tell_there_is_no_limit(set_to, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_FIGURES", tmp_path / "nowhere")
    assert not limit_memory(VerifyRequest(path="a.pt"))
    assert set_to == []


def test_a_check_that_failed_for_want_of_memory_says_what_to_do():
    said = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
    check = CheckResult("restore", "failed", said)
    assert with_hint(Message(check=check)).check.detail == f"{said}; {memory_hint()}"
    others = (
        Message(check=check._replace(detail="no")),
        Message(check=check._replace(status="passed")),
        Message(mode="cpu"),
    )
    for other in others:
        assert with_hint(other) is other


@pytest.mark.parametrize("optimizer", ["AdamW", "pkg.mod:Shampoo"])
def test_an_optimizer_of_the_users_is_not_limited(set_to, optimizer):
    assert limit_memory(VerifyRequest(path="a.pt", optimizer=optimizer)) is (":" not in optimizer)
    assert len(set_to) == (":" not in optimizer)


@pytest.mark.parametrize(("stack", "limited"), [(2**23, True), (resource.RLIM_INFINITY, True), (2**30, False)])
def test_stacks_of_a_size_that_somebody_chose_are_not_held_to_ours(set_to, monkeypatch, stack, limited):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (stack, 2**60))
    assert limit_memory(VerifyRequest(path="a.pt")) is limited
    assert len(set_to) == limited


@pytest.mark.parametrize("name", ["OMP_STACKSIZE", "KMP_STACKSIZE", "GOMP_STACKSIZE"])
def test_nor_are_those_that_a_variable_speaks_of(set_to, monkeypatch, name):
    monkeypatch.setenv(name, "1G")
    assert limit_memory(VerifyRequest(path="a.pt")) is False
    assert set_to == []
