"""The options of ``convert`` that change keys, parts, dtypes or formats: plans, files, reports and refusals."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

from ckptmove.api import functions as api
from ckptmove.cli.render.conversion import plan_lines
from ckptmove.cli.render.text import Page

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


@pytest.fixture(autouse=True)
def files(bench, data_parallel_on_cpu):  # noqa: F811  # the fixture
    """More files: a compiled model, a saved view, a directory, pickled objects, and a safetensors file."""
    for sample, name in {
        "nanogpt-compiled-fused.pt": "compiled.pt",
        "saved-view.pt": "view.pt",
        "zipped-again.pth": "deflated.pt",
        "weights.safetensors": "w.safetensors",
        "script-code-cuda0.pt": "script.pt",
    }.items():
        shutil.copy(SAMPLES / sample, bench / name)
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", bench / "hf")
    model = {"net.a": torch.ones(2), "net.b": torch.ones(3), "c": torch.ones(1)}
    torch.save({"model": model, "args": argparse.Namespace(lr=0.1)}, bench / "plain.pt")
    torch.save(torch.nn.DataParallel(torch.nn.Linear(2, 1)), bench / "module.pt")
    torch.save({"model": {"a": torch.tensor([1e30, 2.0])}}, bench / "large.pt")
    return bench


def listing(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def keys(path, *inside):
    found = torch.load(path, weights_only=True, map_location="cpu")
    for key in inside:
        found = found[key]
    return list(found)


def renamed(document):
    return {one["from"]: one["to"] for one in document["plan"]["renamed"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("compiled.pt", "--strip-prefix"), {"_orig_mod.lm_head.weight": "lm_head.weight"}),
        (("--strip-prefix", "compiled.pt"), {"_orig_mod.lm_head.weight": "lm_head.weight"}),
        (("compiled.pt", "--strip-prefix", "_orig_mod."), {"_orig_mod.lm_head.weight": "lm_head.weight"}),
        (("compiled.pt", "--strip-prefix=_orig_mod"), {"_orig_mod.lm_head.weight": "lm_head.weight"}),
        (("run.pth", "--add-prefix", "module."), {"0.weight": "module.0.weight"}),
        (("run.pth", "--rename", "0.*=stem.*"), {"0.weight": "stem.weight", "0.bias": "stem.bias"}),
        (("run.pth", "--rename", "0.weight=w", "--rename", "0.bias=b"), {"0.weight": "w", "0.bias": "b"}),
    ],
)
def test_keys_are_renamed(ask, words, expected) -> None:
    plan = ask("convert", *words, "-o", "out.pt", "--dry-run")
    document = ask("convert", *words, "-o", "out.pt")
    assert document["plan"] == plan["plan"]
    assert expected.items() <= renamed(document).items()
    assert set(renamed(document).values()) <= set(keys("out.pt", "model"))


@pytest.mark.parametrize(
    ("words", "left", "reason"),
    [
        (("--only", "model"), ["model"], "only"),
        (("--only", "model.0.*"), ["model"], "only"),
        (("--drop", "optimizer"), ["epoch", "model", "scheduler"], "drop"),
        (("--drop", "optimizer", "--drop", "epoch"), ["model", "scheduler"], "drop"),
        (("--as-root", "model"), ["0.weight", "0.bias", "2.weight", "2.bias"], "as-root"),
    ],
)
def test_parts_are_removed(ask, words, left, reason) -> None:
    document = ask("convert", "run.pth", *words, "-o", "out.pth")
    assert {one["reason"] for one in document["plan"]["dropped"]} == {reason}
    assert sorted(keys("out.pth")) == sorted(left)
    assert document["bytes_copied"] < Path("run.pth").stat().st_size


def test_storages_are_trimmed(ask, say) -> None:
    assert (
        "\ntrim 1 storage to the bytes that tensors reach: " in say("convert", "view.pt", "--compact", "--dry-run").out
    )
    document = ask("convert", "view.pt", "--compact", "-o", "out.pt")
    [trimmed] = document["plan"]["trimmed"]
    assert Path("view.pt").stat().st_size - Path("out.pt").stat().st_size >= trimmed["from"] - trimmed["to"] > 0


def test_deflated_storages_are_inflated(say, ask) -> None:
    out = say("convert", "deflated.pt", "--compact", "-o", "out.pt").out
    assert "\ninflate 16 storages\n" in out
    assert "nothing to change" not in out
    assert not [one for one in ask("inspect", "out.pt")["checkpoints"][0]["findings"] if one["code"] == "F803"]


def test_objects_are_replaced(say, ask) -> None:
    document = ask("convert", "plain.pt", "--plain", "-o", "out.pt")
    assert document["plan"]["replaced"] == [{"where": "args", "from": "argparse.Namespace", "to": "dict"}]
    assert keys("out.pt", "args") == ["lr"]
    assert "\nreplace argparse.Namespace by dict: args\n" in say("convert", "plain.pt", "--plain", "--dry-run").out
    assert "state_dict: the root\n" in say("convert", "module.pt", "--plain", "--dry-run").out


def test_dtypes_are_cast(say, ask) -> None:
    document = ask("convert", "run.pth", "--dtype", "bf16", "--dtype", "optimizer=fp64", "-o", "out.pth")
    assert {edit["cast"]["to"] for edit in document["plan"]["edits"]} == {"bfloat16", "float64"}
    assert torch.load("out.pth", map_location="cpu")["model"]["0.weight"].dtype == torch.bfloat16
    said = say("convert", "large.pt", "--dtype", "fp16", "-o", "out.pt")
    assert "1 value was too large" in said.out
    assert "\ndtype  " in said.out


@pytest.mark.parametrize(
    ("words", "container", "load"),
    [
        (("run.pth", "--as-root", "model", "-o", "x.safetensors"), "safetensors", safetensors.load_file),
        (("w.safetensors", "-o", "x.pth"), "torch-zip", keys),
        (("hf", "--only", "model", "-o", "x.pth"), "torch-zip", keys),
    ],
)
def test_the_suffix_names_the_format(say, ask, words, container, load) -> None:
    document = ask("convert", *words, "--dry-run")
    assert (document["format"], document["output"]) == (container, None)
    assert not Path(words[-1]).exists()
    assert ask("convert", *words)["format"] == container
    assert load(words[-1])
    assert "\nwrite as " in say("convert", *words, "--force").out


def test_shards(ask, say) -> None:
    words = ("convert", "run.pth", "--as-root", "model", "--shard-size", "0.2KB")
    assert ask(*words)["output"] == "run.new"
    index = json.loads(Path("run.new/model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values(), "model.safetensors.index.json"} == {*listing(Path("run.new"))}
    assert ask(*words, "--output-dir", "out")["output"] == str(Path("out/run"))
    assert "\nwrite as safetensors\n" in say(*words, "-o", "other").out


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".zip"])
def test_shards_are_no_file(ask, bench, suffix) -> None:
    before = listing(bench)
    error = ask("convert", "w.safetensors", "--shard-size", "1MB", "-o", f"x{suffix}")["error"]
    assert (error["kind"], error["exit_code"]) == ("output-suffix", 4)
    assert error["hint"].endswith("--output x")
    assert listing(bench) == before


def test_several_checkpoints(say, ask, bench) -> None:
    words = ("convert", "run.pth", "dragged.pth", "--to", "cpu", "--output-dir", "new/out")
    document = ask(*words, "--dry-run")
    assert [one["path"] for one in document["conversions"]] == ["run.pth", "dragged.pth"]
    assert not (bench / "new").exists()
    assert say(*words, "-q", "--dry-run").out.splitlines()[-1] == "2 of 2 planned, nothing written"
    assert say(*words, "-q").out.splitlines()[-1] == "2 of 2 converted"
    assert listing(bench / "new") == ["out", "out/dragged.pth", "out/run.pth"]
    (bench / "new/out/run.pth").unlink()
    assert ask(*words)["exit_code"] == 4
    (bench / "new/out/run.pth").unlink()
    said = say(*words, "--skip-existing")
    assert said.code == 0
    assert f"dragged.pth: skipped, {Path('new/out/dragged.pth')} exists\n" in said.out
    assert said.out.endswith("\n1 of 2 converted, 1 skipped\n")


def test_an_option_without_a_match_in_one_of_them(say, ask, bench) -> None:
    document = ask("convert", "run.pth", "compiled.pt", "--strip-prefix", "--output-dir", "out")
    assert document["exit_code"] == 2
    assert [(error["kind"], error["path"]) for error in document["errors"]] == [("no-match", "run.pth")]
    assert listing(bench / "out") == ["compiled.pt"]
    said = say("convert", "run.pth", "compiled.pt", "--strip-prefix", "--output-dir", "out", "--force", "-q")
    assert said.out.splitlines()[0] == "run.pth: refused"
    assert said.out.splitlines()[-1] == "1 of 2 converted"


def test_outputs_that_exist_are_skipped_in_every_report(check) -> None:
    api.convert("run.pth", to="cpu")
    line = "run.pth: skipped, run.cpu.pth exists"
    check(
        "convert", "run.pth", "--to", "cpu", "--skip-existing",
        code=0,
        human=f"{line}\n",
        quiet=f"{line}\n",
        github=f"::notice file=run.pth,title=convert::{line}\n",
        document={"output": None, "notes": ["skipped: run.cpu.pth exists"]},
    )  # fmt: skip


def test_earlier_outputs_are_no_sources(ask, bench) -> None:
    for _ in range(2):
        document = ask("convert", "*.pth", "--to", "cpu", "--force")
        assert [one["path"] for one in document["conversions"]] == ["dragged.pth", "run.pth"]
    assert not list(bench.glob("*.cpu.cpu.pth"))


def test_two_sources_of_one_output(ask, bench) -> None:
    (bench / "other").mkdir()
    shutil.copy("run.pth", "other/run.pth")
    error = ask("convert", "run.pth", "other/run.pth", "--to", "cpu", "--output-dir", "out")["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert not (bench / "out").exists()


@pytest.mark.parametrize("paths", [("run.pth",), ("run.pth", "dragged.pth")])
def test_the_folder_of_the_sources(ask, bench, paths) -> None:
    before = listing(bench)
    document = ask("convert", *paths, "--to", "cpu", "--output-dir", ".")
    assert [error["kind"] for error in document["errors"]] == ["output-is-source"] * len(paths)
    assert listing(bench) == before


@pytest.mark.parametrize(
    ("words", "kind", "code", "hint"),
    [
        ("run.pth --rename 0.weight=2.weight", "keys-collide", 4, "--rename"),
        ("run.pth --rename 0.*=x", "usage", 2, ""),
        ("run.pth --rename 0.*", "usage", 2, ""),
        ("run.pth --rename 0.*=.*", "usage", 2, ""),
        ("run.pth --rename 7.*=x.*", "no-match", 2, "0."),
        ("plain.pt --strip-prefix net.", "partial-prefix", 4, "--rename 'net.*=*'"),
        ("run.pth --strip-prefix", "no-match", 2, "0., 2."),
        ("run.pth --strip-prefix x.", "no-match", 2, "0., 2."),
        ("module.pt --strip-prefix", "no-match", 2, "--plain"),
        ("run.pth --only ema", "no-match", 2, "model"),
        ("run.pth --only modl", "no-match", 2, "model"),
        ("run.pth --only model --drop *", "nothing-left", 4, "--only"),
        ("run.pth --drop model.0.weight", "needed-by-optimizer", 4, "--drop optimizer"),
        ("run.pth --drop optimizer.state", "needed-by-optimizer", 4, "--drop optimizer"),
        ("module.pt --drop module.weight", "inside-object", 4, "--plain"),
        ("run.pth --as-root ema", "no-match", 2, "model"),
        ("run.pth --dtype int8", "usage", 2, ""),
        ("run.pth --dtype bf17", "usage", 2, ""),
        ("run.pth --dtype weights=bf16", "usage", 2, ""),
        ("run.pth --shard-size 5 -o out", "usage", 2, ""),
        ("run.pth --shard-size 5GB -o out", "not-in-format", 4, "--as-root model"),
        ("run.pth -o out.safetensors", "not-in-format", 4, "--as-root model"),
        ("run.pth --drop model --drop scheduler -o out.safetensors", "not-in-format", 4, "--"),
        ("run.pth --as-root model -o out.gguf", "output-suffix", 4, "--output out.pth"),
        ("script.pt --dtype bf16", "not-remappable", 4, "save it again"),
        ("run.pth --dtype bf16 --in-place", "in-place-impossible", 4, ": ckptmove convert run.pth --dtype bf16"),
        (
            "run.pth --drop optimizer --in-place",
            "in-place-impossible",
            4,
            ": ckptmove convert run.pth --drop optimizer",
        ),
        ("run.pth", "usage", 2, ""),
        ("run.pth -o copy.pth", "usage", 2, ""),
        ("run.pth other.pth --dtype bf16", "usage", 2, "convert run.pth --output=other.pth --dtype bf16"),
        ("run.pth dragged.pth cpu", "usage", 2, "convert run.pth dragged.pth --to=cpu"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=" ".join)
def test_bad_input_writes_nothing(say, ask, bench, words, kind, code, hint, more) -> None:
    command = ["convert", *words.split(), *more]
    before = listing(bench)
    error = ask(*command)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert hint in error["hint"]
    said = say(*command)
    assert (said.code, said.out) == (code, "")
    assert [line.partition(": ")[0] for line in said.err.splitlines()] == ["error", "hint"][: 2 if error["hint"] else 1]
    assert listing(bench) == before


@pytest.mark.parametrize("words", ["run.pth --drop *", "run.pth", "run.pth dragged.pth --only ema", "run.pth --to gpu"])
def test_an_error_leaves_no_new_folder(ask, bench, words) -> None:
    before = listing(bench)
    assert ask("convert", *words.split(), "--output-dir", "out")["exit_code"] in {2, 4}
    assert listing(bench) == before
    (bench / "out").touch()
    error = ask("convert", "run.pth", "--to", "cpu", "--output-dir", "out")["error"]
    assert (error["kind"], error["exit_code"]) == ("write-failed", 5)


def test_a_value_typed_with_a_space_is_named(ask) -> None:
    error = ask("convert", "run.pth", "MB", "--dtype", "bf16", "-o", "out.pth")["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert "'MB'" in error["message"]


def test_one_checkpoint_is_undone_at_a_time(ask) -> None:
    error = ask("convert", "run.pth", "dragged.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)


def test_keys_change_in_place(ask, bench) -> None:
    before = (bench / "compiled.pt").read_bytes()
    assert ask("convert", "compiled.pt", "--strip-prefix", "--in-place")["in_place"]
    assert not any(key.startswith("_orig_mod.") for key in keys("compiled.pt", "model"))
    assert ask("convert", "compiled.pt", "--undo")["error"]["kind"] == "restores-more"  # other keys than the file's
    assert ask("convert", "compiled.pt", "--undo", "--force")["ok"]
    assert (bench / "compiled.pt").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        "--strip-prefix", "--strip-prefix a.", "--add-prefix a.", "--rename a=b", "--only model", "--drop optimizer",
        "--as-root model", "--compact", "--plain", "--dtype bf16", "--shard-size 1GB", "--output-dir a",
        "--skip-existing", "--strict",
    ],
)  # fmt: skip
def test_undo_takes_no_other_option(ask, words) -> None:
    assert ask("convert", "run.pth", "--undo", *words.split())["error"]["kind"] == "usage"


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "words",
    [
        "compiled.pt --strip-prefix",
        "compiled.pt --strip-prefix=_orig_mod --dtype bf16",
        "plain.pt --plain --compact",
        "run.pth --dtype optimizer=fp64",
        "run.pth --to mps --keep model.* --add-prefix a.",
    ],
)
def test_the_next_command_proves_it(say, simulates, words) -> None:
    following = say("convert", *words.split()).next
    source = words.split()[0]
    assert following[0] == "verify"
    assert following[following.index("--against") + 1] == source
    assert say(*following).code == 0


@pytest.mark.parametrize(
    "words", ["--only model", "--drop scheduler", "--rename 0.*=a.*", "--as-root model", "--verify"]
)
def test_what_has_no_counterpart_is_verified_alone(say, words) -> None:
    following = say("convert", "run.pth", "--dtype", "bf16", *words.split()).next
    assert following[0] == "verify"
    assert "--against" not in following


def test_what_was_left_out_is_the_reason(say, simulates) -> None:
    assert say("convert", "run.pth", "--drop", "optimizer", "-o", "weights.pth").code == 0
    said = say("verify", "weights.pth", "--against", "run.pth")
    assert said.code == 0
    assert "not proven to resume: left out: optimizer" in said.out


def test_a_changed_value_is_no_proof(say, ask) -> None:
    following = say("convert", "compiled.pt", "--strip-prefix").next
    found = torch.load(following[1], map_location="cpu", weights_only=True)
    found["model"]["lm_head.weight"][0, 0] += 1
    torch.save(found, following[1])
    [result] = ask(*following)["results"]
    restore = next(check for check in result["checks"] if check["name"] == "restore")
    assert (restore["status"], result["proven"]) == ("failed", False)
    assert "model.lm_head.weight: other bits" in restore["detail"]


@pytest.mark.parametrize("words", ["", "-v", "-q", "--format github"])
def test_reports(say, monkeypatch, words) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    command = "convert hf --add-prefix a. --drop optimizer.pt --dtype bf16 --dry-run"
    said = say(*command.split(), *words.split())
    assert said.code == 0
    assert "\x1b" not in said.out
    assert ("\nrename 4 keys of " in said.out) == (words in {"", "-v"})


def test_long_lists_are_shortened(say) -> None:
    torch.save({"a": torch.ones(1)} | {f"k{index}": index for index in range(6)}, "many.pt")
    words = ("convert", "many.pt", "--only", "a", "--dry-run")
    assert say(*words).out.count("\ndrop ") == 3
    assert "\n  and 3 more (-v shows them)\n" in say(*words).out
    assert say(*words, "-v").out.count("\ndrop ") == 6


@pytest.mark.parametrize("width", [80, 200])
def test_lines_fit_the_terminal(width) -> None:
    plan = api.convert("run.pth", add_prefix="long." * 50, drop="scheduler", dtype="bf16", dry_run=True).plan
    lines = list(plan_lines(Page(columns=width), plan, verbose=False))
    assert max(map(len, lines)) <= width
    assert "drop scheduler (drop)" in lines
    assert "rename 4 keys of model" in lines


def test_files_of_a_directory_are_named_by_their_paths(ask, bench) -> None:
    error = ask("convert", "hf", "-o", "x.safetensors")["error"]
    assert error["hint"].endswith(" -o x.safetensors --json --as-root pytorch_model.bin")
    assert ask("convert", "hf", "-o", "x.safetensors", "--as-root", "pytorch_model.bin")["ok"]
    safetensors.save_file({"a": torch.ones(1)}, bench / "hf/model-00001-of-00002.safetensors")
    safetensors.save_file({"b": torch.ones(1)}, bench / "hf/model-00002-of-00002.safetensors")
    (bench / "hf/pytorch_model.bin").unlink()
    hint = ask("convert", "hf", "-o", "y.safetensors")["error"]["hint"]
    assert hint.endswith(" --only 'model-*'")
    assert ask("convert", "hf", "-o", "y.safetensors", "--only", "model-*")["ok"]
    assert set(safetensors.load_file("y.safetensors")) == {"a", "b"}


@pytest.mark.parametrize(
    "words",
    [("convert", "--only", ""), ("convert", "--drop="), ("convert", "--to", "cpu", "--keep", ""),
     ("inspect", "--match", ""), ("verify", "--to", "cpu", "--keep", "")],
)  # fmt: skip
def test_an_empty_glob_is_a_usage_error(ckptmove, words):
    command, *options = words
    code, _, _ = ckptmove(command, "plain.pt", *options)
    assert code == 2
