"""Fixes of lines with names without a value, nested calls, and functions outside torch."""

from __future__ import annotations

import textwrap

import pytest
from pasting import case, mine


def places(fixes):
    """The pasted text, without its place."""
    return [fix.partition(": ")[2] for fix in fixes]


def step(lines):
    """A case with a step of its own."""
    return case(step=f"def step(b):\n{textwrap.indent(lines, ' ' * 4)}")


LOSS = "return criterion({}, {})"
ALL = LOSS.format("model(b[0].to(device))", "b[1].to(device)")
LATE = {
    "in a condition": (
        "if (x := b[0]) is not None and (out := model(x)) is not None:\n    return criterion(out, b[1].to(device))",
        "if (x := b[0]) is not None and (out := model(x.to(device))) is not None:",
    ),
    "in a try of one line": (
        f"try: x, y = b; o = model(x)\nexcept KeyError: raise\n{LOSS.format('o', 'y.to(device)')}",
        "try: x, y = b; x = x.to(device); o = model(x)",
    ),
    "in a with of one line": (
        f"with torch.enable_grad(): x, y = b; o = model(x)\n{LOSS.format('o', 'y.to(device)')}",
        "with torch.enable_grad(): x, y = b; x = x.to(device); o = model(x)",
    ),
    "in a for of one line": (
        f"for x in [b[0]]: o = model(x)\n{LOSS.format('o', 'b[1].to(device)')}",
        "for x in [b[0]]: x = x.to(device); o = model(x)",
    ),
    "in a generator": (
        "return sum(criterion(model(t), b[1].to(device)) for t in [b[0]] if (n := t) is not None)",
        "b = tuple(one.to(device) for one in b)",
    ),
    "in a loop that may not run": (
        f"for x in [b[0]]:\n    pass\no = model(x)\n{LOSS.format('o', 'b[1].to(device)')}",
        "x = x.to(device)",
    ),
    "in both branches": (
        f"if b is None:\n    x = None\nelse:\n    x = b[0]\no = model(x)\n{LOSS.format('o', 'b[1].to(device)')}",
        "x = x.to(device)",
    ),
    "in the head of a case": (
        f"match b:\n    case (x, y) if model(x).sum() < 1e9:\n        {ALL}",
        "case (x, y) if model(x.to(device)).sum() < 1e9:",
    ),
    "in the head of the second case": (
        f"match b:\n    case x, y, _ if model(x): pass\n    case x, y if model(x).sum() < 1e9:\n        {ALL}",
        "case x, y if model(x.to(device)).sum() < 1e9:",
    ),
    "in a case of one line": (
        f"match b:\n    case [x, y]: {LOSS.format('model(x)', 'y.to(device)')}",
        "case [x, y]: x = x.to(device); return criterion(model(x), y.to(device))",
    ),
    "in a case": (
        f"match b:\n    case [x, y]:\n        {LOSS.format('model(x)', 'y.to(device)')}",
        "x = x.to(device)",
    ),
    "before a match": (
        f"x, y = b\nmatch model(x).sum() < 1e9:\n    case _:\n        {ALL}",
        "x = x.to(device)",
    ),
    "set again in a while": (
        f"x, y = b\nn = 0\nwhile model(x).sum() < 1e9 and n < 2:\n    n, x = n + 1, b[0]\n{ALL}",
        "x = x.to(device)",
        "b = tuple(one.to(device) for one in b)",
    ),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("lines", "texts"), [(lines, texts) for lines, *texts in LATE.values()], ids=LATE)
def test_a_batch_is_moved_where_its_name_has_a_value(mended, lines, texts):
    assert places(mended(step(lines))) == texts


NESTED = {
    "numbers in numbers": (
        "return h * torch.ones(int(torch.ones(3).sum()))",
        "return h * torch.ones(int(torch.ones(3).sum()), device=x.device)",
    ),
    "a shape": (
        "return h + torch.zeros(torch.zeros(4, 3).shape)",
        "return h + torch.zeros(torch.zeros(4, 3).shape, device=x.device)",
    ),
    "a variable": (
        "m = torch.full((3,), torch.full((1,), 2.0).item())\nreturn h * m",
        "m = torch.full((3,), torch.full((1,), 2.0).item(), device=x.device)",
    ),
    "the inner one alone": (
        "return h * torch.ones((h * torch.ones(3)).shape, device=x.device)",
        "return h * torch.ones((h * torch.ones(3, device=x.device)).shape, device=x.device)",
    ),
    "an array from a file": (
        "return h * torch.from_numpy(numpy.load('m.npy'))",
        "return h * torch.from_numpy(numpy.load('m.npy')).to(x.device)",
    ),
    "a list from a file": (
        "return h * torch.Tensor(json.load(open('m.json')))",
        "return h * torch.Tensor(json.load(open('m.json'))).to(x.device)",
    ),
    "one of two": (
        "a = numpy.ones(3, 'f'); return h * torch.from_numpy(a) * torch.from_numpy(a).to(x.device)",
        "a = numpy.ones(3, 'f'); return h * torch.from_numpy(a).to(x.device) * torch.from_numpy(a).to(x.device)",
    ),
    "a part of a file": ("return h * torch.load('m.pt')['m']", "return h * torch.load('m.pt')['m'].to(x.device)"),
    "a part of another": (
        "return h * load_file('m.safetensors')['m']",
        "return h * load_file('m.safetensors')['m'].to(x.device)",
    ),
    "a whole file": ("return h * torch.load('one.pt')", "return h * torch.load('one.pt').to(x.device)"),
    "a file as a variable": ("m = torch.load('one.pt')\nreturn h * m", "m = m.to(x.device)"),
    "a dict of a file as a variable": (
        "m = torch.load('m.pt')\nreturn h * m['m']",
        "m = {k: v.to(x.device) for k, v in m.items()}",
    ),
    "two asterisks": (
        "kw = {'device': 'cpu'}\nreturn h * torch.ones(3, **kw)",
        "return h * torch.ones(3, **kw).to(x.device)",
    ),
    "on another line of the statement": (
        "return (h * torch.ones(3)\n    * torch.ones(3, device=h.device))",
        "return (h * torch.ones(3, device=x.device)",
    ),
    "in a lambda next to another": (
        "f, g = (lambda a: a * torch.ones(3)), (lambda b: b)\nreturn f(h)",
        "f, g = (lambda a: a * torch.ones(3, device=a.device)), (lambda b: b)",
    ),
}
FILES = """
import json
from safetensors.torch import load_file, save_file

numpy.save('m.npy', numpy.ones(3, 'f'))
with open('m.json', 'w') as file:
    json.dump([1.0, 2.0, 3.0], file)
torch.save({'m': torch.ones(3)}, 'm.pt')
torch.save(torch.ones(3), 'one.pt')
save_file({'m': torch.ones(3)}, 'm.safetensors')

"""


@pytest.mark.parametrize(("lines", "text"), NESTED.values(), ids=NESTED)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_call_is_changed_that_the_user_wrote(mended, lines, text):
    (fix,) = mended(FILES + mine(f"h = super().forward(x)\n{lines}"))
    assert fix.partition(": ")[2] == text


def test_what_a_file_has_may_be_a_dict_and_is_told_in_words(fault_of):
    made = FILES + "torch.save(torch.ones(3, 3), 'square.pt')\n"
    lines = "h = super().forward(x)\nreturn nn.functional.linear(h, torch.load('square.pt'))"
    detail, evidence = fault_of(made, mine(lines))
    assert evidence["tensor"] == "the tensor of torch.load", detail
    said = "move the result of torch.load at train.py:44: .to(x.device)"
    assert (evidence["fix"], evidence["fix_at"]) == (said, "")


def test_an_array_is_no_tensor(fault_of):
    helper = "def tensor(array): return torch.from_numpy(array)\n"
    _, evidence = fault_of(FILES, helper, mine("h = super().forward(x)\nreturn h * tensor(numpy.load('m.npy')[:3])"))
    assert (evidence["fix"].endswith(" train.py:44: .to(device)"), evidence["fix_at"]) == (True, "")


def test_a_device_is_taken_of_what_has_a_value(mended):
    made = "for x in [b[0].to(device)]: out = model(x)\nreturn criterion(out * torch.ones(3), b[1].to(device))"
    assert places(mended(step(made))) == ["return criterion(out * torch.ones(3, device=device), b[1].to(device))"]


EARLIER = {
    "of an argument": ("def of(x):\n    m = [MEAN]\n    return x * m[0]\n", "m = [MEAN.to(x.device)]"),
    "of a value that is set further down": (
        "def of(x):\n    m = [MEAN]\n    x = x * 1\n    return x * m[0]\n",
        "m = [MEAN.to(device)]",
    ),
}


@pytest.mark.parametrize(("function", "text"), EARLIER.values(), ids=EARLIER)
def test_an_earlier_line_reads_a_device_that_has_a_value_there(mended, function, text):
    lines = f"{function}return criterion(of(model(b[0].to(device))), b[1].to(device))"
    assert places(mended("MEAN = torch.ones(3)\n" + step(lines))) == [text]


CONVOLVED = """
    conv, x = nn.Conv1d(4, 4, 1){}, {}
    with torch.autocast(device.type, dtype=torch.float16):
        return conv(x[None]).float().mean() + criterion(model(b[0].to(device)), b[1].to(device))
"""


@pytest.mark.parametrize(("module", "value"), [(".to(device)", "b[0]"), ("", "b[0].to(device)")])
def test_autocast_hides_no_tensor_of_another_device(mended, module, value):
    (fix,) = mended(step(textwrap.dedent(CONVOLVED.format(module, value)).strip()))
    assert fix.endswith(("x = x.to(device)", "conv = conv.to(device)"))


def test_a_call_that_the_line_moves_stays(mended):
    made = "o, e = torch.ones(3), torch.ones(3).to(device)\n"
    loss = LOSS.format("model(b[0].to(device)) * o * e", "b[1].to(device)")
    assert places(mended(step(made + loss))) == ["o, e = torch.ones(3, device=device), torch.ones(3).to(device)"]
