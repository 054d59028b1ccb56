"""The place of a fix of the model or the optimizer: its names have values there, in the branch that ran."""

from __future__ import annotations

import re
import textwrap

import pytest
from pasting import HEAD

BUILD = "def build():\n    model = Net()\n    return model, torch.optim.AdamW(model.parameters())\n\n"
RETURN = "    return ckptmove.Case(model, optimizer, criterion, {batch})\n"


def place_of(body, fix):
    """The line before a fix, and the pasted text."""
    number = re.match(r"[a-z ]+ train.py:(\d+)", fix).group(1)
    return (HEAD + textwrap.dedent(body)).splitlines()[int(number) - 1].strip(), fix.partition(": ")[2]


def function(lines, criterion="nn.MSELoss()", batch="batch()"):
    """The function of a case, by the lines that make its model and its optimizer."""
    body = textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")
    first = "" if "criterion =" in lines else f"    criterion = {criterion}\n"
    return f"KIND = 'a'\n\n{BUILD}def case(device):\n{first}{body}\n" + RETURN.format(batch=batch)


MOVED = "model = model.to(device)"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())"
SGD = "optimizer = torch.optim.SGD(model.parameters())"
MODELS = {
    "set with its optimizer": ("model, optimizer = build()", "return ckptmove"),
    "of a helper with more": ("model, optimizer, _ = (*build(), None)", "return ckptmove"),
    "optimizers in branches": (
        f"model = Net()\nif KIND == 'a':\n    {ADAMW}\nelse:\n    optimizer = torch.optim.SGD(model.parameters())",
        "if KIND",
    ),
    "an optimizer in an elif": (
        f"model = Net()\nif KIND == 'b':\n    {SGD}\nelif KIND == 'a':\n    {ADAMW}\nelse:\n    raise ValueError(KIND)",
        "if KIND",
    ),
    "in a with, the optimizer in a try": (
        f"with torch.no_grad():\n    model = Net()\ntry:\n    {ADAMW}\nexcept ValueError:\n    {ADAMW}",
        "try:",
    ),
    "both in a branch": (
        f"if KIND == 'a':\n    model = Net()\n    {ADAMW}\nelse:\n    model = nn.Linear(6, 3)\n    {ADAMW}",
        ADAMW,
    ),
    "nothing first, and both in a branch": (f"model = None\nif KIND == 'a':\n    model = Net()\n    {ADAMW}", ADAMW),
    "both in a loop": (f"for lr in (1e-3, 1e-4):\n    model = Net()\n    {ADAMW}", ADAMW),
    "wrapped after the optimizer": (f"model = Net()\n{ADAMW}\nmodel = nn.Sequential(*model)", "return ckptmove"),
    "wrapped in a branch after the optimizer": (
        f"model = Net()\n{ADAMW}\nif KIND == 'a':\n    model = nn.Sequential(*model)",
        "return ckptmove",
    ),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("lines", "at"), MODELS.values(), ids=MODELS)
def test_a_model_is_moved_where_it_is_there_and_before_the_optimizer(mended, lines, at):
    body = function(lines)
    (fix,) = mended(body)
    where, text = place_of(body, fix)
    assert (where[: len(at)], text) == (at, MOVED)


def test_a_model_is_moved_in_the_line_that_makes_it_and_all_the_rest(mended):
    (fix,) = mended(function(f"model = Net(); {ADAMW}"))
    assert fix.endswith(f": model = Net(); {MOVED}; {ADAMW}")


REPLACED = "model[1] = nn.Linear(5, 3)\nmodel = model.to(device)"
REBUILT = {
    "in branches": f"model = Net()\nif KIND == 'a':\n    {ADAMW}\nelse:\n    {SGD}\n{REPLACED}",
    "in branches of one line": f"model = Net()\nif KIND == 'a': {ADAMW}\nelse: {SGD}\n{REPLACED}",
    "twice": f"model = Net()\n{SGD}\n{ADAMW}\n{REPLACED}",
    "of a number of its own": f"model = Net()\nlr = 1e-3\n{ADAMW[:-1]}, lr=lr)\n{REPLACED}",
    "of a function": f"model = Net()\ndef rate(): return len([model]) / 1e3\n{ADAMW[:-1]}, lr=rate())\n{REPLACED}",
    "in a match": f"model = Net()\nmatch KIND:\n    case 'a':\n        {ADAMW}\n    case _:\n        {SGD}\n{REPLACED}",
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("lines", REBUILT.values(), ids=REBUILT)
def test_the_optimizer_that_was_built_is_built_again(mended, lines):
    body = function(lines)
    (fix,) = mended(body)
    where, text = place_of(body, fix)
    assert where.startswith("return ckptmove.Case(")
    assert text.startswith(ADAMW[:-1])


def test_an_optimizer_that_a_function_built_is_built_by_it_again(mended):
    lines = f"model = Net()\nif KIND == 'a':\n    optimizer = made(model)\nelse:\n    {SGD}\n{REPLACED}"
    (fix,) = mended("def made(model):\n    return torch.optim.AdamW(model.parameters())\n\n" + function(lines))
    assert fix.endswith(": optimizer = made(model)")


STALE = {
    "a list": f"model = Net()\nparams = list(model.parameters())\n{ADAMW.replace('model.parameters()', 'params')}\n",
    "a list of a list": "model = Net()\nfirst = list(model.parameters())\nparams = [{'params': first}]\n"
    f"{ADAMW.replace('model.parameters()', 'params')}\n",
    "another list": "model = Net()\nfirst = list(model[0].parameters())\n"
    "optimizer = torch.optim.AdamW([{'params': first}, {'params': [*model.parameters()][2:]}])\n",
    "with its model": "model, optimizer = build()\n",
    "with its model, of it": "model = Net()\nmodel, optimizer = model, made(model)\n",
    "in the head of a loop": "model = Net()\nfor optimizer in [torch.optim.AdamW(model.parameters())]: pass\n",
    "of another name": f"net = model = Net()\n{ADAMW.replace('model.', 'net.')}\nmodel = Net()\n",
    "in an attribute": f"model = Net()\nmodel.optimizer = None\n{ADAMW.replace('optimizer =', 'model.optimizer =')}\n",
}


@pytest.mark.parametrize("lines", STALE.values(), ids=STALE)
def test_what_would_take_the_old_parameters_again_is_told_in_words(fault_of, lines):
    body = "def made(model):\n    return torch.optim.AdamW(model.parameters())\n\n" + function(lines + REPLACED)
    last = RETURN.format(batch="batch()")
    if "model.optimizer" in lines:
        body, last = (one.replace("model, optimizer,", "model, model.optimizer,") for one in (body, last))
    detail, evidence = fault_of(body)
    at = f"before train.py:{(HEAD + body).splitlines().index(last.rstrip()) + 1}"
    assert f" {at}, " in evidence["fix"], detail
    assert "model.parameters()" in evidence["fix"]
    assert evidence["fix_at"] == ""
