from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import UnknownDevice, UsageError
from ckptmove.torch_facts import devices
from ckptmove.torch_facts.dtypes import ITEM_BYTES, MPS_DTYPES

RENAMED = ("npu", "mlu", "musa", "gcu", "sdaa", "ocl", "neuron", "spyre", "rbln", "openreg")


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("mps", "mps"),
        ("mps:0", "mps"),
        ("cuda", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cuda:127", "cuda:127"),
        ("xpu", "xpu:0"),
        ("hpu", "hpu:0"),
        ("mtia:2", "mtia:2"),
        ("npu", "npu:0"),
        ("mlu:3", "mlu:3"),
        ("privateuseone", "privateuseone:0"),
    ],
)
def test_a_target_is_read_as_torch_would_tag_it(text, tag):
    assert devices.parse_target(text) == tag


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("gpu", "cuda:0"),
        ("gpu1", "cuda:1"),
        ("GPU:2", "cuda:2"),
        ("cuda0", "cuda:0"),
        ("CUDA", "cuda:0"),
        ("CUDA:1", "cuda:1"),
        ("cuda:x", "cuda:0"),
        ("cuda:-1", "cuda:0"),
        ("cuda:01", "cuda:1"),
        ("cuda:128", "cuda:0"),
        ("cuda:999999999", "cuda:0"),
        (" cuda: 3", "cuda:3"),
        ("cdua:1", "cuda:1"),
        ("3", "cuda:3"),
        ("nvidia", "cuda:0"),
        ("rocm", "cuda:0"),
        ("metal", "mps"),
        ("MPS", "mps"),
        ("mps:1", "mps"),
        ("cpu:1", "cpu"),
        ("CPU", "cpu"),
        ("gaudi", "hpu:0"),
        ("ascend:4", "npu:4"),
        ("privateuse1", "privateuseone:0"),
        ("quantum", None),
        ("", None),
        ("!?", None),
    ],
)
def test_an_unknown_word_comes_with_the_nearest_target(text, suggestion):
    with pytest.raises(UnknownDevice) as caught:
        devices.parse_target(text)
    assert caught.value.device == text
    assert caught.value.suggestion == suggestion


@pytest.mark.parametrize("text", ["tpu0", "tpu:0", "xla_1"])
def test_no_target_is_suggested_for_what_no_file_can_name(text):
    assert devices.suggest(text) is None


@given(st.text())
def test_whatever_is_suggested_is_a_target(text):
    suggestion = devices.suggest(text)
    assert suggestion is None or devices.parse_target(suggestion) == suggestion


@pytest.mark.parametrize(
    ("text", "why"), [("xla", "placed when they are loaded"), ("xla:1", "xla"), ("meta", "no values"),
                      ("hip:0", "cuda"), ("vulkan", "no tag"), ("tpu", "a TPU xla"), ("TPU:1", "a TPU xla")],
)  # fmt: skip
def test_what_no_file_can_name_is_refused_with_the_reason(text, why):
    with pytest.raises(UsageError, match=why) as caught:
        devices.parse_target(text)
    assert not isinstance(caught.value, UnknownDevice)


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("cuda:*=cuda:0", ("cuda:*", "cuda:0")),
        ("cuda:1=cpu", ("cuda:1", "cpu")),
        (" cuda = mps ", ("cuda", "mps")),
        ("*=cuda", ("*", "cuda:0")),
        ("xla:0=cpu", ("xla:0", "cpu")),
    ],
)
def test_a_mapping_is_a_glob_and_a_tag(text, mapping):
    assert devices.parse_mapping(text) == mapping


@pytest.mark.parametrize("pair", [("", "cpu"), ("cpu", "")])
def test_half_a_pair_names_no_device(pair):
    with pytest.raises(UnknownDevice):
        devices.parse_pair(*pair)


@pytest.mark.parametrize("text", ["cuda:0", "=cpu", "cuda:0=", "", " = "])
def test_half_a_mapping_is_refused(text):
    with pytest.raises(UsageError, match="SRC=DST"):
        devices.parse_mapping(text)


@pytest.mark.parametrize(("text", "word"), [("gpu=cpu", "gpu"), ("cuda:0=gpu", "gpu"), ("cuda0=cpu", "cuda0")])
def test_a_mapping_names_known_devices_on_both_sides(text, word):
    with pytest.raises(UnknownDevice) as caught:
        devices.parse_mapping(text)
    assert caught.value.device == word
    assert caught.value.suggestion == "cuda:0"


@pytest.mark.parametrize(
    ("glob", "tag", "expected"),
    [
        ("cuda:*", "cuda:3", True),
        ("cuda:*", "cuda", True),
        ("cuda:0", "cuda", True),
        ("cuda:1", "cuda", False),
        ("cuda", "cuda:3", True),
        ("cuda:3", "cuda:3", True),
        ("cuda:3", "cuda:30", False),
        ("cuda:[0-3]", "cuda:2", True),
        ("c*", "cpu", True),
        ("*", "something odd", True),
        ("mps", "mps:0", True),
        ("cuda:*", "cpu", False),
    ],
)
def test_what_a_mapping_means(glob, tag, expected):
    assert devices.matches(glob, tag) is expected


@pytest.mark.parametrize(
    ("tag", "parts"),
    [
        ("cuda:3", ("cuda", 3)),
        ("cuda", ("cuda", None)),
        ("", ("", None)),
        (":1", ("", 1)),
        ("cuda:x", ("cuda", None)),
        ("cuda:1:2", ("cuda", None)),
        ("cuda:" + "9" * 10_000, ("cuda", None)),
    ],
)
def test_a_tag_is_taken_apart(tag, parts):
    assert devices.split(tag) == parts


@given(st.text(), st.text())
def test_an_odd_tag_raises_nowhere(first, second):
    devices.split(first)
    devices.same_device(first, second)
    devices.matches(first, second)
    devices.is_accelerator(first)
    devices.is_device_string(first)
    devices.supports_capturable(first)
    devices.supports_fused(first)
    assert {"float32", "int64"}.isdisjoint(devices.unsupported_dtypes(first))


def test_one_device_under_two_names():
    assert devices.same_device("cuda", "cuda:0")
    assert devices.same_device("mps:0", "mps")
    assert not devices.same_device("cuda", "cuda:1")
    assert not devices.same_device("cpu", "mps")


@pytest.mark.parametrize(
    ("tag", "expected"),
    [("cuda:0", True), ("mps", True), ("npu:1", True), ("xla:0", True), ("a_vendors_own:0", True), ("cpu", False),
     ("cpu:0", False), ("meta", False), ("", False), ("!", False)],
)  # fmt: skip
def test_what_an_accelerator_is(tag, expected):
    assert devices.is_accelerator(tag) is expected


def test_what_mps_lacks():
    assert devices.unsupported_dtypes("mps:0") == set(ITEM_BYTES) - MPS_DTYPES
    assert {"float64", "complex128", "float8_e4m3fn", "float8_e5m2", "qint8"} < devices.unsupported_dtypes("mps")
    assert devices.unsupported_dtypes("cuda:0") == frozenset()


# --- compared with torch ---------------------------------------------------------------------------------------------


def torch_device(text):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mkldnn is deprecated as a device
        try:
            return torch.device(text)
        except RuntimeError:
            return None


def types_of_torch():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.device("nothing")
    listed = re.search(r"one of (.*) device type", str(caught.value))
    assert listed
    return listed[1].split(", ")


def test_the_types_are_those_of_torch():
    assert set(types_of_torch()) == devices._TORCH_TYPES


@pytest.mark.parametrize(
    "text",
    ["cpu", "cuda", "cuda:0", "cuda:127", "cuda:-1", "cuda:00", "cuda:01", "cuda:", ":0", "", "cuda:0 ", " cuda",
     "cuda: 0", "cuda:+1", "cuda:1x", "cuda:0:0", "cuda\n", "cuda:0\n", "cuda\0", "CUDA", "gpu", "cuda0", "cuda:\u0663",
     "cuda:1_0", "mps:1", "meta:0", "privateuseone:1", "privateuse1", "xla:0", "hip", "lazy:2"],
)  # fmt: skip
def test_a_device_string_is_one_that_torch_takes(text):
    assert devices.is_device_string(text) is (torch_device(text) is not None)


@given(st.sampled_from(sorted(devices._TORCH_TYPES)), st.integers(0, 1000))
def test_a_device_string_keeps_its_index_in_torch(kind, index):
    device = torch_device(f"{kind}:{index}")
    assert device is not None
    # privateuseone has the name that was given to it in this process, if any.
    kept = (device.type, device.index) == (torch_device(kind).type, index)  # torch folds a large index into eight bits
    assert devices.is_device_string(f"{kind}:{index}") is kept


@given(st.text(alphabet="cudamps:0123456789 -", max_size=12))
def test_no_device_string_that_torch_refuses(text):
    if devices.is_device_string(text) and devices.split(text)[0] not in RENAMED:
        device = torch_device(text)
        assert device is not None
        assert (device.type, device.index) == devices.split(text)


def test_a_vendors_name_is_a_device_string():
    assert all(devices.is_device_string(f"{name}:1") for name in RENAMED)


def test_targets_are_the_types_that_torch_tags():
    """``register_package`` names each backend that ``torch.save`` can tag."""
    from torch import serialization

    backends = {"cpu", "mps"}
    for _, tagger, _ in serialization._package_registry:
        backends.update(getattr(tagger, "args", ()))
    expected = {"privateuseone" if name == "privateuse1" else name for name in backends}
    assert expected == devices._TAGGED - set(RENAMED)


def test_capturable_and_fused_are_the_lists_of_torch():
    torch = pytest.importorskip("torch")
    from torch.optim.optimizer import _get_capturable_supported_devices
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    kinds = types_of_torch()
    # Another test of this process may have given PrivateUse1 the name of a simulated device.
    own = torch._C._get_privateuse1_backend_name()
    capturable, fused = (
        {"privateuseone" if kind == own else kind for kind in listed}
        for listed in (_get_capturable_supported_devices(), _get_fused_kernels_supported_devices())
    )
    assert {kind for kind in kinds if devices.supports_capturable(kind)} == capturable
    assert {kind for kind in kinds if devices.supports_fused(kind)} == fused
    assert all(devices.supports_capturable(f"{name}:0") and devices.supports_fused(f"{name}:0") for name in RENAMED)


def test_a_device_of_torch_reads_as_its_name() -> None:
    torch = pytest.importorskip("torch")
    assert devices.parse_target(torch.device("cuda", 1)) == "cuda:1"
