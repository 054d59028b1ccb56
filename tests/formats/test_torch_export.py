"""Archives of ``torch.export`` that torch does not write: other forms, damage, and names that a load would call."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile

import exporting
import pytest
import torch

import ckptmove
from ckptmove.api.failures import failure_of
from ckptmove.errors import CkptMoveError, DamagedArchive, LimitExceeded, UnsupportedContainer
from ckptmove.formats import export_json
from ckptmove.formats.export_code import called_names
from ckptmove.formats.export_json import ExportJson, JsonBudget
from ckptmove.limits import Limits

GRAPH, WEIGHTS, CONSTANTS, INPUTS = exporting.GRAPH, exporting.WEIGHTS, exporting.CONSTANTS, exporting.INPUTS


@pytest.fixture
def put(tmp_path):
    def put(data, name="made.pt2"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return put


def edited(name, change):
    return exporting.edited(exporting.net(), name, change)


def with_row(change, record=WEIGHTS, name="lin.weight"):
    return edited(record, lambda config: change(config["config"][name]))


def metadata(**new):
    return with_row(lambda row: row["tensor_meta"].update(new))


def codes(path):
    return {finding.code for finding in ckptmove.inspect(path).findings}


def odd_record():
    found = exporting.records(exporting.net())
    return exporting.archive_of(found | {"data/weights/weight_1": found["data/weights/weight_1"] + b"x"})


def object_program(path="opaque_obj_0", data=None):
    """A program with an object among its constants, that nothing in its graph uses."""
    row = {"path_name": path, "is_param": False, "use_pickle": True, "tensor_meta": None}
    changed = edited(CONSTANTS, lambda config: config["config"].update(thing=row))
    data = pickle.dumps({"plain": 1}) if data is None else data
    return exporting.archive_of(exporting.records(changed) | {f"data/constants/{path}": data})


def without_object():
    found = exporting.records(object_program())
    del found["data/constants/opaque_obj_0"]
    return exporting.archive_of(found)


def pickled_program(names=("lin.weight",), value=None):
    """A program with weights that are saved by pickle."""
    stream = io.BytesIO()
    torch.save(torch.nn.Parameter(torch.ones(4, 3)) if value is None else value, stream)

    def change(config):
        for name in names:
            config["config"][name].update(use_pickle=True, path_name="weight_90")

    return exporting.archive_of(
        exporting.records(edited(WEIGHTS, change)) | {"data/weights/weight_90": stream.getvalue()}
    )


def two_names_for_one_pickle():
    return pickled_program(("lin.weight", "lin.bias"))


class TestOtherForms:
    @pytest.mark.parametrize(
        ("records", "found"),
        [
            ({"m/data/aotinductor/model/a.so": b"", "m/archive_format": b"pt2"}, "AOTInductor"),
            ({"data/aotinductor/model/a.so": b"", "version": b"0"}, "AOTInductor"),
            ({"serialized_exported_program.json": b"{}", "version": b"8.8"}, "2.7 or older"),
            ({"m/archive_format": b"pt2", "m/archive_version": b"1"}, "version '1'"),
            ({"m/archive_format": b"pt3", "m/archive_version": b"0"}, "version '0'"),
            ({"m/archive_format": b"pt2", "m/archive_version": b"0", "m/extra/a": b""}, "without a program"),
        ],
    )
    def test_they_are_refused_by_name(self, put, records, found):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data)
        for command in (ckptmove.inspect, lambda path: ckptmove.convert(path, to="cuda:0")):
            with pytest.raises(UnsupportedContainer, match=found) as caught:
                command(put(stream.getvalue()))
            assert (caught.value.container, failure_of(caught.value).exit_code) == ("torch-export", 3)

    def test_the_form_of_torch_2_4(self, put):
        program = exporting.loaded(exporting.net())
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("serialized_exported_program.json", exporting.records(exporting.net())[GRAPH])
            for name, value in (
                ("state_dict", program.state_dict), ("constants", program.constants),
                ("example_inputs", program.example_inputs),
            ):  # fmt: skip
                inner = io.BytesIO()
                torch.save(value, inner)
                archive.writestr(f"serialized_{name}.pt", inner.getvalue())
            archive.writestr("version", "8.8")
        exporting.loaded(stream.getvalue())  # torch still reads it
        with pytest.raises(UnsupportedContainer, match=r"serialized_exported_program\.json"):
            ckptmove.inspect(put(stream.getvalue()))

    def test_another_schema(self, put):
        data = edited(GRAPH, lambda graph: graph["schema_version"].update(major=9))
        with pytest.raises(Exception, match="deserializing"):
            exporting.loaded(data)
        with pytest.raises(UnsupportedContainer, match="schema 9"):
            ckptmove.inspect(put(data))

    @pytest.mark.parametrize("new", [{"layout": 1}, {"dtype": 99}, {"dtype": None}])
    def test_a_weight_that_is_not_plain(self, put, new):
        with pytest.raises(UnsupportedContainer):
            ckptmove.inspect(put(metadata(**new)))

    def test_what_stands_before_the_first_record(self, put):
        with pytest.raises(DamagedArchive, match="4 unexpected bytes"):
            ckptmove.inspect(put(b"PK\x03\x04" + exporting.net()))


class TestDamage:
    @pytest.mark.parametrize(
        "data",
        [
            lambda: exporting.changed(exporting.net(), graph=b"{"),
            lambda: exporting.changed(exporting.net(), graph=b"\xff"),
            lambda: exporting.changed(exporting.net(), graph=b"[]"),
            lambda: exporting.changed(exporting.net(), graph=b"[NaN]"),
            lambda: exporting.changed(exporting.net(), graph=b"[" * 100_000),
            lambda: exporting.changed(exporting.net(), graph=b'{"a": 1, "a": 2}'),
            lambda: exporting.changed(exporting.net(), weights=b"{}"),
            lambda: exporting.changed(exporting.net(), weights=None),
            lambda: exporting.changed(exporting.net(), inputs=None),
            lambda: exporting.changed(exporting.net(), inputs=b"nothing of torch"),
            lambda: with_row(lambda row: row.update(path_name="model_weights_config.json")),
            lambda: with_row(lambda row: row.update(path_name="../weights/weight_0")),
            lambda: with_row(lambda row: row.update(path_name=7)),
            lambda: with_row(lambda row: row.update(use_pickle=True)),
            lambda: with_row(lambda row: row.update(tensor_meta=None)),
            lambda: with_row(lambda row: row.pop("is_param")),
            lambda: metadata(device="cpu"),
            lambda: metadata(device={"type": "cpu", "index": -1}),
            lambda: metadata(device={"type": "CPU", "index": None}),
            lambda: metadata(sizes=[{"as_int": -1}, {"as_int": 3}]),
            lambda: metadata(sizes=[{"as_int": 2**70}, {"as_int": 3}]),
            lambda: metadata(sizes=[{"as_int": 2**62}, {"as_int": 3}]),
            lambda: metadata(storage_offset={"as_int": 2**62}),
            lambda: metadata(sizes=[{"as_int": True}, {"as_int": 3}]),
            lambda: metadata(sizes=[{"as_expr": {"expr_str": "s0"}}, {"as_int": 3}]),
            lambda: metadata(sizes=[{"as_int": 3}]),
            odd_record,
            lambda: edited(GRAPH, lambda graph: graph.pop("graph_module")),
            lambda: edited(GRAPH, lambda graph: graph["graph_module"]["graph"].update(tensor_values=[])),
            two_names_for_one_pickle,
            lambda: exporting.archive_of(exporting.records(object_program()) | {"data/constants/opaque_obj_0": b"x"}),
            without_object,
        ],
    )
    def test_it_is_an_error_and_no_bug(self, put, data):
        for command in (
            ckptmove.inspect,
            lambda path: ckptmove.convert(path, to="cuda:0"),
            lambda path: ckptmove.verify(path, to="cpu"),
        ):
            with pytest.raises(CkptMoveError) as caught:
                command(put(data()))
            assert failure_of(caught.value).exit_code == 3

    def test_a_lost_record(self, put):
        found = exporting.records(exporting.net())
        del found["data/weights/weight_1"]
        path = put(exporting.archive_of(found))
        assert "F802" in codes(path)
        assert not ckptmove.verify(path, to="cpu").passed

    def test_a_record_shorter_than_its_tensor(self, put):
        assert "F802" in codes(put(metadata(sizes=[{"as_int": 400}, {"as_int": 3}])))

    def test_a_record_of_no_weight(self, put):
        path = put(exporting.archive_of(exporting.records(exporting.net()) | {"data/weights/weight_99": bytes(4096)}))
        assert "F804" in codes(path)

    def test_an_empty_record(self, put):
        data = exporting.archive_of(exporting.records(exporting.net()) | {"data/weights/weight_1": b""})
        assert "F802" in codes(put(data))

    @pytest.mark.parametrize("what", ["bytes", "values"])
    def test_json_that_is_too_large(self, put, monkeypatch, what):
        monkeypatch.setattr(export_json, f"_MOST_{what.upper()}", 10)
        with pytest.raises(LimitExceeded, match=what):
            ckptmove.inspect(put(exporting.net()))
        assert ckptmove.inspect(put(exporting.net()), limits=Limits(factor=10_000)).inventory.tensors

    def test_many_records_count_together(self, put):
        """A megabyte that inflates to a gigabyte of JSON, in a hundred programs."""
        bomb = b"[" + b"0," * (1 << 20) + b"0]"
        form = {"archive_format": b"pt2", "archive_version": b"0"}
        names = {f"models/{place}.json": b'{"schema_version": {"major": 8}}' for place in range(3)}
        path = put(exporting.archive_of(form | dict.fromkeys(names, bomb), compression=zipfile.ZIP_DEFLATED))
        with pytest.raises(CkptMoveError) as caught:
            ckptmove.inspect(path)
        assert failure_of(caught.value).exit_code in {3, 4}

    def test_a_packed_pickle_counts(self, put, monkeypatch):
        data = exporting.archive_of(exporting.records(pickled_program()), compression=zipfile.ZIP_DEFLATED)
        found = exporting.records(data)
        held = sum(len(one) for name, one in found.items() if name.endswith(".json"))
        monkeypatch.setattr(export_json, "_MOST_BYTES", held + 1)
        with pytest.raises(LimitExceeded, match="pickles"):
            ckptmove.inspect(put(data))


class TestPickles:
    def test_a_pickled_weight_is_read(self, put):
        path = put(pickled_program())
        theirs = exporting.loaded(path).state_dict["lin.weight"]
        (record,) = [one for one in ckptmove.inspect(path).inventory.tensors if one.name == "state_dict.lin.weight"]
        assert (record.kind, record.shape, record.device) == ("parameter", tuple(theirs.shape), "cpu")
        assert ckptmove.verify(path, to="cpu").passed

    def test_a_class_that_weights_only_refuses(self, put):
        path = put(pickled_program(value=Harmless()))
        assert codes(path) >= {"S701"}
        (finding,) = [one for one in ckptmove.inspect(path).findings if one.code == "S701"]
        assert finding.fix == ""
        result = ckptmove.verify(path, to="cpu")
        assert next(check.status for check in result.checks if check.name == "restore") == "skipped"

    @pytest.mark.parametrize("place", ["weight", "inputs", "opaque"])
    def test_a_payload_is_found(self, put, place):
        if place == "weight":
            data = pickled_program(value=Payload())
        elif place == "inputs":
            stream = io.BytesIO()
            torch.save(((Payload(),), {}), stream)
            data = exporting.changed(exporting.net(), inputs=stream.getvalue())
        else:
            data = object_program(data=pickle.dumps(Payload()))
        path = put(data)
        assert {"S701", "S702"} <= codes(path)
        assert not ckptmove.verify(path, to="cpu").passed

    @pytest.mark.parametrize("path", ["opaque_obj_0", "custom_obj_0"])
    def test_an_object_is_compared(self, put, path):
        made = put(object_program(path))
        assert "S702" not in codes(made)
        other = put(object_program(path, pickle.dumps({"plain": 2})), "other.pt2")
        assert not ckptmove.diff(made, other).same

    def test_a_call_in_sample_inputs_is_no_place_of_ours(self, put):
        stream = io.BytesIO()
        torch.save(((torch.ones(2), torch.device("cuda", 1)), {}), stream)
        path = put(exporting.changed(exporting.net(), inputs=stream.getvalue()))
        assert ("example_inputs.0.1", "cuda:1") in {
            (one.where, one.value) for one in ckptmove.inspect(path).inventory.mentions
        }


class Harmless:
    """Nothing that a list knows."""


class Payload:
    def __reduce__(self):
        return os.system, ("true",)


class TestNames:
    """Text that ``sympy.sympify``, the guards and the targets of nodes would execute."""

    def test_torch_evaluates_the_size_of_a_value(self, put, tmp_path):
        """The oracle: torch executes the text when it loads the file."""
        trace = tmp_path / "ran"

        def spoil(graph):
            values = graph["graph_module"]["graph"]["tensor_values"]
            text = f"__import__('pathlib').Path({str(trace)!r}).touch() or 2"
            values["x"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}

        path = put(edited(GRAPH, spoil))
        with contextlib.suppress(Exception):  # torch may refuse it afterwards
            exporting.loaded(path)
        assert trace.exists()
        trace.unlink()
        assert "S702" in codes(path)
        assert not ckptmove.verify(path, to="cpu").passed
        assert not trace.exists()

    def test_a_target_that_is_no_operator(self, put):
        def spoil(graph):
            graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.os.system"

        path = put(edited(GRAPH, spoil))
        with pytest.raises(Exception, match="system"):  # it was found
            exporting.loaded(path)
        assert "S702" in codes(path)

    def test_a_guard_that_is_more_than_a_guard(self, put):
        path = put(edited(GRAPH, lambda graph: graph.update(guards_code=["eval('1')"])))
        assert "S702" in codes(path)

    def test_dynamic_shapes_are_harmless(self, put):
        class Dynamic(torch.nn.Module):
            def forward(self, x, y):
                z = torch.cat([x, y]).reshape(-1, 2)
                return z[: z.shape[0] // 2] * x.shape[0] + int(x.shape[0] * 1.5)

        shapes = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
        data = exporting.saved(Dynamic(), (torch.ones(8, 3), torch.ones(16, 3)), dynamic_shapes=shapes)
        path = put(data)
        assert b"expr_str" in exporting.records(data)[GRAPH]
        assert ckptmove.inspect(path).findings == ()

    @pytest.mark.parametrize(
        "text",
        [
            "s0", "2*s77 + 1", "Max(1, s0)", "((s0//2))", "FloorDiv(s0, 2)", "s0**2 < 4", "floor(s0/2)", "Eq(u0, 1)",
            "L['x'].size()[0] <= 64", "L['args'][0].size(1) == 2", "len(L['x']) == 2", "math.isnan(L['x'])", "True",
            "isinstance(L['x'], int)", "math.trunc(1.5*torch.sym_float(s0)) == 12", "L['x'].a.stride()[0] == 1",
        ],
    )  # fmt: skip
    def test_calculations_call_nothing(self, text):
        assert called_names([text], [text], []) == ()

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("__import__('os').system('true')", "builtins.__import__"),
            ("().__class__", "builtins.eval"),
            ("(lambda: 1)()", "builtins.eval"),
            ("[x for x in y]", "builtins.eval"),
            ("f'{x}'", "builtins.eval"),
            ("torch.os.system('x')", "torch.os.system"),
            ("open('x')", "builtins.open"),
            ("L['x'].evil()", "builtins.eval"),
            ("a +", "builtins.eval"),
            ("(" * 5000, "builtins.eval"),
            ("1 + " * 5000 + "1", "builtins.eval"),
            ("\0", "builtins.eval"),
            ("size()", "builtins.size"),
        ],
    )
    def test_more_than_that_is_named(self, text, name):
        assert name in called_names([text], [], [])

    @pytest.mark.parametrize(
        ("target", "names"),
        [
            ("torch.ops.aten.add.Tensor", ()),
            ("torch.ops.aten.__and__.Tensor", ()),
            ("torch.ops.higher_order.cond", ()),
            ("_operator.getitem", ()),
            ("math.floor", ()),
            ("torch.sym_max", ()),
            ("torch._sym_sqrt", ()),
            ("#anything.else", ()),
            ("torch.ops.load_library", ("torch.ops.load_library",)),
            ("torch.ops.__loader__.load", ("torch.ops.__loader__.load",)),
            ("_operator.methodcaller", ("operator.methodcaller",)),
            ("math.__loader__.x", ("math.__loader__.x",)),
            ("torchx.os.system", ("torch.os.system",)),
        ],
    )
    def test_targets(self, target, names):
        assert called_names([], [], [target]) == names


class TestText:
    @pytest.mark.parametrize(
        ("text", "tag"),
        [
            (b'[{"type": "cpu", "index": null}]', "cpu"),
            (b'[{"index":1,"type":"cuda"}]', "cuda:1"),
            (b'[{ "type" :"mps" , "index":0 } ]', "mps"),
            (b'[{"as_string": "cuda:0"}]', "cuda:0"),
        ],
    )
    def test_a_device_in_each_writing(self, text, tag):
        record = ExportJson("a.json", text, "f", JsonBudget("f", 1))
        assert [one.tag for one in record.devices] == [tag]
        assert record.without_devices().replace(b" ", b"") == b"[]"

    def test_what_reads_alike_in_a_string_is_no_device(self):
        texts = ['{"type": "cpu", "index": null}', '{"as_string": "cpu"}', "cpu"]
        text = json.dumps([*texts, {"type": "cpu", "index": "0"}, {"as_string": "no"}, {"type": "cpu", "index": None}])
        record = ExportJson("a.json", text.encode(), "f", JsonBudget("f", 1))
        assert [one.tag for one in record.devices] == ["cpu"]

    def test_without_devices_is_the_same_for_all(self):
        one = ExportJson(
            "a", b'[{"type": "cpu", "index": null}, {"as_string": "cpu"}, {"as_string": "no"}]', "f", JsonBudget("f", 1)
        )
        two = ExportJson(
            "a",
            b'[{"type": "cuda", "index": 0}, {"as_string": "cuda:0"}, {"as_string": "no"}]',
            "f",
            JsonBudget("f", 1),
        )
        assert one.without_devices() == two.without_devices()
        assert b"no" in one.without_devices()


def test_what_the_findings_say_of_a_compressed_archive(put):
    path = put(exporting.archive_of(exporting.records(exporting.net()), compression=zipfile.ZIP_DEFLATED))
    (finding,) = [one for one in ckptmove.inspect(path).findings if one.code == "F803"]
    assert (finding.severity.value, "torch.export.load" in finding.message) == ("info", True)
