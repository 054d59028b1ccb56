"""``--report html=FILE`` of every command, without a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ckptmove.api.failures import Failure
from ckptmove.cli.render.html.document import HtmlDocument
from ckptmove.cli.render.renderer import Summary, VerifyAnswer
from ckptmove.comparison.differences import Change, Differences, Gap, Uncompared
from ckptmove.model import Finding, Severity
from ckptmove.proof.evidence import NOT_KNOWN, CheckResult, FixedFile, SampleSize, Verdict
from ckptmove.proof.request import VerifyRequest

FINDING = Finding("D102", "optimizer-device", Severity.ERROR, "a message", ("a.b",), "ckptmove convert x --to cpu")


class Page(HTMLParser):
    """The texts of a page, and the texts and attributes of its elements by their tags."""

    def __init__(self, source):
        super().__init__()
        self.open, self.texts, self.elements = [], [], []
        self.feed(source)
        self.close()
        self.data = [
            json.loads(text) for tag, attributes, text in self.elements if "type" in attributes and tag == "script"
        ]

    def handle_starttag(self, tag, attrs):
        self.open.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def handle_endtag(self, tag):
        while True:
            found = self.open.pop()
            self.elements.append(found)
            if found[0] == tag:
                return

    def classes(self, tag, style):
        found = (own.get("class", "") for name, own, _ in self.elements if name == tag)
        return [one for one in found if style in one.split()]

    def find(self, tag, style=None):
        return [
            text
            for name, own, text in self.elements
            if name == tag and (style is None or style in own.get("class", "").split())
        ]


@pytest.fixture
def report(say, bench):
    def written(*words):
        said = say(*words, "--report", "html=report.html", "-q")
        return said.code, Page((bench / "report.html").read_text(encoding="utf-8"))

    return written


def names(table):
    column = table["columns"][0]
    heads, tails = column["heads"], column["tails"]
    return [heads["words"][h] + tails["words"][t] for h, t in zip(heads["at"], tails["at"], strict=True)]


def test_inspect_shows_what_the_json_document_has(report, ask) -> None:
    code, page = report("inspect", "dragged.pth")
    [checkpoint] = ask("inspect", "dragged.pth")["checkpoints"]
    assert code == 1
    assert page.find("h2") == ["dragged.pth"]
    assert [heading.partition(":")[0] for heading in page.find("h3")] == [
        "Tensors by role and device", "Findings", "Bytes by module", "18 tensors",
    ]  # fmt: skip
    assert "Adam" in page.find("dl", "figures")[0]
    assert {text.split()[1] for text in page.find("h4")} == {one["code"] for one in checkpoint["findings"]}
    assert [fix.removesuffix("Copy") for fix in page.find("div", "fix")][-2:] == [
        one["fix"] for one in checkpoint["findings"]
    ]
    [table] = page.data
    assert names(table) == [one["name"] for one in checkpoint["tensors"]]
    assert [table["rows"], *(column["title"] for column in table["columns"])] == [
        18, "name", "role", "device", "dtype", "shape", "bytes", "findings",
    ]  # fmt: skip
    owners = [names(table)[row] if row >= 0 else None for row in table["owners"]]
    assert owners == [one["parameter"] for one in checkpoint["tensors"]]
    assert any(owners)


def test_the_matrix_counts_tensors_now_and_after_the_conversion(report) -> None:
    _, page = report("inspect", "dragged.pth")
    now, after = page.find("table", "matrix")
    assert now.startswith("Now")
    assert after.startswith("After ckptmove convert dragged.pth --to cuda:0")
    assert now.endswith("model·4optimizer·12rng·2")
    assert after.endswith("model·4optimizer4+48-4rng2+20-2")


def test_a_conversion_that_moves_nothing_has_no_matrix(report) -> None:
    _, page = report("inspect", "run.pth", "--expect", "cuda:3")
    assert len(page.find("table", "matrix")) == 1
    assert "ckptmove convert run.pth --to cuda:3 would move no tensor." in page.find("p", "none")


def test_match_limits_the_table_and_not_the_matrix(report) -> None:
    _, page = report("inspect", "dragged.pth", "--match", "rng*")
    assert names(page.data[0]) == ["rng.torch", "rng.cuda.0"]
    assert page.find("table", "matrix")[0].endswith("model·4optimizer·12rng·2")
    _, page = report("inspect", "dragged.pth", "--match", "none")
    assert not page.data
    assert "Bytes by module" not in page.find("h3")


def test_several_checkpoints_have_an_overview(report) -> None:
    code, page = report("inspect", "run.pth", "dragged.pth", "none.pth")
    assert code == 3
    assert page.find("title") == ["ckptmove inspect 3 checkpoints"]
    assert page.find("a") == ["none.pth", "run.pth", "dragged.pth"]
    assert page.find("h2") == ["Overview", "none.pth", "run.pth", "dragged.pth"]
    [overview] = [own["class"] for tag, own, text in page.elements if tag == "span" and text == "1 error, 1 warning"]
    assert overview == "outcome failed"
    assert [own["class"] for tag, own, text in page.elements if tag == "span" and text == "no such file"] == [
        "outcome failed"
    ]
    ids = [own["id"] for tag, own, _ in page.elements if tag == "section" and "id" in own]
    assert len(ids) == 3
    assert [own["href"] for tag, own, _ in page.elements if tag == "a"] == [f"#{one}" for one in ids]


def test_a_checkpoint_with_an_answer_and_one_without_have_an_overview(report) -> None:
    _, page = report("inspect", "run.pth", "none.pth")
    assert page.find("a") == ["none.pth", "run.pth"]


def test_a_single_error_needs_no_overview(report) -> None:
    _, page = report("inspect", "none.pth")
    assert page.find("h2") == ["none.pth"]


def test_a_warning_has_its_color(entry, page_of, finding) -> None:
    page = Page(page_of(entry(["a"], findings=[finding("O201", "warning", ["a"])])))
    assert page.data[0]["columns"][-1]["grave"] == ["warning"]


def test_a_directory_has_its_files(report, bench) -> None:
    import shutil
    from pathlib import Path

    shutil.copytree(Path(__file__).parents[4] / "sample_ckpts" / "hf-trainer-cuda3", bench / "run")
    _, page = report("inspect", "run")
    assert "optimizer.pt" in page.find("table", "plain")[0]
    assert [text for text in page.find("summary") if re.fullmatch(r"[2-9] files", text)]


def test_an_empty_checkpoint_has_no_tensors(entry, page_of) -> None:
    page = Page(page_of(entry([])))
    assert page.find("p", "none") == ["No tensors.", "No findings."]


def test_a_checkpoint_at_a_url_has_its_requests(entry, page_of) -> None:
    page = Page(page_of(entry(["a"], remote={"requests": 2, "bytes_read": 2**19})))
    assert page.find("dl", "facts")[0].endswith("read512.0 KiB in 2 requests")


def test_named_devices_and_imports_are_listed_up_to_a_number(entry, page_of) -> None:
    mentions = [{"where": f"a.{n}", "kind": "string", "value": "cuda:0"} for n in range(1200)]
    imports = [{"name": "a.B", "weights_only": False, "weights_only_since": None, "verdict": "unknown", "record": None}]
    page = Page(page_of(entry(["a"], mentions=mentions, globals=imports)))
    assert page.find("summary") == ["1,200 named devices", "1 import"]
    assert page.find("p", "note") == ["and 200 more"]


def test_findings_are_in_order_with_their_first_places(entry, page_of, finding) -> None:
    where = [f"a.{n}" for n in range(500)]
    page = Page(page_of(entry(where[:1], findings=[
        finding("R302", "info"), finding("O201", "warning", where), finding("D102", "error", ["a.0"], "fix it"),
        finding("D102", "error", ["a.0", ""]),
    ])))  # fmt: skip
    assert [text.split()[:2] for text in page.find("h4")] == [
        ["error", "D102"], ["error", "D102"], ["warning", "O201"], ["info", "R302"],
    ]  # fmt: skip
    assert page.find("h3")[1] == "Findings: 2 errors, 1 warning, 1 note"
    assert [text.count("a.") for text in page.find("ul", "where")][-2:] == [3, 197]
    assert "497 more" in page.find("summary")
    assert "(root)" in page.find("ul", "where")[1]
    found = page.data[0]["columns"][-1]
    assert [found["words"][number] for number in found["at"]] == ["O201 D102"]
    assert found["grave"] == ["error"]


def test_tied_weights_have_one_area(entry, page_of) -> None:
    tied = entry(["a", "b", "c"])
    for tensor in tied["tensors"][:2]:
        tensor["storage"] = "0"
    tied["tensors"][2]["storage"] = None
    assert Page(page_of(tied)).data[0]["tied"] == [1]


def verified(*results, strict=False):
    document = HtmlDocument()
    for result in results:
        document.verify(VerifyAnswer(VerifyRequest(path=result.path), result, strict))
    return Page(document.document(Summary("verify", 1)))


def test_verify_shows_checks_findings_and_the_verdict() -> None:
    checks = (
        CheckResult("file", "passed", "fine", (("bytes", 12),)),
        CheckResult("step", "failed", "a; b; fix: do it", (("simulated", True),), ("a", "b"), "do it"),
        CheckResult("parity", "skipped", "no step"),
    )
    fixed = FixedFile("train.py", 1, "--- a\n+++ b\n+\t<b>\n", "train.py.bak")
    result = Verdict(
        path="a.pth", target="cuda:0", mode="simulated", passed=False, proven=False, checks=checks, findings=(FINDING,),
        sample=SampleSize(1, 1, 2, 3, 4), fixed=(fixed, fixed._replace(backup=None)), unfixed="still <fails>",
    )  # fmt: skip
    page = verified(result)
    assert page.find("p", "verdict") == ["failed, simulated cuda:0, by a sample: 1 of 2 parameters, 3 of 4 tensors"]
    assert page.find("h4")[:3] == ["file", "step", "parity"]
    marks = [own["aria-label"] for tag, own, _ in page.elements if tag == "span" and "mark" in own.get("class", "")]
    assert marks == ["passed", "failed", "skipped"]
    step = page.find("li", "failed")[0]
    assert step == "✗stepabdo itCopyEvidencefigurevaluesimulatedTrue"
    assert page.find("h3") == [
        "Checks",
        "Findings: 1 error",
        "1 edit of train.py; backup: train.py.bak",
        "1 edit of train.py; not written",
    ]
    assert "+       <b>\n" in page.find("pre")[0]
    assert page.find("p", "note") == ["not fixed: still <fails>"]
    late = verified(replace(result, unfixed=f"{NOT_KNOWN}: the time ran out"))
    assert late.find("p", "note") == [f"{NOT_KNOWN}: the time ran out"]
    assert "3 of 4 tensors" in page.find("dl", "facts")[0]


@pytest.mark.parametrize(
    ("proven", "strict", "status"), [(True, False, "passed"), (False, False, "unproven"), (False, True, "failed")]
)
def test_the_verdict_of_verify_has_three_colors(proven, strict, status) -> None:
    result = Verdict(path="a", target="cpu", mode="cpu", passed=True, proven=proven, checks=(), findings=())
    page = verified(result, result, strict=strict)
    assert len(page.find("p", status)) == 2
    assert len(page.find("span", status)) == 2


def test_diff_has_one_table_of_all_differences() -> None:
    result = Differences(
        first="a", second="b", tensors=3, added=("new",), removed=("old.x",),
        changed=(
            Change("w.1", "value", "[2]", "[2]", Gap(0.5, float("inf"))),
            Change("w.2", "device", "cpu", "cuda:0", None),
        ),
        uncompared=(Uncompared("obj", "a reason"),), notes=("a note",),
    )  # fmt: skip
    document = HtmlDocument()
    document.diff(result)
    page = Page(document.document(Summary("diff", 1)))
    assert page.find("h2") == ["a → b"]
    assert page.find("h3") == ["4 differences"]
    assert page.find("p", "verdict")[0].startswith("they differ: ")
    assert page.find("p", "note") == ["a note"]
    [table] = page.data
    assert names(table) == ["old.x", "new", "w.1", "w.2"]
    what, source, target, gap, relative = table["columns"][1:]
    assert [what["words"][number] for number in what["at"]] == ["removed", "added", "value", "device"]
    assert [source["words"][number] for number in source["at"]] == ["", "", "[2]", "cpu"]
    assert [target["words"][number] for number in target["at"]] == ["", "", "[2]", "cuda:0"]
    assert (gap["values"], relative["values"]) == ([None, None, 0.5, None], [None, None, "inf", None])
    assert page.find("summary") == ["not compared: 1"]


def test_diff_of_equal_checkpoints(report) -> None:
    code, page = report("diff", "run.pth", "run.pth")
    assert code == 0
    assert not page.data
    assert page.find("p", "passed")[0].startswith("the same: ")


def test_columns_without_a_measure_are_left_out(report) -> None:
    _, page = report("diff", "run.pth", "dragged.pth")
    titles = [column["title"] for column in page.data[0]["columns"]]
    assert titles[:4] == ["name", "what", "from", "to"]


def test_convert_shows_the_plan(report) -> None:
    code, page = report("convert", "dragged.pth", "--to", "cuda:0", "--dry-run")
    assert code == 0
    assert "optimizer.state.3.step" in page.find("pre")[0]
    assert page.find("p", "verdict") == ["dragged.pth: nothing was written"]
    assert page.classes("p", "verdict") == ["verdict passed"]
    report("convert", "dragged.pth", "--to", "cpu")
    _, page = report("convert", "dragged.pth", "--to", "cpu", "--skip-existing")
    assert "skipped" in page.find("p", "verdict")[0]
    assert not page.find("pre")


def test_a_conversion_that_strict_stops_is_failed(report) -> None:
    code, page = report("convert", "run.pth", "--to", "cpu", "--keep", "nothing.*", "--strict")
    assert code == 1
    assert page.classes("p", "verdict") == ["verdict failed"]
    assert "--keep nothing.*" in page.find("pre")[0]


def test_an_error_without_a_path_is_named_by_its_kind() -> None:
    failure = Failure(kind="usage", message="<wrong>", hint="", path=None, exit_code=2)
    page = Page(HtmlDocument().document(Summary("inspect", 2, (failure,))))
    assert page.find("h2") == ["usage"]
    assert page.find("section", "failure") == ["usageerror <wrong>"]


def test_another_file_is_not_replaced(say, bench) -> None:
    (bench / "mine.html").write_text("<!doctype html>\n<p>mine")
    assert say("inspect", "run.pth", "--report", "html=mine.html").code == 4
    assert (bench / "mine.html").read_text().endswith("mine")
