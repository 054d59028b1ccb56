from __future__ import annotations

import socket

import pytest

from ckptmove.errors import MissingFile, OutOfMemory, SourceChanged
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import RemoteFailed, RemoteMissing
from ckptmove.io.remote.failures import failures_named

URL = "https://u:p@h/a.pth?token=tttt"


def named(error, url=URL):
    with pytest.raises(Exception) as raised, failures_named(Address(url)):
        raise error
    return raised.value


def with_fields(kind=Exception, name="Odd", text="", **fields):
    """An error of a class of that name, with fields, as a library raises it."""
    error = type(name, (kind,), {})(text)
    for field, value in fields.items():
        setattr(error, field, value)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("a"), MissingFile),
        (with_fields(status=404), MissingFile),
        (with_fields(code="410"), MissingFile),
        (with_fields(name="FileExpired"), SourceChanged),
        (with_fields(status=412), SourceChanged),
        (ModuleNotFoundError("no s3fs"), RemoteMissing),
        (ValueError("odd"), RemoteFailed),
    ],
)
def test_classes(error, kind) -> None:
    found = named(error)
    assert type(found) is kind
    assert found.path == "https://***@h/a.pth?token=***"
    assert found.__suppress_context__


def test_the_package_of_a_module_that_cannot_be_imported() -> None:
    from_module = ImportError("Install adlfs to access Azure")
    from_module.__cause__ = ModuleNotFoundError(name="adlfs.core")
    errors = [from_module, ModuleNotFoundError(name="paramiko"), ImportError("libraries required")]
    found = [named(error, "az://b/a") for error in errors]
    assert [one.package for one in found] == ["adlfs", "paramiko", "a package of fsspec"]
    assert not any(one.is_extra for one in found)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("no"),
        with_fields(status=403),
        with_fields(code="401"),
        with_fields(response=type("Response", (), {"status_code": 403})()),
        with_fields(name="NoCredentialsError"),
        with_fields(name="RefreshError"),
    ],
)
def test_denials(error) -> None:
    assert named(error).is_denied


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (with_fields(name="FSTimeoutError"), "in time"),
        (TimeoutError(), "in time"),
        (socket.gaierror(-2, "Name or service not known"), "resolved"),
        (with_fields(name="ClientConnectorCertificateError", text="expired"), "TLS certificate is not valid: expired"),
        (with_fields(name="ClientConnectorError", errno=None), "no connection"),
        (with_fields(name="ServerDisconnectedError"), "closed the connection"),
        (RuntimeError("first\nsecond"), "first"),
    ],
)
def test_reasons(error, reason) -> None:
    found = named(error)
    assert reason in found.reason
    assert "second" not in found.reason
    assert not found.is_denied


def test_an_unknown_host_may_be_the_cause_of_the_cause() -> None:
    error, inner = RuntimeError("outer"), OSError("inner")
    error.__cause__, inner.__context__ = inner, socket.gaierror()
    assert "resolved" in named(error).reason


def test_a_circle_of_causes() -> None:
    error = RuntimeError("a")
    error.__cause__, other = OSError("b"), error
    error.__cause__.__cause__ = other
    assert named(error).reason == "a"


def test_messages_have_no_credentials() -> None:
    found = named(RuntimeError(f"GET {URL} failed for AKIAIOSFODNN7EXAMPLE"))
    for secret in ("u:p", "tttt", "AKIA"):
        assert secret not in str(found)
    assert len(named(RuntimeError("x" * 1000)).reason) <= 200


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OutOfMemory("a")])
def test_other_exceptions_stay(error) -> None:
    with pytest.raises(type(error)) as raised, failures_named(Address(URL)):
        raise error
    assert raised.value is error


def test_without_an_error_nothing_is_raised() -> None:
    with failures_named(Address(URL)):
        pass
