"""The command line under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch
from distributed_checkpoints import Distributed
from torchrun import ended, torchrun

import ckptmove
from ckptmove.api.hints import hint_for
from ckptmove.errors import CaseUnusable

SCHEMA = json.loads((Path(ckptmove.__file__).parent / "api" / "schema.json").read_text())
EXAMPLE = re.search(r"```python\n(# train.py\n.*?)```", Path("docs/mesh.md").read_text(), re.DOTALL)[1]


@pytest.fixture
def run(tmp_path):
    """A folder with the example of the manual, and a checkpoint of one process that its case restores."""
    (tmp_path / "train.py").write_text(EXAMPLE)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.rand(4, 8)).sum().backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    state = {
        "state": {name: saved["state"][index] for index, name in enumerate(names)},
        "param_groups": [{**saved["param_groups"][0], "params": names}],
    }
    Distributed.save(tmp_path / "ckpt", {"model": model.state_dict(), "optimizer": state})
    return tmp_path


def validate(report):
    jsonschema.validate(report, SCHEMA)


def reports(text):
    """The JSON documents in the output of all ranks."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_two_agents_resume_the_example_of_the_manual(run):
    words = ["-m", "ckptmove", "verify", "ckpt", "--to", "cpu", "--case", "train.py:case", "--json"]
    # This store is where the agents meet: its port is taken before they start.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [
        torchrun(
            [*words, "--report", "json=report.json"], ranks=1, folder=run, nodes="2", rdzv=f"127.0.0.1:{store.port}"
        )
        for _ in range(2)
    ]
    outcomes = [ended(agent) for agent in agents]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    (report,) = reports("".join(output for _, output, _ in outcomes))
    assert report == json.loads((run / "report.json").read_text())
    validate(report)
    (result,) = report["results"]
    assert result["proven"]
    assert (result["ranks"], result["saved_by"], result["rank_faults"]) == (2, 1, [])
    assert result["mesh"] == {"shape": [2], "dims": ["dp"]}
    assert {check["status"] for check in result["checks"]} == {"passed", "skipped"}
    assert [check["name"] for check in result["checks"] if check["status"] == "skipped"] == ["placement"]


@pytest.mark.slow
def test_without_a_case_the_ranks_share_the_checks(run):
    words = ["-m", "ckptmove", "verify", "ckpt", "--to", "cpu", "--json"]
    code, output, errors = ended(torchrun(words, ranks=2, folder=run))
    assert code == 0, errors
    (report,) = reports(output)
    validate(report)
    (result,) = report["results"]
    assert result["proven"]
    assert result["ranks"] == 2
    assert result["mesh"] is None
    step = next(check for check in result["checks"] if check["name"] == "step")
    assert step["evidence"]["parameters"] == 4


@pytest.mark.slow
def test_a_killed_process_is_named(run):
    words = ["-m", "ckptmove", "verify", "ckpt", "--to", "cpu", "--case", "mesh_cases:kill_command", "--json"]
    code, output, errors = ended(torchrun(words, ranks=2, folder=run))
    assert code == 1
    (report,) = reports(output)
    validate(report)
    named = report["error"]["message"] if report["error"] else report["results"][0]["rank_faults"]
    assert "rank 1" in str(named) or named[0]["rank"] == 1, errors


@pytest.mark.parametrize(("to", "typed"), [("cpu", ""), ("cuda:0", " --to cuda")])
def test_a_sharded_case_without_torchrun_has_the_line_to_type(run, monkeypatch, to, typed):
    monkeypatch.chdir(run)
    (run / "whole.py").write_text(
        "import ckptmove, torch\n"
        "def case(device):\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    return ckptmove.Case(model, torch.optim.SGD(model.parameters()), state={})\n"
    )
    case = "train.py:case" if to == "cpu" else "whole.py:case"
    with pytest.raises(CaseUnusable) as caught:
        ckptmove.verify("ckpt", to=to, case=case)
    line = f"torchrun --nproc-per-node 1 -m ckptmove verify ckpt{typed} --case {case}"
    assert caught.value.message.endswith(line)
    assert hint_for(caught.value) == ""
