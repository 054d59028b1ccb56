"""``diff`` in all four renderings, also with many differences."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import ckptmove
from ckptmove.cli.render.difference import difference_lines
from ckptmove.cli.render.text import Page


@pytest.fixture
def pair(bench):
    def save(first, second):
        torch.save(first, "a.pt")
        torch.save(second, "b.pt")

    return save


def test_a_file_and_its_copy(check) -> None:
    check(
        "diff", "run.pth", "run.pth",
        code=0,
        human="run.pth -> run.pth\n\nthe same: 16 tensors bit for bit, all stored devices, and everything else\n",
        quiet="run.pth -> run.pth: the same: 16 tensors bit for bit, all stored devices, and everything else\n",
        github=(
            "::notice file=run.pth,title=diff::run.pth -> run.pth: "
            "the same: 16 tensors bit for bit, all stored devices, and everything else\n"
        ),
        document={"command": "diff", "ok": True, "same": True, "added": [], "removed": [], "changed": []},
    )  # fmt: skip


def test_a_file_and_what_it_was_converted_to(say, check) -> None:
    say("convert", "run.pth", "--to", "cpu", "-o", "cpu.pth")
    answer = "they differ: device 12; all values are equal bit for bit"
    annotations = say("diff", "run.pth", "cpu.pth", "--format", "github").out
    check(
        "diff", "run.pth", "cpu.pth",
        code=1,
        human=(
            "run.pth -> cpu.pth\n"
            "\n"
            "what    from    to   count  names\n"
            "device  cuda:3  cpu     12  model.0.weight, …\n"
            "\n"
            f"{answer}\n"
        ),
        quiet=f"run.pth -> cpu.pth: {answer}\n",
        github=annotations,
        document={"command": "diff", "ok": False, "exit_code": 1, "same": False, "uncompared": []},
    )  # fmt: skip
    said = annotations.splitlines()
    assert said[0] == "::warning file=cpu.pth,title=diff device::model.0.weight: cuda:3 -> cpu"
    assert f"::error file=cpu.pth,title=diff::run.pth -> cpu.pth: {answer}" in said
    assert len([line for line in said if line.startswith("::warning ")]) == 10


def test_values_are_measured_largest_first(say, ask, pair) -> None:
    pair({"a": torch.ones(2), "b": torch.ones(2), "epoch": 1}, {"a": torch.full((2,), 2.0), "b": torch.full((2,), 4.0)})
    head, empty, columns, *lines = say("diff", "a.pt", "b.pt").out.splitlines()
    assert (head, empty, columns.split()[:5]) == ("a.pt -> b.pt", "", ["what", "from", "to", "max", "abs"])
    assert lines == [
        "object  1     absent                        1  epoch",
        "value   [2]                 3     0.75      1  b",
        "value   [2]                 1      0.5      1  a",
        "",
        "they differ: value 2, object 1",
    ]
    document = ask("diff", "a.pt", "b.pt")
    assert document["changed"][0] == {
        "name": "a", "what": "value", "from": "[2]", "to": "[2]", "max_abs": 1.0, "max_rel": 0.5, "lone_nan": None,
    }  # fmt: skip


def test_values_whose_names_differ_in_an_index_share_a_row(say, pair) -> None:
    pair(*({f"layers.{n}": torch.full((2 + n // 2,), float(by * n)) for n in range(3)} for by in (1, 3)))
    rows = [line.split() for line in say("diff", "a.pt", "b.pt").out.splitlines() if line.startswith("value")]
    assert rows == [["value", "4", "0.667", "2", "layers.*"]]
    assert len(say("diff", "a.pt", "b.pt", "-v").out.splitlines()) == 7


def test_an_annotation_says_how_far_values_lie_apart(say, pair) -> None:
    pair({"a": torch.ones(2)}, {"a": torch.full((2,), 4.0)})
    first = say("diff", "a.pt", "b.pt", "--format", "github").out.splitlines()[0]
    assert first.startswith("::warning file=b.pt,title=diff value::a: ")
    assert re.findall(r"[\d.]+\d|\d", first.rpartition("::")[2]) == ["3", "0.75"]


def test_many_that_were_not_compared_are_counted(say, pair) -> None:
    pair(*({f"w{n}": torch.ones(*shape).expand(3, 4) for n in range(25)} for shape in ((1, 4), (3, 1))))
    assert "not compared: 5 more (-v shows them)" in say("diff", "a.pt", "b.pt").out.splitlines()


def test_infinity_is_a_word_in_json(ask, pair) -> None:
    pair({"a": torch.zeros(1)}, {"a": torch.full((1,), float("inf"))})
    document = ask("diff", "a.pt", "b.pt")
    assert document["changed"][0]["max_abs"] == "inf"


def test_nan_on_one_side_is_counted_in_words(say, ask, pair) -> None:
    pair({"a": torch.ones(2, 3), "b": torch.ones(2)}, {"a": torch.ones(2, 3), "b": torch.full((2,), 3.0)})
    value = torch.load("b.pt")
    value["a"][0] = torch.tensor([1, float("nan"), 2])
    torch.save(value, "b.pt")
    assert say("diff", "a.pt", "b.pt").out.splitlines()[3:5] == [
        "value  [2, 3]  NaN only here: 1 of 6        1      0.5      1  a",
        "value  [2]                                  2    0.667      1  b",
    ]
    row = say("diff", "b.pt", "a.pt").out.splitlines()[3]
    assert re.search(r"value  \[2, 3\], .*: 1 of 6 +1 +0.5 +1  a$", row)
    said = say("diff", "b.pt", "a.pt", "--format", "github").out.splitlines()[0]
    assert re.search(r"a: NaN .* b.pt: 1 of 6; .* 1 \(relative 0.5\)$", said)
    changed = ask("diff", "a.pt", "b.pt")["changed"][0]
    assert (changed["max_abs"], changed["max_rel"]) == ("inf", "inf")
    assert changed["lone_nan"] == {"from": 0, "to": 1, "elements": 6, "max_abs": 1.0, "max_rel": 0.5}
    torch.save({**value, "a": torch.full((2, 3), float("nan"))}, "b.pt")
    said = say("diff", "a.pt", "b.pt", "--format", "github").out.splitlines()[0]
    assert re.search(r"a: NaN .* b.pt: 6 of 6$", said)


def test_many_differences_are_counted(say, pair) -> None:
    pair({f"a{n}": torch.ones(1) for n in range(30)}, {f"b{n}": torch.ones(1) for n in range(30)})
    lines = say("diff", "a.pt", "b.pt").out.splitlines()
    assert "only in a.pt: 10 more (-v shows them)" in lines
    assert "only in b.pt: b19" in lines
    assert "only in b.pt: b20" not in lines
    assert "only in b.pt: b29" in say("diff", "a.pt", "b.pt", "-v").out.splitlines()
    assert lines[-1].endswith(": added 30, removed 30")
    pair({f"a{n:02}": torch.ones(1) for n in range(50)}, {f"a{n:02}": torch.zeros(1) for n in range(50)})
    lines = say("diff", "a.pt", "b.pt").out.splitlines()
    assert "and 10 more (-v shows them)" in lines
    assert len(say("diff", "a.pt", "b.pt", "-v").out.splitlines()) == len(lines) + 9


def test_what_was_not_compared_is_said(say, ask, pair) -> None:
    pair({"w": torch.ones(1, 4).expand(3, 4)}, {"w": torch.ones(3, 1).expand(3, 4)})
    lines = say("diff", "a.pt", "b.pt").out.splitlines()
    assert any(line.startswith("not compared: w: ") for line in lines)
    assert lines[-1].endswith(": object 1, not compared 1")
    document = ask("diff", "a.pt", "b.pt")
    assert document["exit_code"] == 1
    assert [one["name"] for one in document["uncompared"]] == ["w"]
    assert "::warning file=b.pt,title=diff uncompared::w: " in say("diff", "a.pt", "b.pt", "--format", "github").out
    pair({"w": torch.ones(1), "old": torch.ones(1)}, {"w": torch.ones(1), "new": torch.ones(1)})
    lines = say("diff", "a.pt", "b.pt", "--format", "github").out.splitlines()
    assert {"::warning file=b.pt,title=diff added::new", "::warning file=b.pt,title=diff removed::old"} < {*lines}


def test_what_could_not_be_compared_is_no_difference(say, pair) -> None:
    pair({"w": torch.ones(2)}, {})
    with zipfile.ZipFile("a.pt") as source, zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    said = say("diff", "packed.pt", "packed.pt")
    assert said.code == 1
    assert said.out.splitlines()[-1].startswith("no difference found")
    assert "1 tensor" in said.out.splitlines()[-1]


def test_errors_leave_the_answer_open(ask) -> None:
    document = ask("diff", "run.pth", "none.pth")
    assert document["exit_code"] == 3
    assert document["same"] is None
    assert document["error"]["path"] == "none.pth"


@pytest.fixture
def runs(bench):
    """Two directories, one with its model in two files and other words, and the tar of the first."""
    for name, shards, words in (("one", 1, "a"), ("other", 2, "b")):
        folder = bench / name
        folder.mkdir()
        (folder / "vocab.txt").write_text(words)
        torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, folder / "optimizer.pt")
        for shard in range(shards):
            weights = {f"w{place}": torch.ones(3) for place in range(4) if place % shards == shard}
            torch.save(weights, folder / f"model-{shard + 1:05}-of-{shards:05}.bin")
    with tarfile.open(bench / "one.tar", "w") as archive:
        archive.add(bench / "one", "one")
    return bench


def test_a_directory_and_its_archive(check, runs) -> None:
    answer = "the same: 5 tensors bit for bit, all stored devices, and everything else"
    check(
        "diff", "one", "one.tar",
        code=0,
        human=f"one -> one.tar\n\n{answer}\n",
        quiet=f"one -> one.tar: {answer}\n",
        github=f"::notice file=one.tar,title=diff::one -> one.tar: {answer}\n",
        document={"ok": True, "same": True, "changed": [], "uncompared": [], "notes": []},
    )  # fmt: skip


def test_directories_with_other_shards(say, check, runs) -> None:
    note = (
        "tensors matched by name, because their files differ: model-00001-of-00001.bin of one, and "
        "model-00001-of-00002.bin, model-00002-of-00002.bin of other"
    )
    answer = "they differ: object 1; all values are equal bit for bit"
    said = say("diff", "one", "other").out.splitlines()
    human = [
        "one -> other",
        "",
        "what    from                 to                   count  names",
        "object  sha256 ca978112ca1b  sha256 3e23e8160039      1  vocab.txt",
        f"note: {note}",
        "",
        answer,
    ]
    assert said == human
    check(
        "diff", "one", "other",
        code=1,
        human="\n".join(human) + "\n",
        quiet=f"one -> other: {answer}\n",
        github=(
            "::warning file=other,title=diff object::vocab.txt: sha256 ca978112ca1b -> sha256 3e23e8160039\n"
            f"::notice file=other,title=diff note::{note}\n"
            f"::error file=other,title=diff::one -> other: {answer}\n"
        ),
        document={"same": False, "added": [], "removed": [], "notes": [note]},
    )  # fmt: skip
    result = ckptmove.diff("one", "other")
    for columns in (80, 200):
        lines = list(difference_lines(Page(columns=columns), result, verbose=False))
        assert max(map(len, lines)) <= columns
        assert "".join(lines).count("model-00002-of-00002.bin") == 1


def test_what_was_left_out_is_said_beside_the_answer(say, runs) -> None:
    said = say("diff", "other/model-00001-of-00002.bin", "other")
    assert said.code == 1
    torch.save({"w0": torch.ones(3), "w2": torch.ones(3)}, "half.pt")
    shutil.rmtree("one")
    shutil.copytree("other", "one", ignore=shutil.ignore_patterns("optimizer.pt", "model-00002*"))
    said = say("diff", "half.pt", "one")
    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("the same: 2 tensors ")
    assert any(line.startswith("note: vocab.txt of one: ") for line in said.out.splitlines())


def test_exit_codes_of_directories(say, ask, runs) -> None:
    (runs / "other" / "model-00002-of-00002.bin").write_bytes(b"")
    document = ask("diff", "one", "other")
    assert (document["exit_code"], document["error"]["path"]) == (3, "other/model-00002-of-00002.bin")
    (runs / "empty").mkdir()
    said = say("diff", "one", "empty")
    assert (said.code, said.out) == (3, "")
    assert "verify" not in said.err
    deep = runs / "deep"
    for _ in range(70):
        deep /= "d"
    deep.mkdir(parents=True)
    assert ask("diff", "one", "deep")["exit_code"] == 4


def test_two_files_are_needed(say) -> None:
    said = say("diff", "run.pth")
    assert said.code == 2
    assert "B" in said.err


def test_no_device_is_said_to_be_the_same_where_none_is_stored(say) -> None:
    path = str(Path(__file__).parents[2] / "sample_ckpts" / "weights.safetensors")
    answer = "the same: 4 tensors bit for bit, all stored devices, and everything else"
    assert say("diff", path, path).out.splitlines()[-1] == answer


def test_a_table_stands_apart_from_the_names_above_it(say, pair) -> None:
    pair({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2)})
    lines = say("diff", "a.pt", "b.pt").out.splitlines()
    assert lines[2:4] == ["only in a.pt: b", ""]
    assert lines[4].startswith("what ")
