"""Pickled modules, optimizers, schedulers and scalers become state_dicts. The oracle is ``state_dict()``."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
from plain_files import foreign, loaded, plain, saved

from ckptmove.conversion.remap.errors import NotPlain
from ckptmove.conversion.remap.plain import make_plain
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret

torch = pytest.importorskip("torch")
nn = torch.nn

__all__ = ["foreign"]


class Net(nn.Module):
    """A module with everything that a state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.encoder[3].weight
        self.register_parameter("absent", None)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.again = self.encoder[0]
        self.missing = None
        self.register_module("nothing", None)
        self.options = {"a": object()}


def same(found: object, expected: object) -> bool:
    """Whether two values are equal, with tensors that are bit for bit equal."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        order = list if isinstance(expected, OrderedDict) else set
        return order(found) == order(expected) and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


@pytest.mark.parametrize(
    "wrap",
    [lambda net: net, nn.DataParallel, torch.optim.swa_utils.AveragedModel],
    ids=["bare", "parallel", "averaged"],
)
def test_modules(wrap) -> None:
    module = wrap(Net())
    found = loaded(saved({"model": module}))
    state = found.value["model"]
    assert type(state) is OrderedDict
    assert same(state, module.state_dict())
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in state.values())
    prefix = "module." if "module" in module._modules else ""
    tied = state[f"{prefix}head.weight"], state[f"{prefix}encoder.3.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    (replaced,) = found.replaced
    kind = type(module)
    assert replaced == ("model", f"{kind.__module__}.{kind.__qualname__}", "state_dict")


def test_a_compiled_module() -> None:
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    assert same(plain(module), module.state_dict())


def test_a_traced_module() -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert same(plain(module), module.state_dict())


def test_a_module_without_tensors() -> None:
    assert plain({"loss": nn.CrossEntropyLoss()}) == {"loss": OrderedDict()}


def test_a_module_of_an_old_torch() -> None:
    module = nn.BatchNorm1d(2)
    expected = module.state_dict()
    del module.__dict__["_non_persistent_buffers_set"]
    assert same(plain(module), expected)


@pytest.mark.parametrize("name", ["torch.ao.nn.quantized.library.Linear", "bitsandbytes.nn.modules.Linear4bit"])
def test_a_module_with_its_own_state_dict_is_refused(foreign, name) -> None:
    module = nn.Sequential(foreign(name, nn.Linear)(2, 2))
    with pytest.raises(NotPlain) as refused:
        loaded(saved({"model": module}))
    assert [one[:2] for one in refused.value.objects] == [("model", "torch.nn.modules.container.Sequential")]
    assert name in refused.value.objects[0][2]


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(NotPlain) as refused:
        loaded(saved(nn.Sequential(nn.LazyLinear(2))))
    assert {one[:2] for one in refused.value.objects} == {
        ("0.weight", "torch.nn.parameter.UninitializedParameter"),
        ("0.bias", "torch.nn.parameter.UninitializedParameter"),
    }


def test_a_module_that_contains_itself_or_no_module_is_refused() -> None:
    for child in ("itself", 5):
        module = nn.Sequential(nn.ReLU())
        module[0]._modules["parent"] = module if child == "itself" else child
        with pytest.raises(NotPlain) as refused:
            loaded(saved([module]))
        assert [one[0] for one in refused.value.objects] == ["0"]


def test_modules_nested_too_deep_or_with_too_many_names_are_refused() -> None:
    module = nn.Linear(1, 1)
    for _ in range(12):
        module = nn.Sequential(module, module)
    root = interpret(pickled(module), Limits()).root
    with pytest.raises(LimitExceeded):
        make_plain(root, Limits()._replace(visits=10_000))
    with pytest.raises(LimitExceeded):
        make_plain(interpret(pickled(module), Limits()).root, Limits()._replace(depth=12))


def pickled(module: object) -> bytes:
    # The tensors are not needed.
    for one in module.modules():
        one._parameters.clear()
    return pickle.dumps(module, 2)


# --- optimizers ------------------------------------------------------------------------------------------------------


def stepped(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": module[1].parameters(), "lr": 0.5}, {"params": [module[0].weight], "name": "first"}]
    optimizer = kind(groups, lr=0.1)
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers(kind) -> None:
    module, optimizer = stepped(kind)
    found = plain({"model": module, "optimizer": optimizer})
    assert same(found["optimizer"], optimizer.state_dict())
    again = kind(copy.deepcopy(optimizer.param_groups), lr=1.0)
    again.load_state_dict(found["optimizer"])


def test_an_optimizer_of_another_library(foreign) -> None:
    kind = foreign("library.Lion", torch.optim.SGD)
    _, optimizer = stepped(kind)
    assert same(plain([optimizer]), [optimizer.state_dict()])


def test_a_state_dict_in_an_object_keeps_its_numbers(foreign) -> None:
    kept = foreign("library.Kept")()
    kept.rate, kept.state, kept.param_groups = 0.5, {0: {"step": 1}, "global": 2}, [{"lr": 0.1, "params": [0]}]
    assert plain([kept]) == [vars(kept)]


def test_an_optimizer_with_state_of_no_group_is_refused() -> None:
    _, optimizer = stepped()
    optimizer.param_groups.pop()
    with pytest.raises(NotPlain) as refused:
        loaded(saved({"optimizer": optimizer}))
    assert [one[:2] for one in refused.value.objects] == [("optimizer", "torch.optim.adamw.AdamW")]


@pytest.mark.parametrize("groups", [[5], [{"lr": 0.1}]])
def test_an_object_without_parameters_keeps_its_attributes(foreign, groups) -> None:
    made = foreign("library.Optimizer")()
    made.state, made.param_groups, made.rate = {}, groups, 0.5
    assert plain([made]) == [vars(made)]


class Warmup:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


def ramp(step: int) -> float:
    return float(step)


SCHEDULERS = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [Warmup(5), ramp]),
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10),
    lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.1),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)], [5]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=range(len(SCHEDULERS)))
@pytest.mark.filterwarnings("ignore")
def test_schedulers(make) -> None:
    scheduler = make(stepped()[1])
    for attribute in ("step", "zero_grad"):  # wrapped by the scheduler of some versions
        scheduler.optimizer.__dict__.pop(attribute, None)
    state = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}  # SWALR of torch 2.4
    assert same(plain({"scheduler": scheduler}), {"scheduler": state})


def test_a_scheduler_of_another_library(foreign) -> None:
    scheduler = foreign("library.Scheduler")()
    scheduler.optimizer, scheduler.last_epoch, scheduler._step_count = stepped()[1], 3, 4
    assert plain([scheduler]) == [{"last_epoch": 3, "_step_count": 4}]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_grad_scalers(is_enabled) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7, enabled=is_enabled)
    assert plain({"scaler": scaler}) == {"scaler": scaler.state_dict()}
