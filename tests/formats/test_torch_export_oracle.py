"""Facts about archives of ``torch.export``; the oracle is ``torch.export.load``."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import exporting
import pytest
import torch
from torch.export.passes import move_to_device_pass
from typer.testing import CliRunner

import ckptmove
from ckptmove.api.failures import failure_of
from ckptmove.cli.app import app
from ckptmove.errors import CkptMoveError
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.model import Severity

GPU = "cuda:0"


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_bytes(exporting.net())
    return path


def put(tmp_path, data, name="made.pt2"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def on_gpu(path):
    """The archive of the same program on a GPU."""
    found = exporting.records(path.read_bytes())
    for name in (exporting.GRAPH, exporting.WEIGHTS, exporting.CONSTANTS):
        found[name] = found[name].replace(b'{"type": "cpu", "index": null}', b'{"type": "cuda", "index": 0}')
    inputs = put(path.parent, found[exporting.INPUTS], "inputs.pt")
    ckptmove.convert(inputs, to=GPU, in_place=True)
    found[exporting.INPUTS] = inputs.read_bytes()
    inputs.unlink()
    return put(path.parent, exporting.archive_of(found), f"{path.stem}.gpu.pt2")


def run(path):
    program = exporting.loaded(path)
    return program.module()(*program.example_inputs[0], **program.example_inputs[1])


def storage_names(tensors):
    """Names by the storage that they share."""
    shared = {}
    for name, tensor in tensors.items():
        shared.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(names) for names in shared.values()}


class TestInspect:
    def test_every_tensor_is_as_torch_loads_it(self, archive):
        program = exporting.loaded(archive)
        inventory = ckptmove.inspect(archive).inventory
        records = {record.name: record for record in inventory.tensors}
        expected = {f"state_dict.{name}": value for name, value in program.state_dict.items()}
        expected |= {f"constants.{name}": value for name, value in program.constants.items()}
        expected |= {"example_inputs.0.0": program.example_inputs[0][0]}
        expected |= {"example_inputs.1.scale": program.example_inputs[1]["scale"]}
        assert records.keys() == expected.keys()
        for name, tensor in expected.items():
            record = records[name]
            assert (record.shape, record.stride) == (tuple(tensor.shape), tensor.stride())
            assert (record.dtype, record.device) == (str(tensor.dtype).removeprefix("torch."), str(tensor.device))
            assert (record.storage_offset, record.requires_grad) == (tensor.storage_offset(), tensor.requires_grad)
            assert (record.kind == "parameter") is isinstance(tensor, torch.nn.Parameter)
            assert (record.role == "model") is name.startswith("state_dict.")
        weights = {name: value for name, value in expected.items() if name.startswith("state_dict.")}
        by_storage = {}
        for name in weights:
            by_storage.setdefault(records[name].storage, set()).add(name)
        assert {frozenset(names) for names in by_storage.values()} == storage_names(weights)

    def test_the_file_is_sound(self, archive):
        result = ckptmove.inspect(archive, check=True)
        assert (result.inventory.container, result.inventory.layout) == ("torch-export", "plain")
        assert result.inventory.torch_version == torch.__version__
        assert result.findings == ()
        assert result.inventory.globals == () or all(one.weights_only for one in result.inventory.globals)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.float64])
    def test_dtypes(self, tmp_path, dtype):
        module = torch.nn.Module()
        module.register_buffer("one", torch.zeros(6, dtype=dtype))
        module.forward = lambda x: (x + 1, module.one.clone())
        path = put(tmp_path, exporting.saved(module, (torch.ones(1),)))
        (record,) = [one for one in ckptmove.inspect(path).inventory.tensors if one.role == "model"]
        theirs = exporting.loaded(path).state_dict["one"]
        assert (record.dtype, record.shape) == (str(theirs.dtype).removeprefix("torch."), (6,))

    def test_several_programs_are_named(self, tmp_path):
        from torch.export.pt2_archive._package import package_pt2

        programs = {"one": exporting.loaded(exporting.net()), "two": exporting.loaded(exporting.net())}
        path = tmp_path / "both.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package_pt2(str(path), exported_programs=programs)
        names = {record.name for record in ckptmove.inspect(path).inventory.tensors}
        assert {f"{program}.state_dict.{key}" for program in programs for key in programs[program].state_dict} <= names

    @pytest.mark.parametrize("argument", ["device", "device_type"])
    def test_a_text_is_a_device_in_an_argument_of_that_name(self, tmp_path, archive, argument):
        """As torch's pass writes a device, and as torch.autocast writes its type."""

        def name_it(graph):
            text = {"name": argument, "arg": {"as_string": "cuda:7"}, "kind": 2}
            graph["graph_module"]["graph"]["nodes"][0]["inputs"].append(text)

        path = put(tmp_path, exporting.edited(archive.read_bytes(), exporting.GRAPH, name_it))
        values = {one.value for one in ckptmove.inspect(path).inventory.mentions}
        assert values == ({"cpu", "cuda:7"} if argument == "device" else {"cpu"})

    def test_a_program_without_inputs_or_weights(self, tmp_path):
        class Plain(torch.nn.Module):
            def forward(self, x):
                return x + torch.ones(2, device="cpu")

        path = put(tmp_path, exporting.saved(Plain(), (torch.ones(2),)))
        assert {one.value for one in ckptmove.inspect(on_gpu(path)).inventory.mentions} == {GPU}
        without = put(tmp_path, exporting.changed(path.read_bytes(), inputs=b""))
        assert exporting.loaded(without).module()(torch.ones(2)).tolist() == [2.0, 2.0]
        assert ckptmove.inspect(without).inventory.tensors == ()


class TestConvert:
    @pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"in_place": True}, {"keep": ["state_dict.*"]}])
    @pytest.mark.parametrize("to", [GPU, "mps"])
    def test_every_change_is_refused_and_names_what_torch_has(self, archive, to, options):
        before = archive.read_bytes()
        for path in (archive,) if "in_place" in options else (archive, archive.parent):
            with pytest.raises(ReadOnlyFormat) as caught:
                ckptmove.convert(path, to=to, **options)
            assert (caught.value.path, caught.value.container) == (str(archive), "torch-export")
            assert "torch.export.passes.move_to_device_pass" in caught.value.hint
            assert failure_of(caught.value).exit_code == 4
        assert archive.read_bytes() == before
        assert [*archive.parent.iterdir()] == [archive]

    @pytest.mark.parametrize("words", [[], ["--expect", GPU]])
    def test_no_command_that_would_be_refused_is_shown(self, archive, words):
        shown = CliRunner().invoke(app, ["inspect", str(archive), *words])
        assert shown.exit_code == bool(words)
        assert "ckptmove convert" not in shown.output

    def test_torchs_pass_moves_a_program(self, archive):
        moved = move_to_device_pass(exporting.loaded(archive), "meta")
        assert {str(one.device) for one in moved.state_dict.values()} == {"meta"}

    def test_where_nothing_changes_it_is_copied(self, archive):
        gpu = on_gpu(archive)
        for path, options in ((archive, {"to": "cpu"}), (gpu, {"map_location": {"cuda:1": "cpu"}})):
            made = ckptmove.convert(path, output=str(archive.parent / "copy.pt2"), force=True, **options)
            assert made.plan.is_empty
            assert (archive.parent / "copy.pt2").read_bytes() == path.read_bytes()
        assert ckptmove.convert(gpu, to=GPU, in_place=True).plan.is_empty

    def test_a_deflated_archive_is_copied_with_its_weights_inflated(self, tmp_path, archive):
        packed = put(tmp_path, exporting.archive_of(exporting.records(archive.read_bytes()), compression=8))
        output = ckptmove.convert(packed, to="cpu").output
        assert torch.equal(run(output), run(archive))
        assert exporting.records(Path(output).read_bytes()) == exporting.records(archive.read_bytes())

    def test_weights_that_were_pickled_at_once(self, tmp_path, archive):
        """As torch 2.8 wrote them, and every newer one reads them."""
        import io

        program = exporting.loaded(archive)
        found = exporting.records(archive.read_bytes())
        for folder, value in (("weights", program.state_dict), ("constants", program.constants)):
            stream = io.BytesIO()
            torch.save(dict(value), stream)
            found = {name: data for name, data in found.items() if not name.startswith(f"data/{folder}/")}
            found[f"data/{folder}/model.pt"] = stream.getvalue()
        old = put(tmp_path, exporting.archive_of(found))
        names = {record.name for record in ckptmove.inspect(old).inventory.tensors}
        assert names == {record.name for record in ckptmove.inspect(archive).inventory.tensors}
        assert ckptmove.verify(old, to="cpu").passed


class TestRefusals:
    def test_a_dtype_that_the_target_lacks(self, tmp_path):
        path = put(tmp_path, exporting.saved(Double(), (torch.ones(2),)))
        for cast in (True, False):
            with pytest.raises(CkptMoveError) as caught:
                ckptmove.convert(path, to="mps", cast=cast)
            assert failure_of(caught.value).exit_code == 4


class Double(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return x + self.w


class TestDisagreement:
    @pytest.mark.parametrize("record", [exporting.GRAPH, exporting.WEIGHTS])
    def test_a_graph_and_weights_on_two_devices(self, tmp_path, archive, record):
        found = exporting.records(archive.read_bytes())
        other = exporting.records(on_gpu(archive).read_bytes())
        path = put(tmp_path, exporting.archive_of(found | {record: other[record]}))
        findings = [one for one in ckptmove.inspect(path).findings if one.code == "D104"]
        (error,) = [one for one in findings if one.severity is Severity.ERROR]
        assert {"lin.weight", "big"} <= set(error.where)
        result = ckptmove.verify(path, to="cpu" if record == exporting.GRAPH else GPU)
        placement = next(check for check in result.checks if check.name == "placement")
        assert (result.passed, placement.status) == (False, "failed")
        assert "move_to_device_pass" in error.fix


class TestVerify:
    @pytest.mark.parametrize("to", ["cpu", GPU])
    def test_it_is_compared_with_torchs_readers(self, archive, to):
        result = ckptmove.verify(archive if to == "cpu" else on_gpu(archive), to=to)
        checks = {check.name: check.status for check in result.checks}
        assert (checks["file"], checks["restore"], checks["placement"]) == ("passed", "passed", "passed")
        assert (result.passed, result.proven) == (True, False)
        restore = next(check for check in result.checks if check.name == "restore")
        assert dict(restore.evidence)["compared"] == len(ckptmove.inspect(archive).inventory.tensors)

    def test_other_bits_are_found(self, tmp_path, archive):
        data = bytearray(archive.read_bytes())
        at = data.index(torch.arange(12.0).numpy().tobytes())
        data[at] ^= 1
        result = ckptmove.verify(put(tmp_path, bytes(data)), to="cpu")
        assert not result.passed

    def test_against_its_original(self, archive):
        assert ckptmove.verify(on_gpu(archive), to=GPU, against=archive).passed
        assert ckptmove.diff(archive, archive).same
        assert not ckptmove.diff(archive, on_gpu(archive)).same


def test_another_graph_is_another_file(tmp_path, archive):
    def rename(graph):
        graph["graph_module"]["graph"]["nodes"][0]["name"] = "renamed"

    assert not ckptmove.diff(archive, put(tmp_path, exporting.edited(exporting.net(), exporting.GRAPH, rename))).same


def test_a_name_of_another_suffix_changes_nothing(tmp_path, archive):
    path = shutil.copy(archive, tmp_path / "net.bin")
    assert ckptmove.inspect(path).inventory.container == "torch-export"
