"""Functions of the API."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.api.arguments import NotAccepted, optimizer_name, words
from ckptmove.api.hints import hint_for
from ckptmove.errors import (
    CaseUnusable,
    CkptMoveError,
    DistributedFile,
    OutputExists,
    OutputIsSource,
    UnknownDevice,
    UsageError,
)
from ckptmove.io.locations import default_output
from ckptmove.proof.errors import PackageMissing, TorchBroken
from ckptmove.proof.evidence import Verdict

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLES / "adamw-cuda3.pth", tmp_path / "run.pth"))


def test_the_package_hands_out_the_use_cases() -> None:
    from ckptmove.api import functions as api

    assert ckptmove.inspect is api.inspect
    assert ckptmove.convert is api.convert
    assert ckptmove.undo is api.undo
    assert ckptmove.verify is api.verify
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = ckptmove.train


def test_every_public_name_is_there() -> None:
    assert all(getattr(ckptmove, name).__name__ == name for name in ckptmove.__all__)


def test_the_package_lists_the_use_cases_before_they_are_used() -> None:
    code = "import ckptmove; print(*dir(ckptmove))"
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"inspect", "convert", "undo", "verify", "Inspection", "__version__"} <= set(listed.split())


def test_results_print_as_one_line(source: Path) -> None:
    assert str(ckptmove.inspect(source)) == f"{source}: 16 tensors, findings D103, R302"
    assert str(ckptmove.inspect(source, device_count=4)).endswith("16 tensors, findings R302")
    assert str(replace(ckptmove.inspect(source), findings=())) == f"{source}: 16 tensors, no findings"
    assert str(ckptmove.convert(source, to="cpu", dry_run=True)) == "dry run: 12 changes"
    assert str(ckptmove.convert(source, to="cpu")) == f"wrote {source.parent / 'run.cpu.pth'}: 12 changes"
    assert str(ckptmove.convert(source, to="cpu", in_place=True)) == f"wrote {source}: 12 changes"
    assert str(ckptmove.undo(source, dry_run=True)) == f"{source}: dry run, 6,987 bytes"
    assert str(ckptmove.undo(source)) == f"{source}: restored, 6,987 bytes"
    verdicts = {(True, True): "passed", (True, False): "passed, but not proven", (False, False): "failed"}
    for (passed, proven), verdict in verdicts.items():
        result = Verdict(path="a", target="mps", mode="simulated", passed=passed, proven=proven, checks=(), findings=())
        assert str(result) == f"a: {verdict} on mps (simulated)"
    assert str(replace(result, target="cpu", mode="cpu")) == "a: failed on cpu"


@pytest.mark.unmeasured
def test_verify_stays_a_function_after_it_has_run(source: Path) -> None:
    assert ckptmove.verify(str(source), to="cuda:3").passed
    assert callable(ckptmove.verify)


def test_inspect_gives_inventory_findings_and_outline(source: Path) -> None:
    plain = ckptmove.inspect(str(source))
    assert {tensor.device for tensor in plain.inventory.tensors} == {"cuda:3", "cpu"}
    assert {finding.code for finding in plain.findings} == {"D103", "R302"}
    assert plain.outline == ()
    told = ckptmove.inspect(str(source), outline=True, device_count=4, check=True)
    assert {finding.code for finding in told.findings} == {"R302"}
    assert {line.name for line in told.outline if line.depth == 1} == set(told.inventory.root_keys)


def test_check_finds_a_flipped_byte(source: Path) -> None:
    with ckptmove_open(source) as checkpoint:
        span = checkpoint.file.span("0")
    data = bytearray(source.read_bytes())
    data[span.start] ^= 1
    source.write_bytes(data)
    assert "F801" not in {finding.code for finding in ckptmove.inspect(str(source)).findings}
    assert "F801" in {finding.code for finding in ckptmove.inspect(str(source), check=True).findings}


def test_check_tells_how_far_it_is(source: Path) -> None:
    seen: list[tuple[int, int]] = []
    ckptmove.inspect(str(source), check=True, progress=lambda done, total: seen.append((done, total)))
    size = source.stat().st_size
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    with zipfile.ZipFile(source) as archive:
        assert seen[-1][0] == sum(record.compress_size for record in archive.infolist())
    ckptmove.inspect(str(source), progress=lambda done, total: seen.clear())
    assert seen, "without a check nothing is read that would take time"


def test_what_is_expected_comes_from_the_same_reading(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptmove.api import inspection as api

    opened: list[str] = []
    real = api.open_checkpoint

    def counted(path, *arguments, **options):
        opened.append(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(api, "open_checkpoint", counted)
    told = ckptmove.inspect(str(source), expect="mps")
    assert opened == [str(source)]
    assert told.plan is not None
    assert told.plan == ckptmove.convert(str(source), to="mps", dry_run=True, cast=True).plan
    assert told.findings == ckptmove.inspect(str(source), target="mps").findings
    assert ckptmove.inspect(str(source)).plan is None


def test_verify_tells_how_far_it_is(source: Path) -> None:
    pytest.importorskip("torch")
    seen: list[tuple[int, int]] = []
    stages: list[str] = []
    ckptmove.verify(str(source), progress=lambda done, total: seen.append((done, total)), stage=stages.append)
    assert seen[-1][1] == source.stat().st_size
    assert stages[-1] == "finishing"


def test_a_torch_that_cannot_be_imported(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TorchBroken) as caught:
        ckptmove.verify(str(source))
    assert caught.value.reason == "ImportError: libcudart.so.13: cannot open"
    assert caught.value.path is None


def ckptmove_open(path: Path):
    from ckptmove.opening.checkpoint import open_checkpoint

    return open_checkpoint(str(path))


def test_convert_writes_beside_the_source_and_leaves_it(source: Path) -> None:
    before = source.read_bytes()
    seen: list[tuple[int, int]] = []
    result = ckptmove.convert(str(source), to="cpu", progress=lambda done, total: seen.append((done, total)))
    assert result.output == str(source.parent / "run.cpu.pth")
    assert result.bytes_copied == Path(result.output).stat().st_size
    assert seen[-1] == (result.bytes_copied, result.bytes_copied)
    assert source.read_bytes() == before
    assert sorted(path.name for path in source.parent.iterdir()) == ["run.cpu.pth", "run.pth"]


def test_an_empty_plan_copies_the_file(source: Path) -> None:
    result = ckptmove.convert(str(source), to="cuda:3")
    assert result.plan.is_empty
    assert Path(result.output or "").read_bytes() == source.read_bytes()


def test_convert_maps_devices(source: Path) -> None:
    result = ckptmove.convert(str(source), map_location={"cuda:*": "cuda:1"}, dry_run=True)
    assert result.output is None
    assert {(edit.source, edit.target) for edit in result.plan.edits} == {("cuda:3", "cuda:1")}
    assert list(source.parent.iterdir()) == [source]


def test_convert_refuses(source: Path) -> None:
    taken = source.parent / "run.cpu.pth"
    taken.write_text("precious")
    with pytest.raises(OutputExists):
        ckptmove.convert(str(source), to="cpu")
    assert taken.read_text() == "precious"
    link = source.parent / "link.pth"
    link.symlink_to(source)
    for output in (source, link):
        with pytest.raises(OutputIsSource):
            ckptmove.convert(str(source), to="cpu", output=str(output), force=True)
    with pytest.raises(UsageError, match="needs a target"):
        ckptmove.convert(str(source))
    with pytest.raises(UnknownDevice):
        ckptmove.convert(str(source), map_location={"gpu": "cpu"})


def test_convert_says_that_there_was_nothing_to_check(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "unchecked.pt"
    import saving

    with saving.crcs(written=False):
        torch.save({"weight": torch.ones(3)}, path)
    assert ckptmove.convert(str(path), to="cuda:0").notes


@pytest.mark.parametrize(
    ("path", "to", "output"),
    [
        ("runs/last.ckpt", "mps", "runs/last.mps.ckpt"),
        ("best.pth.tar", "cpu", "best.cpu.pth.tar"),
        ("archive.tar", "cpu", "archive.cpu.tar"),
        ("checkpoint", "cuda0", "checkpoint.cuda0"),
    ],
)
def test_the_default_output_names_the_device(path: str, to: str, output: str) -> None:
    assert default_output(path, to) == output


@pytest.mark.parametrize(
    ("options", "tag"),
    [({"to": "cuda"}, "cuda0"), ({"to": "cuda:1"}, "cuda1"), ({"map_location": {"*": "mps"}}, "moved")],
)
def test_the_tag_of_the_default_output(source: Path, options: dict, tag: str) -> None:
    assert ckptmove.convert(str(source), **options).output == str(source.with_suffix(f".{tag}.pth"))


def test_verify_without_torch_says_how_to_get_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageMissing):
        ckptmove.verify(str(source))


def test_verify_without_a_package_of_the_child_names_it_before_a_child_starts(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else 1)
    with pytest.raises(PackageMissing) as caught:
        ckptmove.verify(str(source))
    assert caught.value.package == "safetensors"
    assert caught.value.hint == "install it: pip install safetensors; inspect and convert do not need it"


def test_a_severity_compares_with_its_word(source: Path) -> None:
    found = {finding.code: finding.severity for finding in ckptmove.inspect(source, device_count=1).findings}
    assert found["D103"] == "error"
    assert found["D103"] != "info"
    assert {"error": 1}[found["D103"]] == 1


@pytest.mark.parametrize("given", ["cuda:1", torch.device("cuda", 1), torch.device("cuda:1")], ids=repr)
def test_map_location_names_the_target_as_for_torch_load(source: Path, given: object) -> None:
    plan = ckptmove.convert(source, map_location=given, dry_run=True).plan
    assert plan == ckptmove.convert(source, to="cuda:1", dry_run=True).plan
    assert plan == ckptmove.convert(source, to=given, map_location="cuda:1", dry_run=True).plan


def test_map_location_as_a_dict_takes_devices(source: Path) -> None:
    devices = {torch.device("cuda:3"): torch.device("cpu")}
    plan = ckptmove.convert(source, map_location=devices, dry_run=True).plan
    assert plan == ckptmove.convert(source, map_location={"cuda:3": "cpu"}, dry_run=True).plan
    assert {edit.target for edit in plan.edits} == {"cpu"}


def test_map_location_that_no_file_can_take_is_refused(source: Path) -> None:
    with pytest.raises(UsageError, match="two targets"):
        ckptmove.convert(source, to="cpu", map_location="cuda:0", dry_run=True)
    with pytest.raises(UsageError, match="function"):
        ckptmove.convert(source, map_location=lambda storage, _: storage, dry_run=True)


def test_targets_may_be_devices_of_torch(source: Path) -> None:
    expected = ckptmove.inspect(source, expect=torch.device("cuda:3"), device_count=4)
    assert expected.plan is not None
    assert expected.plan.is_empty
    assert ckptmove.verify(source, to=torch.device("cuda:3")).target == "cuda:3"


def test_results_show_as_one_short_line(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    torch.save({f"layer.{index}.weight": torch.ones(1) for index in range(200)}, path)
    inspected, planned = ckptmove.inspect(path), ckptmove.convert(path, to="cuda:0", dry_run=True)
    verdict, compared = ckptmove.verify(path), ckptmove.diff(path, path)
    changed = ckptmove.convert(path, to="cuda:0", in_place=True)
    for result in (inspected, inspected.inventory, planned, verdict, compared, changed, ckptmove.undo(path)):
        assert "\n" not in repr(result)
        assert len(repr(result)) < len(str(path)) * 3 + 120
        assert repr(result) == f"<{type(result).__name__} {result}>"


CASE = """
import torch
from ckptmove import Case

def case():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, None, torch.ones(1, 2), model_loss(model))

def model_loss(model):
    return lambda batch: model(batch).sum()

class Cases:
    def case(self):
        return case()
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    return tmp_path / "run.pth"


@pytest.mark.parametrize("name", ["mycase", "mypackage.cases"])
def test_verify_takes_the_function_of_a_case(trained: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    file = tmp_path / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(CASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    result = ckptmove.verify(trained, case=module.case)
    assert {check.name: check.status for check in result.checks}["case"] == "passed"
    for unnamed in (module.Cases().case, module.model_loss(None), lambda: None):
        with pytest.raises(CaseUnusable, match="top level"):
            ckptmove.verify(trained, case=unnamed)


def test_a_function_of_a_notebook_is_refused(trained: Path, monkeypatch) -> None:
    notebook = types.ModuleType("notebook")
    exec("def case(): pass", vars(notebook))
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    with pytest.raises(CaseUnusable, match=r"case\.py:case"):
        ckptmove.verify(trained, case=notebook.case)


def test_one_file_of_a_distributed_checkpoint_names_its_directory() -> None:
    assert str(hint_for(DistributedFile("run/__0_0.distcp"))).endswith("ckptmove inspect run")


def test_errors_are_also_builtin_and_carry_their_hint(source: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        ckptmove.inspect(source.with_name("run.ptx"))
    assert missing.value.filename == str(source.with_name("run.ptx"))
    assert str(source) in missing.value.hint
    assert missing.value.__notes__ == [f"hint: {missing.value.hint}"]
    with pytest.raises(ValueError, match="cudaa") as unknown:
        ckptmove.convert(source, to="cudaa")
    assert "cuda:0" in unknown.value.hint
    ckptmove.convert(source, to="cpu")
    with pytest.raises(FileExistsError):
        ckptmove.convert(source, to="cpu")
    with pytest.raises(UsageError) as bare:
        ckptmove.convert(source)
    assert (bare.value.hint, bare.value.__notes__) == ("", [])


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"only": "nope"}, "only 'nope' matches nothing", "ckptmove inspect --tree"),
        ({"only": ()}, "only takes", ""),
        ({"dtype": "int"}, "dtype casts to", ""),
        (
            {"to": "cpu", "in_place": True, "output": "x.pth"},
            "in_place changes the file itself and takes no output",
            "",
        ),
        ({"to": "cpu", "in_place": True, "check": False}, "leave out force and check=False", ""),
        ({"to": "cpu", "keep": ""}, "keep takes", ""),
        ({}, "to='DEVICE'", ""),
        ({"output": "x.safetensors"}, "cannot hold", "as_root='model'"),
        ({"to": "cpu", "output": "old.pth"}, "", "replace it with force=True or choose another path with output"),
        ({"to": "cpu", "output": "none/x.pth"}, "", "or choose another path with output"),
    ],
)
def test_errors_name_arguments(source: Path, monkeypatch, options, message, hint) -> None:
    monkeypatch.chdir(source.parent)
    Path("old.pth").touch()
    with pytest.raises(CkptMoveError) as caught:
        ckptmove.convert(source, **options)
    assert message in str(caught.value)
    assert caught.value.args == (caught.value.message,)
    assert hint in caught.value.hint
    assert "--" not in f"{caught.value} {caught.value.hint}".replace("inspect --tree", "")


def test_an_output_that_cannot_be_written_is_an_os_error(source: Path) -> None:
    with pytest.raises(OSError, match="could not write") as caught:
        ckptmove.convert(source, to="cpu", output=source / "x.pth")
    assert caught.value.filename == str(source / "x.pth")


def test_a_string_is_one_word(source: Path) -> None:
    plain, text = (ckptmove.verify(source, to="cpu", ignore=ignore) for ignore in (["R302"], "R302"))
    assert text.findings == plain.findings
    assert words("D103") == words(["D103"]) == ("D103",)


def test_dtypes_may_be_those_of_torch(source: Path) -> None:
    plans = [
        ckptmove.convert(source, dtype=dtype, dry_run=True).plan
        for dtype in ("bf16", torch.bfloat16, {"model": torch.bfloat16})
    ]
    assert [plan.edits for plan in plans] == [plans[0].edits] * 3
    assert plans[0].edits


def test_signatures_name_every_parameter() -> None:
    import inspect

    from ckptmove.moves import Remap

    parameters = inspect.signature(ckptmove.convert).parameters
    assert set(Remap._fields) <= parameters.keys()
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())
    assert parameters["plain"].annotation == "bool"


def test_the_defaults_of_the_signature_change_nothing(source: Path) -> None:
    import inspect

    from ckptmove.moves import Remap

    parameters = inspect.signature(ckptmove.convert).parameters
    given = {one: parameters[one].default for one in Remap._fields}
    plan = ckptmove.convert(source, to="cpu", dry_run=True).plan
    assert ckptmove.convert(source, to="cpu", dry_run=True, **given).plan == plan


@pytest.mark.parametrize("is_broken", [False, True])
def test_load_without_torch_says_how_to_get_it(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_broken: bool
) -> None:
    if is_broken:
        monkeypatch.delitem(sys.modules, "torch")
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("import libcudart_that_is_not_here")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    # Not its errors: another class of the same name would stay.
    for name in [name for name in sys.modules if name.startswith("ckptmove.proof.loading.") and "err" not in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(TorchBroken if is_broken else PackageMissing) as caught:
        ckptmove.load(source)
    assert isinstance(caught.value, ImportError)
    assert ("python -c" if is_broken else "pip install") in caught.value.hint


def test_a_script_that_verifies_with_its_own_case_when_it_is_imported(source: Path) -> None:
    """The process that imports the case would start another one, without end."""
    script = source.with_name("script.py")
    script.write_text(f"import ckptmove\ndef case(): ...\nckptmove.verify({str(source)!r}, case=case, to='cpu')\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert "CaseUnusable" in ran.stderr
    assert "__main__" in ran.stderr


@pytest.mark.parametrize("path", [b"run.pth", None, ["run.pth"], 3])
def test_what_is_no_path_is_a_usage_error(source: Path, path) -> None:
    calls = [
        ckptmove.inspect, ckptmove.load, ckptmove.undo, lambda one: ckptmove.convert(one, to="cpu"), ckptmove.verify,
        lambda one: ckptmove.diff(source, one),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call(path)
        assert bool(caught.value.hint) == isinstance(path, bytes | list)


def test_an_output_is_a_path(source: Path) -> None:
    with pytest.raises(UsageError):
        ckptmove.convert(source, to="cpu", output=io.BytesIO())
    with pytest.raises(UsageError):
        ckptmove.verify(source, to="cpu", script=b"train.py")


def test_a_dtype_of_torch(source: Path) -> None:
    for dtype in (torch.bfloat16, {"model": torch.bfloat16}):
        result = ckptmove.convert(source, dtype=dtype, dry_run=True)
        assert {edit.cast for edit in result.plan.edits} == {("float32", "bfloat16")}


@pytest.mark.parametrize("options", [{"only": ""}, {"only": []}, {"only": ["model", ""]}, {"drop": ""}])
def test_empty_globs_select_nothing(source: Path, options) -> None:
    with pytest.raises(UsageError):
        ckptmove.convert(source, **options, dry_run=True)
    if "only" in options:
        with pytest.raises(UsageError):
            ckptmove.load(source, "cpu", **options)


def test_keep_is_one_glob_or_several(source: Path) -> None:
    for call in (ckptmove.convert, ckptmove.verify):
        with pytest.raises(UsageError):
            call(source, to="cpu", keep=[""])
    assert ckptmove.convert(source, to="cpu", keep="model.*", dry_run=True).plan.kept


def test_a_glob_is_no_path(source: Path) -> None:
    for call in (ckptmove.inspect, ckptmove.load):
        with pytest.raises(FileNotFoundError) as caught:
            call(source.with_name("*.ptx"))
        assert "one path" in caught.value.hint


def test_an_optimizer_is_a_class_or_its_name() -> None:
    assert [optimizer_name(one) for one in (None, "AdamW", torch.optim.AdamW)] == [None, "AdamW", "AdamW"]
    assert optimizer_name(OrderedDict) == "collections:OrderedDict"

    class Local(torch.optim.SGD):
        """A class that only this function has."""

    for wrong in (functools.partial(torch.optim.AdamW, lr=1), type("Own", (), {"__module__": "__main__"}), Local):
        with pytest.raises(NotAccepted) as caught:
            ckptmove.verify(SAMPLES / "adamw-cuda3.pth", optimizer=wrong)
        assert caught.value.hint


@pytest.mark.parametrize("option", [{"sample": "3"}, {"jobs": 2.0}], ids=str)
def test_an_argument_of_another_type(option) -> None:
    with pytest.raises(NotAccepted) as caught:
        ckptmove.verify(SAMPLES / "adamw-cuda3.pth", **option)
    (name,) = option
    assert name in str(caught.value)
    assert f"{name}=" in caught.value.hint


def test_tensors_of_an_inspection() -> None:
    inspection = ckptmove.inspect(SAMPLES / "adamw-cuda3.pth")
    assert inspection.tensors == inspection.inventory.tensors != ()
