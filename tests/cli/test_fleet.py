"""Many checkpoints in a bucket or below a folder: ``inspect 'runs/**' --format jsonl``. ``make fleet`` takes 200."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
from http_server import serving

from ckptmove.cli.config import Config
from ckptmove.cli.paths import find_targets
from ckptmove.cli.seen import Seen
from ckptmove.errors import UsageError

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
NUMBER = 200 if os.environ.get("FLEET") == "all" else 20
WITH_ERRORS = ("map-location-dragged-all.pth", "zipped-again.pth")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with checkpoints of one file and of several, and with other files."""
    import torch
    import torch.distributed.checkpoint as dcp

    root = tmp_path_factory.mktemp("fleet") / "runs"
    samples = [path for path in sorted(SAMPLES.glob("*.pth")) if path.name != "truncated.pth"]
    for number in range(NUMBER - 2):
        folder = root / f"exp{number}"
        folder.mkdir(parents=True)
        shutil.copy(samples[number % len(samples)], folder / "last.pth")
        (folder / "log.txt").write_text("loss 1\n")
        (folder / "config.json").write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(9.0), "b": {"c": 3}}, checkpoint_id=str(root / "dcp/step-3"), no_dist=True)
    (root / "hf").mkdir()
    torch.save({"w": torch.ones(2)}, root / "hf" / "rng_state.pth")
    shutil.copy(SAMPLES / "adamw-cuda3.pth", root / "hf" / "optimizer.pt")
    (root / "hf" / "trainer_state.json").write_text('{"global_step": 7}')
    (root / "data.bin").write_bytes(b"GIF89a" + bytes(range(200)))  # not a checkpoint, despite its suffix
    return root


@pytest.fixture
def bucket(moto, sent, runs):
    """The same in a bucket."""
    for path in runs.rglob("*"):
        if path.is_file():
            moto.put_object(Bucket="bucket", Key=f"runs/{path.relative_to(runs).as_posix()}", Body=path.read_bytes())
    sent.clear()
    yield moto
    for one in moto.list_objects_v2(Bucket="bucket")["Contents"]:
        moto.delete_object(Bucket="bucket", Key=one["Key"])


@pytest.fixture
def lines(say, validator):
    """Run ``inspect --format jsonl``; return its lines, each validated by the schema."""

    def lines(*words):
        said = say("inspect", *words, "--format", "jsonl")
        found = [json.loads(line) for line in said.out.splitlines()]
        for one in found:
            kind = "error_line" if "kind" in one else "checkpoint"
            validator.evolve(schema={"$ref": f"#/$defs/{kind}", "$defs": validator.schema["$defs"]}).validate(one)
        return said, found

    return lines


def same(line):
    """A line without paths."""
    return json.dumps({key: line[key] for key in line if key not in {"path", "version", "remote", "findings"}})


@pytest.mark.parametrize("jobs", [(), ("--jobs", "4")], ids=["default", "4"])
def test_a_folder_has_a_line_for_each_checkpoint(lines, runs, jobs) -> None:
    said, found = lines(f"{runs}/**", *jobs)
    assert f" of {NUMBER} fine\n" in said.err  # as without --format
    paths = [str(Path(line["path"]).relative_to(runs)) for line in found]
    assert sorted(paths) == sorted(["dcp/step-3", "hf", *(f"exp{number}/last.pth" for number in range(NUMBER - 2))])
    by_path = dict(zip(paths, found, strict=True))
    assert (by_path["hf"]["layout"], by_path["hf"]["summary"]["step"]) == ("hf-trainer", 7)
    assert by_path["dcp/step-3"]["container"] == "dcp"
    assert all(line["version"] and line["remote"] is None for line in found)
    assert said.code == 1
    assert f"left out {2 * (NUMBER - 2) + 1} files" in said.err


def test_the_summary_counts_checkpoints_by_finding_and_by_device(lines, runs) -> None:
    said, found = lines(f"{runs}/**")
    table = {line.split("  ")[0]: line.split() for line in said.err.splitlines()}
    codes = Counter(code for line in found for code in {finding["code"] for finding in line["findings"]})
    assert {code: int(table[code][-1]) for code in codes} == codes
    devices = Counter(device for line in found for device in {one["device"] for one in line["devices"]})
    assert {device: int(table[device][1]) for device in devices} == devices
    assert lines(f"{runs}/**", "-q")[0].err.count("\n") == 1


@pytest.mark.unmeasured
def test_a_bucket_is_listed_once_and_read_like_the_folder(lines, bucket, sent, runs) -> None:
    said, found = lines("s3://bucket/runs/**", "--jobs", "16")
    assert said.code == 1
    there = {line["path"].removeprefix("s3://bucket/runs/"): line for line in found}
    here = {str(Path(line["path"]).relative_to(runs)): line for line in lines(f"{runs}/**")[1]}
    assert {path: same(line) for path, line in there.items()} == {path: same(line) for path, line in here.items()}
    listings = [path for _, path, _ in sent if "list-type" in path]
    assert len(listings) == 1 + (4 * NUMBER) // 1000
    assert {method for method, path, _ in sent if path not in listings} == {"GET"}
    assert all(0 < line["remote"]["requests"] <= 8 for line in found)
    assert sum(line["remote"]["requests"] for line in found) == len(sent) - len(listings) - 1  # data.bin


@pytest.mark.unmeasured
def test_seen_checkpoints_are_skipped_unless_they_change(lines, bucket, sent, bench) -> None:
    said, found = lines("s3://bucket/runs/**")
    # A kill cuts the last line.
    (bench / "seen.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found)[:-30])
    sent.clear()
    _, again = lines("s3://bucket/runs/**", "--skip-seen", "seen.jsonl")
    assert [line["path"] for line in again] == [found[-1]["path"]]
    assert len(sent) == 1 + found[-1]["remote"]["requests"] + 1  # data.bin
    new = (SAMPLES / "tutorial-sgd-cpu.pth").read_bytes()  # some of the runs are this sample already
    singles = (line for line in found[:-1] if line["path"].endswith("last.pth"))
    changed = next(line["path"] for line in singles if line["size_bytes"] != len(new))
    bucket.put_object(Bucket="bucket", Key=changed.removeprefix("s3://bucket/"), Body=new)
    bucket.put_object(Bucket="bucket", Key="runs/hf/scheduler.pt", Body=(SAMPLES / "adamw-cuda3.pth").read_bytes())
    said, again = lines("s3://bucket/runs/**", "--skip-seen", "seen.jsonl")
    assert {line["path"] for line in again} == {found[-1]["path"], changed, "s3://bucket/runs/hf"}
    assert f"{NUMBER - len(again)} skipped" in said.err


def test_a_checkpoint_with_an_unreadable_file_is_inspected_again(lines, bench) -> None:
    (bench / "hf").mkdir()
    shutil.copy(SAMPLES / "adamw-cuda3.pth", bench / "hf" / "optimizer.pt")
    (bench / "hf" / "scheduler.pt").write_bytes((SAMPLES / "adamw-cuda3.pth").read_bytes()[:999])
    first, found = lines("hf")
    assert [line["version"] for line in found if "version" in line] == [None]
    (bench / "seen.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found))
    second, again = lines("hf", "--skip-seen", "seen.jsonl")
    assert (first.code, again) == (second.code, found) == (3, found)


@pytest.mark.parametrize("way", ["local", "s3", "http"])
def test_named_checkpoints_are_skipped_too(lines, bucket, bench, runs, way) -> None:
    with serving(runs) as server:
        top = {"local": str(runs), "s3": "s3://bucket/runs", "http": server.url}[way]
        words = [f"{top}/exp0/last.pth", f"{top}/dcp/step-3{'/' * (way == 'http')}"]
        found = lines(*words)[1]
        (bench / "seen.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found))
        assert {line["path"] for line in found} == set(words)
        left = lines(*words, "--skip-seen", "seen.jsonl")[1]
        assert len(left) == (2 if way == "http" else 0)  # a web server is not asked for versions
        if way == "s3":
            requests = {line["path"]: line["remote"]["requests"] for line in lines(*words)[1]}
            assert requests == dict(zip(words, [1, 2], strict=True))


def test_a_search_on_a_web_server(lines, runs) -> None:
    with serving(runs) as server:
        found = lines(f"{server.url}/**", "--select", "N")[1]
    assert len(found) == NUMBER
    assert {line["version"] for line in found} == {None}


@pytest.mark.unmeasured
def test_one_that_fails_does_not_stop_the_others(lines, bucket) -> None:
    bucket.put_object(Bucket="bucket", Key="runs/exp0/last.pth", Body=b"")
    bucket.put_object(Bucket="bucket", Key="runs/hf/optimizer.pt", Body=b"")
    said, found = lines("s3://bucket/runs/**", "s3://bucket/none/**", "s3://bucket/none.pth", "s3://nobody/**")
    kinds = Counter(line["kind"] for line in found if "kind" in line)
    assert kinds == {"not-a-checkpoint": 2, "missing-file": 3}
    assert sum("container" in line for line in found) == NUMBER - 1
    assert said.code == 3
    assert "missing-file" in said.err


def refusing(monkeypatch, status, code):
    """A server that answers requests for one file with an error; the number of them."""
    from aiobotocore.awsrequest import AioAWSResponse
    from aiobotocore.httpsession import AIOHTTPSession

    class Raw:
        async def read(self):
            return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()

    whole, asked = AIOHTTPSession.send, []

    async def send(self, request):
        if "exp1/" not in request.url:
            return await whole(self, request)
        asked.append(request.url)
        return AioAWSResponse(request.url, status, {}, Raw())

    async def no_pause(_seconds):
        pass

    monkeypatch.setattr(AIOHTTPSession, "send", send)
    monkeypatch.setattr("asyncio.sleep", no_pause)
    return asked


@pytest.mark.unmeasured
@pytest.mark.parametrize(("status", "code", "most"), [(403, "AccessDenied", 1), (503, "SlowDown", 10)])
def test_a_server_that_refuses_one(lines, bucket, monkeypatch, status, code, most) -> None:
    asked = refusing(monkeypatch, status, code)
    said, found = lines("s3://bucket/runs/**")
    (error,) = (line for line in found if "kind" in line)
    assert error["path"] == "s3://bucket/runs/exp1/last.pth"
    assert said.code == 3
    assert len(found) == NUMBER
    assert 1 <= len(asked) <= most


@pytest.mark.parametrize(
    ("word", "kind"),
    [("empty/**", "empty-directory"), ("none/**", "missing-file"), ("run.pth/**", "missing-file")],
)
def test_a_search_that_finds_nothing(lines, bench, word, kind) -> None:
    (bench / "empty").mkdir()
    (bench / "empty" / "log.txt").touch()
    said, found = lines(word)
    assert [line["kind"] for line in found] == [kind]
    assert said.code == 3


@pytest.mark.parametrize("word", ["a\0/[b", "a\0/**"])
def test_a_null_character_in_a_path(lines, bench, word) -> None:
    said, _ = lines(word)
    assert said.code == 3


def test_patterns_of_a_search(bench, monkeypatch) -> None:
    from ckptmove.cli.config import Config

    for folder in ("a", "b"):
        (bench / folder / "in").mkdir(parents=True)
        shutil.copy(bench / "run.pth", bench / folder / "in" / "x.pth")
    (bench / "b" / "in" / "trainer_state.json").write_text("{}")

    def paths(*words, **values):
        return [target.path for target in find_targets(words, Config(values=values)).targets]

    assert paths("**") == ["a/in/x.pth", "b/in", "dragged.pth", "run.pth"]
    assert paths("*/**") == ["a/in/x.pth", "b/in"]
    assert paths("./a/**/", "a/**/*", "a/in/x.pth") == ["./a/in/x.pth", "a/in/x.pth"]
    assert paths("b/in/**") == ["b/in/"]
    assert paths("a/**/x.pth") == ["a/in/x.pth"]
    assert paths(checkpoints=["b/**", "run.pth"]) == ["b/in", "run.pth"]
    monkeypatch.chdir(bench / "b" / "in")
    assert paths("**") == ["."]
    with pytest.raises(UsageError):
        paths()


def test_results_of_a_run_do_not_hold_its_checkpoints(ask, bench) -> None:
    for folder in ("out", "out/checkpoint-5"):
        (bench / folder).mkdir()
        shutil.copy(bench / "run.pth", bench / folder / "optimizer.pt")
        (bench / folder / "trainer_state.json").write_text("{}")
    (bench / "out" / "dangling.pt").symlink_to("none")
    found = ask("inspect", "out/**")["checkpoints"]
    assert [[file["path"] for file in one["files"]] for one in found] == [["optimizer.pt"], ["optimizer.pt"]]
    assert [one["path"] for one in found] == ["out/", "out/checkpoint-5"]


def test_a_folder_that_cannot_be_listed_is_an_error(lines, bench, monkeypatch) -> None:
    from ckptmove.io import walk

    (bench / "sub").mkdir()
    scandir = os.scandir
    monkeypatch.setattr(walk.os, "scandir", lambda path: scandir("none" if path.endswith("sub/") else path))
    said, found = lines("./**")
    assert [line.get("kind", line.get("container")) for line in found] == ["access-failed", "torch-zip", "torch-zip"]
    assert said.code == 3


def test_the_lines_of_a_report(tmp_path) -> None:
    path = tmp_path / "seen.jsonl"
    entry = {"path": "a.pth", "version": "1"}
    error = {"path": "b.pth", "kind": "x", "exit_code": 3}
    path.write_text(
        "\n".join(map(json.dumps, [entry, error, {**entry, "path": None}, 3, {"path": 7}])) + '\n{"path": "'
    )
    seen = Seen(str(path))
    assert seen.has("a.pth", "1")
    assert not seen.has("a.pth", "2")
    assert not seen.has("a.pth", None)
    assert not seen.has("b.pth", "1")
    path.write_text("")
    assert not Seen(str(path)).has("a.pth", "1")


def test_another_file_is_no_report(say, bench) -> None:
    (bench / "other").write_text("one\ntwo\n")
    for name in ("other", "none"):
        assert say("inspect", "run.pth", "--skip-seen", name).code == 2


@pytest.mark.parametrize("words", [("convert", "run.pth", "--to", "cpu"), ("diff", "run.pth", "run.pth"), ("rules",)])
def test_other_commands_have_no_lines(say, words) -> None:
    said = say(*words, "--format", "jsonl")
    assert said.code == 2
    assert json.loads(said.out)["kind"] == "usage"
    assert not Path("run.cpu.pth").exists()


def test_an_error_of_the_command_is_no_checkpoint(say, validator, bench) -> None:
    for words in (("inspect", "run.pth", "--bogus"), ("inspect",), ("verify", "run.pth", "--to", "cudaa")):
        said = say(*words, "--format", "jsonl")
        (line,) = map(json.loads, said.out.splitlines())
        error = {"$ref": "#/$defs/error_line", "$defs": validator.schema["$defs"]}
        validator.evolve(schema=error).validate(line)
        assert (line["path"], line["checkpoint"]) == (None, None)
        assert line["exit_code"] == said.code == 2
    (bench / "seen.jsonl").write_text(said.out * 2)
    assert say("inspect", "run.pth", "--skip-seen", "seen.jsonl").code == 0


def test_the_path_of_an_error_is_that_of_the_checkpoint(lines, ask, bench) -> None:
    (bench / "hf").mkdir()
    for name in ("optimizer.pt", "scheduler.pt"):
        (bench / "hf" / name).write_bytes((SAMPLES / "adamw-cuda3.pth").read_bytes()[:999])
    for words in (("hf", "run.pth"), ("hf/",)):
        errors = [line for line in lines(*words)[1] if "kind" in line]
        assert [(line["path"], line["checkpoint"]) for line in errors] == [(words[0], words[0])] * 2
        assert [line["message"].partition(": ")[0] for line in errors] == ["optimizer.pt", "scheduler.pt"]
    assert [error["path"] for error in ask("inspect", "hf")["errors"]] == ["hf/optimizer.pt", "hf/scheduler.pt"]


def test_an_error_of_another_file_names_that_file(say, bench) -> None:
    pytest.importorskip("torch")
    (bench / "run.pth.bak").write_text("text")
    for other in ("none.pth", "run.pth.bak"):
        said = say("verify", "run.pth", "--against", other, "--to", "cpu", "--format", "jsonl")
        error = json.loads(said.out)
        assert (error["path"], error["checkpoint"]) == (other, "run.pth")
        assert other not in error["message"]


def test_shards_next_to_their_consolidated_files_are_one_checkpoint(lines, bench) -> None:
    from safetensors.torch import save_file
    from torch import arange

    whole = {"a": arange(12.0).reshape(4, 3), "b": arange(4.0)}
    for files in (1, 2):
        sharded = bench / "runs" / f"of{files}" / "sharded"
        sharded.mkdir(parents=True)
        shutil.copy(SAMPLES / "adamw-cuda3.pth", sharded.parent / "other.pth")
        (sharded.parent / "exp").mkdir()
        shutil.copy(SAMPLES / "adamw-cuda3.pth", sharded.parent / "exp" / "last.pth")
        for rank in range(2):
            offsets = {name: {"saved_offsets": [2 * rank, 0][: tensor.dim()]} for name, tensor in whole.items()}
            notes = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            parts = {name: tensor.chunk(2)[rank].contiguous() for name, tensor in whole.items()}
            save_file(parts, sharded / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata=notes)
        for number, name in enumerate(whole, 1) if files > 1 else ():
            save_file({name: whole[name]}, sharded.parent / f"model-0000{number}-of-00002.safetensors")
        if files == 1:
            save_file(whole, sharded.parent / "model.safetensors")
    found = {line["path"]: line for line in lines("runs/**")[1]}
    assert found.keys() == {"runs/of1", "runs/of1/exp/last.pth", "runs/of2", "runs/of2/exp/last.pth"}
    for files in (1, 2):
        tensors = [one["name"].rpartition(".")[2] for one in found[f"runs/of{files}"]["tensors"]]
        assert (tensors.count("a"), tensors.count("b")) == (1, 1)


def test_verify_has_a_line_for_each_checkpoint(say, validator) -> None:
    pytest.importorskip("torch")
    said = say("verify", "run.pth", "none.pth", "--to", "cpu", "--format", "jsonl", "--ignore", "R302")
    result, error = map(json.loads, said.out.splitlines())
    definitions = validator.schema["$defs"]
    validator.evolve(schema={"$ref": "#/$defs/result", "$defs": definitions}).validate(result)
    assert (result["path"], error["path"]) == ("run.pth", "none.pth")
    assert "not proven" not in said.err
    assert "1 of 1 fine, 1 of them not proven" in say("verify", "run.pth", "--sample", "1", "--format", "jsonl").err


def test_an_inspection_has_no_version_without_lines(ask) -> None:
    assert ask("inspect", "run.pth")["checkpoints"][0]["version"] is None


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_other_commands_search_too(say, ask, runs, bench, command) -> None:
    for name in ("dcp", "hf"):
        shutil.copytree(runs / name, bench / "some" / name)
    shutil.copy(SAMPLES / "tutorial-sgd-cpu.pth", bench / "some")
    words = {"convert": ["--to", "cpu", "--output-dir", "new", "--dry-run"], "verify": ["--sample", "1"]}[command]
    found = ask(command, "some/**", "-q", *words)
    paths = sorted(one["path"] for one in found["conversions" if command == "convert" else "results"])
    assert paths == ["some/dcp/step-3", "some/hf", "some/tutorial-sgd-cpu.pth"]
    said = say(command, "none/**", *words)
    assert (said.code, said.err) == (3, say("inspect", "none/**").err)


@pytest.fixture
def nested(runs, bench):
    """A folder of a Trainer with its last checkpoint at the top, and one below."""
    shutil.copytree(runs / "hf", bench / "some")
    (bench / "some" / "notes").mkdir()
    (bench / "some" / "notes" / "a.txt").write_text("a")
    (bench / "some" / "notes" / "tokens.bin").write_bytes(b"GIF89a" + bytes(range(200)))
    shutil.copytree(runs / "hf", bench / "some" / "checkpoint-5")
    (bench / "some" / "latest").symlink_to("checkpoint-5")
    (bench / "some" / "best.pt").symlink_to("checkpoint-5/optimizer.pt")
    (bench / "some" / "same.txt").symlink_to("notes/a.txt")
    return bench / "some"


def tensors_of(results):
    """The number of tensors that each verification has read, by path."""
    return {one["path"]: one["checks"][1]["evidence"]["tensors"] for one in results}


def test_a_folder_is_read_without_the_checkpoints_below_it(ask, say, nested) -> None:
    (alone,) = ask("inspect", "some/checkpoint-5")["checkpoints"]
    found = tensors_of(ask("verify", "some/**", "--sample", "99")["results"])
    assert found == {"some/": len(alone["tensors"]), "some/checkpoint-5": len(alone["tensors"])}
    assert tensors_of(ask("verify", "some", "--sample", "99")["results"]) == {"some": sum(found.values())}
    # A part that is named too stays a part; a folder that is named is read with all that is in it.
    assert (
        tensors_of(ask("verify", "some/**", "some/optimizer.pt", "--sample", "99")["results"]).items() >= found.items()
    )
    for words in (["some/", "some/**"], ["some/**", "some/"]):
        assert tensors_of(ask("verify", *words, "--sample", "99")["results"])["some/"] == sum(found.values())


def test_the_copy_of_a_folder_has_no_checkpoints_from_below_it(ask, say, nested, bench, monkeypatch) -> None:
    found = ask("convert", "some", "some/checkpoint-5", "--to", "cpu", "--output-dir", "whole")
    assert "checkpoint-5" not in str(found["conversions"][0]["notes"])
    assert (bench / "whole" / "some" / "latest" / "optimizer.pt").exists()
    found = ask("convert", "some/**", "--to", "cpu", "--output-dir", "new")
    assert [one["output"] for one in found["conversions"]] == ["new/some", "new/checkpoint-5"]
    assert "checkpoint-5" in str(found["conversions"][0]["notes"])
    own = [
        "notes",
        "notes/a.txt",
        "notes/tokens.bin",
        "optimizer.pt",
        "rng_state.pth",
        "same.txt",
        "trainer_state.json",
    ]
    assert sorted(path.relative_to(bench / "new/some").as_posix() for path in (bench / "new/some").rglob("*")) == own
    monkeypatch.chdir(nested)
    assert say("convert", "**", "--to", "cpu", "-o", "../one", "-q").code == 2  # one output for two checkpoints
    assert [one["path"] for one in ask("verify", "**", "--sample", "1")["results"]] == [".", "checkpoint-5"]


def test_a_folder_of_a_bucket_is_read_without_the_checkpoints_below_it(ask, nested, moto, bench) -> None:
    for path in nested.rglob("*"):
        if path.is_file() and not path.is_symlink():
            key = path.relative_to(bench).as_posix()
            moto.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    found = ask("verify", "s3://bucket/some/**", "--download", "here")["results"]
    counts = [one["checks"][1]["evidence"]["tensors"] for one in found]
    assert len(counts) == 2
    assert counts[0] == counts[1] > 0
    copied = {path.relative_to(bench / "here").as_posix() for path in (bench / "here").rglob("*.pt")}
    assert copied == {"some/optimizer.pt", "checkpoint-5/optimizer.pt"}


def test_another_spelling_of_an_address_excludes_the_same(ask, nested) -> None:
    for link in ("best.pt", "latest", "same.txt"):  # fsspec lists their targets
        (nested / link).unlink()
    found = tensors_of(ask("verify", f"local://{nested}/**", "--download", "here")["results"])
    assert len({*found.values()}) == 1
    assert len(found) == 2


def test_checkpoints_of_one_name_need_folders_of_their_own(say, nested, bench) -> None:
    shutil.copytree(nested, bench / "runs" / "a", symlinks=True)
    shutil.copytree(nested, bench / "runs" / "b", symlinks=True)
    said = say("convert", "runs/**", "--to", "cpu", "--output-dir", "new")
    assert said.code == 2
    assert "runs/a/checkpoint-5" in said.err
    assert "runs/b/checkpoint-5" in said.err
    assert not (bench / "new").exists()


def test_a_link_that_leads_nowhere_is_a_missing_checkpoint(lines, say, ask, nested, bench) -> None:
    (nested / "checkpoint-5" / "optimizer.pt").unlink()
    (nested / "checkpoint-5" / "optimizer.pt").symlink_to("/gone/optimizer.pt")
    (bench / "some" / "lost.pth").symlink_to("gone.pth")
    (bench / "some" / "notes" / "lost.txt").symlink_to("gone.txt")
    said, found = lines("some/**")
    assert {one["path"] for one in found if one.get("kind") == "missing-file"} == {"some/", "some/checkpoint-5"}
    assert said.code == 3
    errors = ask("inspect", "some/checkpoint-5")["errors"]
    assert [(one["kind"], one["path"]) for one in errors] == [("missing-file", "some/checkpoint-5/optimizer.pt")]
    for command in (["verify"], ["convert", "--to", "cuda:0"]):
        assert say(*command, "some/checkpoint-5").code == 3


def test_several_checkpoints_that_are_read_as_one(ask, say, bench) -> None:
    (bench / "pair").mkdir()
    for name in ("a.pth", "b.pth"):
        shutil.copy(SAMPLES / "tutorial-sgd-cpu.pth", bench / "pair" / name)
    (result,) = ask("verify", "pair")["results"]
    details = {one["name"]: one["detail"] for one in result["checks"]}
    assert "2 separate checkpoints, read as one" in details["structure"]
    said = say("inspect", "pair", "pair/b.pth", "--fit", "2x1GiB", "-q")  # it would add their sizes
    assert said.code == 2
    assert "b.pth" in said.err
    assert said.out.splitlines()[-1].startswith("1 of 2 ")


def test_a_conversion_without_a_change_is_counted_apart(say, runs, bench) -> None:
    shutil.copytree(runs / "dcp" / "step-3", bench / "dcp")
    said = say("convert", "dcp", "run.pth", "--to", "cpu", "--force", "-q")
    assert said.out.splitlines()[-1] == "1 of 2 converted, 1 without a change"
    said = say("convert", "dcp", "run.pth", "--to", "cpu", "--force", "-q", "--dry-run")
    assert said.out.splitlines()[-1] == "2 of 2 planned, nothing written"


def test_only_checkpoints_below_a_folder_are_excluded(nested, bench) -> None:
    for name in ("a", "a-b"):
        shutil.copytree(nested, bench / "runs" / name, symlinks=True)
    shutil.copytree(nested / "checkpoint-5", bench / "runs" / "a" / "checkpoint-50")
    found = {one.path: one.exclude for one in find_targets(["runs/**"], Config()).targets}
    assert found["runs/a"] == ("checkpoint-5", "checkpoint-50")
    assert found["runs/a-b"] == ("checkpoint-5",)
    assert found["runs/a/checkpoint-5"] == ()
