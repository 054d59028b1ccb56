"""User code in a backward on a simulated device: hooks that raise, and gradients on other devices."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
import torch

from ckptmove.simulation.backward import is_running
from ckptmove.simulation.errors import CrossDeviceError, WrongGradient


class Faulty(Exception):
    """The exception of a hook."""


def raising(*_given):
    raise Faulty("in a hook")


def of_a_leaf(parameter):
    parameter.register_hook(raising)
    return parameter * 2


def of_a_tensor(parameter):
    made = parameter * 2
    made.register_hook(raising)
    return made


def after_accumulation(parameter):
    parameter.register_post_accumulate_grad_hook(raising)
    return parameter * 2


def of_several(parameter):
    made = parameter * 2
    torch.autograd.graph.register_multi_grad_hook((parameter, made), raising)
    return made


def of_a_module(parameter):
    module = torch.nn.Linear(2, 2).to(parameter.device)
    module.register_full_backward_hook(raising)
    return module(parameter)


def before_a_module(parameter):
    module = torch.nn.Linear(2, 2).to(parameter.device)
    module.register_full_backward_pre_hook(raising)
    return module(parameter)


def of_a_node(parameter):
    made = parameter * 2
    made.grad_fn.register_hook(raising)
    return made


def before_a_node(parameter):
    made = parameter * 2
    made.grad_fn.register_prehook(raising)
    return made


def of_the_node_of_a_leaf(parameter):
    made = parameter * 2
    made.grad_fn.next_functions[0][0].register_hook(raising)
    return made


def of_what_was_saved(parameter):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, raising):
        return parameter.exp()


def through_a_module(parameter, register):
    handle = register(raising)
    try:
        return torch.nn.Linear(2, 2).to(parameter.device)(parameter)
    finally:
        handle.remove()


def of_every_module(parameter):
    return through_a_module(parameter, torch.nn.modules.module.register_module_full_backward_hook)


def before_every_module(parameter):
    return through_a_module(parameter, torch.nn.modules.module.register_module_full_backward_pre_hook)


def of_every_module_forward(parameter):
    return through_a_module(parameter, torch.nn.modules.module.register_module_forward_hook)


HOOKS = [
    of_a_leaf,
    of_a_tensor,
    after_accumulation,
    of_several,
    of_a_module,
    before_a_module,
    of_a_node,
    before_a_node,
    of_the_node_of_a_leaf,
    of_what_was_saved,
    of_every_module,
    before_every_module,
    of_every_module_forward,
]


@pytest.mark.parametrize("made", HOOKS)
def test_what_a_hook_raises_is_raised_by_the_backward(cuda, made):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, 2, device=cuda.device))
        with pytest.raises(Faulty, match="in a hook") as caught:
            made(parameter).sum().backward()
        assert [entry.name for entry in caught.traceback][-1] == "raising"
        assert not is_running()
        torch.nn.Parameter(torch.ones(2, device=cuda.device)).sum().backward()  # nothing is left of it


class Inner(torch.autograd.Function):
    """Calls backward in its backward, and appends its exception, if any, to a list."""

    raised: ClassVar[list[BaseException]] = []

    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inside = torch.nn.Parameter(torch.ones(2, device=grad.device))
            loss = of_a_node(inside).sum()
        try:
            loss.backward()
        except Faulty as error:
            Inner.raised.append(error)
        return grad * 2


def test_a_backward_inside_of_another_raises_where_it_was_called(cuda):
    Inner.raised.clear()
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        Inner.apply(parameter).sum().backward()
        assert [str(error) for error in Inner.raised] == ["in a hook"]
        assert parameter.grad.tolist() == [2, 2], "what was caught inside is no concern of the outer one"


def test_one_that_nobody_catches_goes_through_both(cuda):
    def inside(*_given):
        with torch.enable_grad():
            of_a_node(torch.nn.Parameter(torch.ones(2, device=cuda.device))).sum().backward()

    with cuda:
        made = torch.nn.Parameter(torch.ones(2, device=cuda.device)) * 2
        made.grad_fn.register_hook(inside)
        with pytest.raises(Faulty, match="in a hook"):
            made.sum().backward()
        assert not is_running()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_keeps_its_hooks_where_its_model_is_moved(cuda, register):
    model = torch.nn.Linear(2, 2)
    ran = []
    getattr(model.weight, register)(lambda given: ran.append(given.device))
    with cuda:
        model.to(cuda.device)
        model(torch.ones(1, 2, device=cuda.device)).sum().backward()
        assert ran == [cuda.device]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_whatever_is_raised_ends_a_backward(cuda, kind):
    def interrupt(*_given):
        raise kind

    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        made = parameter * 2
        made.grad_fn.register_hook(interrupt)
        with pytest.raises(kind):
            made.sum().backward()


def test_a_hook_raises_outside_of_the_device_as_it_does_without_one(cuda):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2))
        made = of_a_tensor(parameter)
    with pytest.raises(Faulty, match="in a hook"):
        made.sum().backward()


def test_an_engine_that_nobody_wrapped_does_not_end_the_process(cuda):
    with cuda:
        made = of_a_node(torch.nn.Parameter(torch.ones((), device=cuda.device)))
        with pytest.raises(SystemError):
            torch.autograd.graph._engine_run_backward(
                (made,), (torch.ones((), device=cuda.device),), False, False, (), True, True
            )


def test_a_failure_of_the_engine_itself_is_raised_as_it_is(cuda, monkeypatch):
    def fail(*_given, **_options):
        raise SystemError("no memory")

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", fail)
    with cuda, pytest.raises(SystemError, match="no memory"):
        torch.nn.Parameter(torch.ones((), device=cuda.device)).backward()


def test_the_first_of_two_is_raised(cuda):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        parameter.register_hook(lambda grad: grad * torch.ones(2))
        parameter.register_hook(raising)
        with pytest.raises(CrossDeviceError):
            (parameter * 2).sum().backward()


def test_hooks_do_what_they_do(cuda):
    with cuda:
        parameter = torch.nn.Parameter(torch.ones(2, device=cuda.device))
        handle = parameter.register_hook(lambda grad: grad * 3)
        (parameter * 2).sum().backward()
        assert parameter.grad.tolist() == [6, 6]
        handle.remove()
        (parameter * 2).sum().backward()
        assert parameter.grad.tolist() == [8, 8]


def test_a_hook_that_is_called_by_itself_raises_there(cuda):
    called = []
    with cuda:
        module = torch.nn.Linear(2, 2)
        module.register_full_backward_hook(raising)
        called += module._backward_hooks.values()
    with pytest.raises(Faulty):
        called[0](module, (), ())


class Elsewhere(torch.autograd.Function):
    """Returns its first gradient on the CPU."""

    @staticmethod
    def forward(ctx, number, values, more):
        return values * number + more

    @staticmethod
    def backward(ctx, grad):
        return None, grad, grad.cpu()


class Short(Elsewhere):
    """Returns one value for one input."""

    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.cpu()


def ones(device, *shape):
    return torch.nn.Parameter(torch.ones(shape, device=device))


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_gradient_that_is_elsewhere_is_refused_in_torchs_words(cuda, is_leaf):
    with cuda:
        values = ones(cuda.device, 2)
        given = values if is_leaf else values * 2
        said = "Function ElsewhereBackward returned an invalid gradient at index 1 - expected device cuda:0 but got cpu"
        with pytest.raises(WrongGradient, match=f"^{re.escape(said)}$") as caught:
            Elsewhere.apply(2, ones(cuda.device, 2), given).sum().backward()
    assert (caught.value.function, caught.value.argument, caught.value.index) == ("Elsewhere", "grad", 1)
    assert caught.value.home[0] == __file__
    assert values.grad is None


def test_one_that_is_not_needed_may_be_anywhere(cuda):
    with cuda:
        values = ones(cuda.device, 2)
        Elsewhere.apply(2, values, torch.ones(2, device=cuda.device)).sum().backward()
        assert values.grad.tolist() == [1, 1]


def test_one_without_dimensions_is_moved_as_torch_moves_it(cuda):
    with cuda:
        values = ones(cuda.device)
        Short.apply(values).backward()
        assert (values.grad.device, values.grad.item()) == (cuda.device, 1)


def test_one_for_the_cpu_may_not_be_on_the_target(cuda):
    class Back(Short):
        @staticmethod
        def backward(ctx, *grads):
            return grads[0].to(cuda.device)

    with cuda, pytest.raises(WrongGradient, match="expected device cpu but got cuda:0") as caught:
        Back.apply(ones("cpu", 2)).sum().backward()
    assert caught.value.argument == "grads[0]"


def test_what_torch_says_of_too_few_it_says_itself(cuda):
    class Few(Elsewhere):
        @staticmethod
        def backward(ctx, grad):
            return (None, grad)

    with cuda, pytest.raises(RuntimeError, match="returned an incorrect number of gradients"):
        Few.apply(2, ones(cuda.device, 2), ones(cuda.device, 2)).sum().backward()


def test_what_is_no_python_function_is_taken_as_it_is(cuda):
    class Called:
        def __call__(self, ctx, grad):
            return grad.cpu()

    class Object(Short):
        backward = Called()

    with cuda, pytest.raises(WrongGradient) as caught:
        Object.apply(ones(cuda.device, 2)).sum().backward()
    assert caught.value.home is None


def test_torch_is_as_it_was_after_the_device(cuda):
    function = torch.autograd.function.BackwardCFunction
    apply = function.apply
    with cuda:
        assert function.apply is not apply
    assert function.apply is apply
