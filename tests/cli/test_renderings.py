"""Every command in all four renderings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmove.api import functions as api
from ckptmove.cli import verify_command
from ckptmove.conversion.policy import RULES
from ckptmove.findings.catalogue import CATALOGUE


def test_inspect_without_findings(check) -> None:
    check(
        "inspect", "run.pth", "--ignore", "D103,R302",
        code=0,
        human=(
            "run.pth\n"
            "torch-zip, plain, 6.8 KiB\n"
            "83 parameters · float32 · epoch 2 · step 3 · lr 5e-4 · AdamW\n"
            "\n"
            "device  role       tensors   bytes\n"
            "cuda:3  model            4   332 B\n"
            "cpu     optimizer        4    16 B\n"
            "cuda:3  optimizer        8   664 B\n"
            "        total           16  1012 B\n"
            "\n"
            "optimizer: AdamW, 1 group, 4 parameters\n"
            "\n"
            "no findings\n"
        ),
        quiet="run.pth: no findings\n",
        github="",
        document={"command": "inspect", "ok": True, "error": None, "errors": []},
    )  # fmt: skip


def test_inspect_with_an_error(check) -> None:
    (finding,) = (finding for finding in api.inspect("run.pth", device_count=1).findings if finding.code == "D103")
    at = finding.where
    check(
        "inspect", "run.pth", "--select", "device-index", "--match", "*.step", "--devices", "1",
        code=1,
        human=(
            "run.pth\n"
            "torch-zip, plain, 6.8 KiB\n"
            "83 parameters · float32 · epoch 2 · step 3 · lr 5e-4 · AdamW\n"
            "\n"
            "device  role       tensors   bytes\n"
            "cuda:3  model            4   332 B\n"
            "cpu     optimizer        4    16 B\n"
            "cuda:3  optimizer        8   664 B\n"
            "        total           16  1012 B\n"
            "\n"
            "optimizer: AdamW, 1 group, 4 parameters\n"
            "\n"
            "name                    role       device  dtype    shape  bytes\n"
            "optimizer.state.0.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.1.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.2.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.3.step  optimizer  cpu     float32  []       4 B\n"
            "\n"
            f"error D103 device-index: {finding.message}\n"
            f"  at  {at[0]}\n"
            f"  at  {at[1]}\n"
            f"  at  {at[2]}\n"
            f"      +{len(at) - 3} more (-v names them)\n"
            f"  fix {finding.fix}\n"
            "1 error\n"
        ),
        quiet=(
            "run.pth: 1 error (D103)\n"
            "\n"
            "name                    role       device  dtype    shape  bytes\n"
            "optimizer.state.0.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.1.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.2.step  optimizer  cpu     float32  []       4 B\n"
            "optimizer.state.3.step  optimizer  cpu     float32  []       4 B\n"
        ),
        github=(
            f"::error file=run.pth,title=D103 device-index::{finding.message} "
            f"(at {at[0]}, {at[1]}, {at[2]}, +{len(at) - 3} more); fix: {finding.fix}\n"
        ),
        document={"command": "inspect", "ok": False, "exit_code": 1, "error": None},
    )  # fmt: skip


def test_convert_dry_run(check) -> None:
    reasons = {rule.name: rule.reason for rule in RULES}
    check(
        "convert", "dragged.pth", "--to", "mps", "--keep", "model.0.bias", "--dry-run",
        code=0,
        human=(
            "dragged.pth\n"
            "\n"
            "from    to   tensors    bytes  reason            first of them\n"
            "cuda:0  mps       11    964 B  target            model.0.weight\n"
            "cuda:0  cpu        4     16 B  optimizer-scalar  optimizer.state.0.step\n"
            "cuda:0  cpu        2  5.0 KiB  rng-state         rng.torch\n"
            "stay on cuda:0: 1 tensor (keep)\n"
            "\n"
            f"keep              {reasons['keep']}\n"
            f"rng-state         {reasons['rng-state']}\n"
            f"optimizer-scalar  {reasons['optimizer-scalar']}\n"
            f"target            {reasons['target']}\n"
            "\n"
            "dragged.pth: nothing was written\n"
        ),
        quiet="dragged.pth: nothing was written\n",
        github="::notice file=dragged.pth,title=convert::dragged.pth: nothing was written\n",
        document={"command": "convert", "output": None, "in_place": False, "bytes_copied": 0, "notes": []},
    )  # fmt: skip


def test_rules(check) -> None:
    entry = CATALOGUE["D102"]
    check(
        "rules", "d102",
        code=0,
        human=(
            f"D102 optimizer-device ({entry.severity.value})\n"
            f"when  {entry.when}\nwhy   {entry.why}\nfix   {entry.mend}\n"
        ),
        quiet="D102 optimizer-device\n",
        github=f"::notice title=D102 optimizer-device::{entry.when}. {entry.mend}\n",
        document={
            "command": "rules",
            "rules": [
                {
                    "code": "D102", "name": "optimizer-device", "severity": entry.severity.value, "when": entry.when,
                    "why": entry.why, "fix": entry.mend, "found_by": "inspect",
                }
            ],
        },
    )  # fmt: skip


def test_rules_lists_the_catalogue(say, ask) -> None:
    said = say("rules")
    rows = said.out.splitlines()
    assert [row.split()[0] for row in rows] == list(CATALOGUE)
    assert rows[1] == f"D102  optimizer-device        {CATALOGUE['D102'].severity.value:<7}  {CATALOGUE['D102'].when}"
    assert said.only_next == ["rules", "D101"]
    assert [rule["code"] for rule in ask("rules")["rules"]] == list(CATALOGUE)
    assert say("rules", "second moment", "--quiet").out == "O210 state-precision\nN502 negative-moment\n"
    first, *_ = say("rules", "step", "--quiet").out.splitlines()
    assert first == "O201 step-on-accelerator"  # names come first
    assert "D102 optimizer-device" in say("rules", "step", "--quiet").out
    assert say("rules", " ").code == 2
    assert say("rules", "N", "--quiet").out == "N501 not-finite\nN502 negative-moment\nN503 scaler-scale\n"
    first, second, _ = say("rules", "N", "--verbose").out.split("\n\n")
    assert [row[:4] for row in rows if "(only verify finds it)" in row] == ["O209", "N502"]
    assert first.startswith("N501 not-finite (error)\nwhen  ")
    assert second.startswith("N502 ")
    assert second.endswith(" ckptmove verify")


@pytest.mark.unmeasured
def test_verify_says_how_it_was_proven(say, ask, monkeypatch, simulates) -> None:
    verify, verdicts = verify_command.verify_checkpoint, {}

    def once(request, **callbacks):
        """The same verdict is shown in several ways: torch is asked for it once."""
        if request not in verdicts:
            verdicts[request] = verify(request, **callbacks)
        return verdicts[request]

    monkeypatch.setattr(verify_command, "verify_checkpoint", once)
    document = ask("verify", "dragged.pth", "--to", "cpu", "--select", "R")
    (result,) = document["results"]
    assert document["exit_code"] == 1
    assert result["mode"] == "cpu"
    names = ["file", "restore", "placement", "structure", "numbers", "step", "parity", "fresh"]
    assert [check["name"] for check in result["checks"]] == names
    assert {finding["code"][0] for finding in result["findings"]} == {"R"}

    said = say("verify", "run.pth", "--to", "cuda:3")
    assert said.code == 0
    head, *checks, verdict = said.out.splitlines()
    assert head.split() == ["run.pth", "on", "cuda:3"]
    assert [line.split()[1] for line in checks] == names
    assert "✗" not in {line[0] for line in checks}
    assert verdict == "passed, simulated cuda:3; scheduler: in the file, not looked at"

    assert say("verify", "run.pth", "--quiet", "--to", "cuda:3").out == f"run.pth: {verdict}\n"
    words = ("verify", "run.pth", "dragged.pth", "none.pth", "--to", "cuda:3")
    assert say(*words).out.endswith("\nfailed, simulated cuda:3\n\n1 of 3 passed\n")
    assert say(*words, "--quiet").out.endswith(" (placement)\nnone.pth: unreadable\n1 of 3 passed\n")
    assert "1 of 3" not in say(*words, "--format", "github").out
    failed = say("verify", "run.pth", "--to", "cuda:3", "--require-device", "--format", "github", "--ignore", "D,R,S")
    assert failed.code == 1
    error, last = failed.out.splitlines()
    assert error.startswith("::error file=run.pth,title=verify step::")
    assert last == "::error file=run.pth,title=verify::failed, simulated cuda:3"


def test_verify_of_a_sample_says_so_everywhere(say, ask, simulates) -> None:
    (result,) = ask("verify", "run.pth", "--to", "cuda:3", "--sample", "1")["results"]
    assert result["sample"] == {"asked": 1, "parameters": 1, "of_parameters": 4, "tensors": 4, "of_tensors": 16}
    said = say("verify", "run.pth", "--to", "cuda:3", "--sample", "1", "--junit", "report.xml")
    verdict = "passed, simulated cuda:3, by a sample: 1 of 4 parameters, 4 of 16 tensors, but not proven to resume: "
    assert verdict in " ".join(said.out.split())
    assert "--case" not in said.err
    assert "a sample: 1 of 4 parameters" in Path("report.xml").read_text()
    (whole,) = ask("verify", "run.pth", "--to", "cuda:3")["results"]
    assert whole["sample"] is None


def test_a_converted_file_is_as_expected_and_verifies(say, ask, simulates) -> None:
    assert ask("inspect", "dragged.pth", "--expect", "cuda:0")["checkpoints"][0]["expected"]["met"] is False
    said = say("convert", "dragged.pth", "--to", "cuda:0")
    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("wrote dragged.cuda0.pth: 16.")
    load, _ = said.err.splitlines()
    assert load.endswith(": torch.load('dragged.cuda0.pth', weights_only=True)")
    assert said.next == ["verify", "dragged.cuda0.pth", "--to", "cuda:0"]
    assert ask("inspect", "dragged.cuda0.pth", "--expect", "cuda:0")["checkpoints"][0]["expected"]["met"] is True
    document = ask("verify", "dragged.cuda0.pth", "--to", "cuda:0", "--against", "dragged.pth")
    assert document["ok"] is True
