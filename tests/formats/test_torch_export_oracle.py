"""Facts and conversions of archives of ``torch.export``; the oracles are ``torch.export.load`` and torch's own pass."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings

import exporting
import pytest
import torch
from open_containers import open_container

import ckptmove
from ckptmove.api.failures import failure_of
from ckptmove.errors import CkptMoveError, UneditableGraph
from ckptmove.limits import Limits
from ckptmove.model import Severity

GPU = "cuda:0"
#: Prints the graph that torch's own pass makes of a program.
TORCHS_OWN = """
import json, sys, warnings
import torch
from torch._export.serde.serialize import serialize
from torch._subclasses import FakeTensorMode
from torch.export.passes import move_to_device_pass

warnings.simplefilter("ignore")
program = torch.export.load(sys.argv[1])
with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
    moved = move_to_device_pass(program, sys.argv[2])
sys.stdout.buffer.write(serialize(moved, serialize_state_dict=False, serialize_constants=False).exported_program)
"""


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_bytes(exporting.net())
    return path


def put(tmp_path, data, name="made.pt2"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def moved(path, to=GPU, **options):
    output = path.parent / f"{path.stem}.out.pt2"
    ckptmove.convert(path, to=to, output=output, force=True, **options)
    return output


def run(path):
    program = exporting.loaded(path)
    return program.module()(*program.example_inputs[0], **program.example_inputs[1])


def graph_of(data):
    return json.loads(exporting.records(data)[exporting.GRAPH])


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
        assert run(moved(moved(path), "cpu"))[1].equal(theirs)

    def test_several_programs_are_named(self, tmp_path):
        from torch.export.pt2_archive._package import load_pt2, package_pt2

        programs = {"one": exporting.loaded(exporting.net()), "two": exporting.loaded(exporting.net())}
        path = tmp_path / "both.pt2"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package_pt2(str(path), exported_programs=programs)
        names = {record.name for record in ckptmove.inspect(path).inventory.tensors}
        assert {f"{program}.state_dict.{key}" for program in programs for key in programs[program].state_dict} <= names
        back = moved(moved(path), "cpu")
        assert back.read_bytes() == path.read_bytes()
        assert load_pt2(str(back)).exported_programs.keys() == programs.keys()

    def test_a_program_without_inputs_or_weights(self, tmp_path):
        class Plain(torch.nn.Module):
            def forward(self, x):
                return x + torch.ones(2, device="cpu")

        path = put(tmp_path, exporting.saved(Plain(), (torch.ones(2),)))
        gpu = moved(path)
        assert {one.value for one in ckptmove.inspect(gpu).inventory.mentions} == {GPU}
        assert moved(gpu, "cpu").read_bytes() == path.read_bytes()
        without = put(tmp_path, exporting.changed(path.read_bytes(), inputs=b""))
        assert exporting.loaded(without).module()(torch.ones(2)).tolist() == [2.0, 2.0]
        assert ckptmove.inspect(without).inventory.tensors == ()


class TestConvert:
    def test_there_and_back_is_the_same_file(self, archive):
        gpu = moved(archive)
        assert gpu.read_bytes() != archive.read_bytes()
        assert moved(gpu, "cpu").read_bytes() == archive.read_bytes()

    def test_what_comes_back_runs_bit_for_bit(self, archive):
        assert torch.equal(run(moved(moved(archive, "mps"), "cpu")), run(archive))

    def test_every_record_but_those_with_devices_is_the_same(self, archive):
        old, new = (exporting.records(path.read_bytes()) for path in (archive, moved(archive)))
        assert list(old) == list(new)
        different = {name for name in old if old[name] != new[name]}
        assert different == {exporting.GRAPH, exporting.WEIGHTS, exporting.CONSTANTS, exporting.INPUTS}

    def test_records_keep_their_alignment(self, archive):
        gpu = moved(archive)
        container = open_container(str(gpu), Limits())
        for storage in ckptmove.inspect(gpu).inventory.storages:
            assert container.storage_span(storage.key).start % (64 if ":" not in storage.key else 1) == 0
        container.source.close()

    def test_the_graph_is_that_of_torchs_own_pass(self, archive):
        """On tensors without storage, as no GPU is here; the pass writes its devices as strings."""
        # In a process of its own: a simulated device of another test stays registered in this one.
        done = subprocess.run([sys.executable, "-c", TORCHS_OWN, str(archive), GPU], capture_output=True, check=True)
        theirs = json.loads(done.stdout)
        ours = graph_of(moved(archive).read_bytes())
        values = theirs["graph_module"]["graph"]["tensor_values"]
        assert {name: one["device"] for name, one in values.items()} == {
            name: one["device"] for name, one in ours["graph_module"]["graph"]["tensor_values"].items()
        }
        named = {"as_device": {"type": "cuda", "index": 0}}
        for one, other in zip(
            theirs["graph_module"]["graph"]["nodes"], ours["graph_module"]["graph"]["nodes"], strict=True
        ):
            for argument in one["inputs"]:
                if argument["arg"] == {"as_string": GPU}:
                    argument["arg"] = named
            assert one == other

    def test_what_torchs_own_pass_has_moved_moves_back(self, tmp_path, archive):
        def as_the_pass(graph):
            for node in graph["graph_module"]["graph"]["nodes"]:
                for argument in node["inputs"]:
                    if "as_device" in argument["arg"]:
                        argument["arg"] = {"as_string": GPU}

        gpu = put(tmp_path, exporting.edited(moved(archive).read_bytes(), exporting.GRAPH, as_the_pass))
        assert torch.equal(run(moved(gpu, "cpu")), run(archive))

    @pytest.mark.parametrize("to", ["cuda:3", "mps", "xpu:1"])
    def test_torchs_schema_reads_every_device(self, archive, to):
        from torch._export.serde import schema
        from torch._export.serde.serialize import _bytes_to_dataclass, deserialize_device

        data = exporting.records(moved(archive, to).read_bytes())[exporting.GRAPH]
        program = _bytes_to_dataclass(schema.ExportedProgram, data)
        devices = {deserialize_device(one.device) for one in program.graph_module.graph.tensor_values.values()}
        assert devices == {torch.device(to if to != "mps" else "mps:0")}
        again = ckptmove.convert(archive.parent / "net.out.pt2", to=to, dry_run=True)
        assert again.plan.is_empty

    def test_in_place_and_back(self, archive):
        before = archive.read_bytes()
        ckptmove.convert(archive, to=GPU, in_place=True)
        assert {record.device for record in ckptmove.inspect(archive).inventory.tensors} == {GPU}
        ckptmove.convert(archive, to="cuda:1", in_place=True)
        kept = [fact.kind for fact in ckptmove.inspect(archive, check=True).inventory.facts]
        assert kept == ["kept-for-undo"]
        ckptmove.undo(archive)
        assert archive.read_bytes() == before
        ckptmove.convert(archive, to=GPU, in_place=True)
        ckptmove.convert(archive, to="cpu", in_place=True)
        assert torch.equal(run(archive), run(before))

    def test_a_map_and_a_dry_run(self, archive):
        gpu = moved(archive)
        result = ckptmove.convert(gpu, to=None, map_location={GPU: "cuda:1"}, dry_run=True)
        assert {edit.target for edit in result.plan.edits} == {"cuda:1"}
        assert {flag.where for flag in result.plan.flags} == {"graph.values.0", "graph.arguments.0"}

    def test_a_deflated_archive(self, tmp_path, archive):
        found = exporting.records(archive.read_bytes())
        packed = put(tmp_path, exporting.archive_of(found, compression=8))
        assert torch.equal(run(moved(moved(packed), "cpu")), run(archive))
        assert exporting.records(moved(packed).read_bytes()) == exporting.records(moved(archive).read_bytes())

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
        assert torch.equal(run(moved(moved(old), "cpu")), run(archive))
        assert ckptmove.verify(old, to="cpu").passed


class Autocast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.l(x)


class TestRefusals:
    def test_a_region_of_autocast(self, tmp_path):
        path = put(tmp_path, exporting.saved(Autocast(), (torch.ones(2, 4),)))
        for dry_run in (True, False):
            with pytest.raises(UneditableGraph, match="autocast"):
                ckptmove.convert(path, to=GPU, dry_run=dry_run)

    def test_an_operator_of_one_kind_of_device(self, tmp_path, archive):
        def bind(graph):
            graph["graph_module"]["graph"]["nodes"][0]["target"] = (
                "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
            )

        path = put(tmp_path, exporting.edited(archive.read_bytes(), exporting.GRAPH, bind))
        with pytest.raises(UneditableGraph, match="flash_attention_for_cpu"):
            ckptmove.convert(path, to=GPU)
        gpu = put(tmp_path, exporting.edited(moved(archive).read_bytes(), exporting.GRAPH, bind))
        assert ckptmove.convert(gpu, to="cuda:1").output  # of the same kind

    def test_a_weight_that_stays_behind(self, archive):
        with pytest.raises(UneditableGraph, match=r"lin\.weight"):
            ckptmove.convert(archive, to=GPU, keep=["state_dict.lin.weight"])

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
        on_gpu = exporting.records(moved(archive).read_bytes())
        path = put(tmp_path, exporting.archive_of(found | {record: on_gpu[record]}))
        findings = [one for one in ckptmove.inspect(path).findings if one.code == "D104"]
        (error,) = [one for one in findings if one.severity is Severity.ERROR]
        assert {"lin.weight", "big"} <= set(error.where)
        result = ckptmove.verify(path, to="cpu" if record == exporting.GRAPH else GPU)
        placement = next(check for check in result.checks if check.name == "placement")
        assert (result.passed, placement.status) == (False, "failed")
        home = error.fix.rpartition(" ")[2]
        mended = moved(path, home)
        assert not [one for one in ckptmove.inspect(mended).findings if one.severity is Severity.ERROR]


class TestVerify:
    @pytest.mark.parametrize("to", ["cpu", GPU])
    def test_it_is_compared_with_torchs_readers(self, archive, to):
        result = ckptmove.verify(archive if to == "cpu" else moved(archive), to=to)
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
        assert ckptmove.verify(moved(archive), to=GPU, against=archive).passed
        assert ckptmove.diff(archive, archive).same
        assert not ckptmove.diff(archive, moved(archive)).same


def test_another_graph_is_another_file(tmp_path, archive):
    def rename(graph):
        graph["graph_module"]["graph"]["nodes"][0]["name"] = "renamed"

    assert not ckptmove.diff(archive, put(tmp_path, exporting.edited(exporting.net(), exporting.GRAPH, rename))).same


def test_a_name_of_another_suffix_changes_nothing(tmp_path, archive):
    path = shutil.copy(archive, tmp_path / "net.bin")
    assert ckptmove.inspect(path).inventory.container == "torch-export"
    assert ckptmove.convert(archive, to=GPU).output == str(tmp_path / "net.cuda0.pt2")
