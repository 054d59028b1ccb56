from __future__ import annotations

import pytest

from ckptmove.conversion.policy import DESTINATION_RULES, DEVICE_MENTION, GROUP_FLAG, MESH_TYPE, RULES, Policy
from ckptmove.model import FlagValue, Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord
from ckptmove.moves import MoveRequest


def tensor(name, device="cuda:0", role="model", shape=(2,), **fields):
    return TensorRecord(name, role, device, "float32", shape, (1,) * len(shape), name, 0, 8, **fields)


def optimizer(algorithm, entries, *, flags=(), where="opt"):
    group = ParamGroup(
        f"{where}.param_groups.0",
        tuple(str(index) for index in range(len(entries))),
        (),
        (),
        tuple(FlagValue(name, value, 7) for name, value in flags),
    )
    state = tuple(
        StateEntry(str(index), tuple((key, record) for key, record in entry), ()) for index, entry in enumerate(entries)
    )
    return OptimizerRecord(where, (group,), state, algorithm)


def adam_entry(index=0, device="cuda:0", step_device="cpu"):
    path = f"opt.state.{index}"
    return (
        ("step", tensor(f"{path}.step", step_device, "optimizer", ())),
        ("exp_avg", tensor(f"{path}.exp_avg", device, "optimizer")),
    )


def policy_for(request, *optimizers, tensors=()):
    held = [record for each in optimizers for entry in each.state for _, record in entry.tensors]
    inventory = Inventory(
        path="x", container="torch-zip", layout="plain", size_bytes=0, tensors=(*tensors, *held), optimizers=optimizers
    )
    return Policy(inventory, request)


def decide(policy, record):
    rank, tag = policy.decide(record)
    return RULES[rank].name, tag


def test_the_rules_can_be_printed_in_their_order():
    assert [rule.name for rule in RULES] == [
        "keep", "without-bytes", "rng-state", "nested-sizes", "device-mesh", "optimizer-scalar", "param-group", "map",
        "target", "unmapped",
    ]  # fmt: skip
    assert all(rule.reason and "\n" not in rule.reason for rule in (*RULES, GROUP_FLAG, DEVICE_MENTION, MESH_TYPE))
    assert {rule.name for rule in RULES} > DESTINATION_RULES


@pytest.mark.parametrize(
    ("request_", "record", "expected"),
    [
        (MoveRequest(to="mps"), tensor("w"), ("target", "mps")),
        (MoveRequest(to="mps", keep=("w*",)), tensor("w"), ("keep", "cuda:0")),
        (MoveRequest(to="mps", keep=("v", "u")), tensor("w"), ("target", "mps")),
        (MoveRequest(to="mps", mapping=(("cuda:*", "cpu"),)), tensor("w"), ("map", "cpu")),
        (MoveRequest(to="mps", mapping=(("cuda:0", "xpu:0"), ("*", "cpu"))), tensor("w"), ("map", "xpu:0")),
        (MoveRequest(to="mps", mapping=(("cuda:0", "xpu:0"), ("cuda:0", "cpu"))), tensor("w"), ("map", "xpu:0")),
        (MoveRequest(to="mps", mapping=(("cuda:*", "cpu"),), keep=("w",)), tensor("w"), ("keep", "cuda:0")),
        (MoveRequest(to=None, mapping=(("cuda:1", "cpu"),)), tensor("w"), ("unmapped", "cuda:0")),
        (MoveRequest(to="mps"), tensor("w", "meta"), ("without-bytes", "meta")),
        (MoveRequest(to=None, mapping=(("*", "cpu"),)), tensor("w", "meta"), ("without-bytes", "meta")),
        (MoveRequest(to="mps"), tensor("g", "cpu", "rng"), ("rng-state", "cpu")),
        (MoveRequest(to="cpu"), tensor("g", "cuda:0", "rng"), ("rng-state", "cpu")),
        (MoveRequest(to=None, mapping=(("cpu", "mps"),)), tensor("g", "cpu", "rng"), ("rng-state", "cpu")),
        (MoveRequest(to=None, mapping=(("cuda:7", "cpu"),)), tensor("g", "cuda:0", "rng"), ("rng-state", "cpu")),
        (MoveRequest(to="mps", keep=("g",)), tensor("g", "cuda:0", "rng"), ("keep", "cuda:0")),
    ],
)
def test_the_first_rule_that_applies_decides(request_, record, expected):
    assert decide(policy_for(request_, tensors=(record,)), record) == expected


def test_a_tensor_whose_bytes_are_nowhere_stays():
    record = TensorRecord("w", "model", "xla:0", "float32", (1,), (1,), None, 0, 4, "wrapper-subclass")
    assert decide(policy_for(MoveRequest(to="cpu"), tensors=(record,)), record) == ("without-bytes", "xla:0")


def home_of(name, algorithm, entry, request, flags=()):
    policy = policy_for(request, optimizer(algorithm, [entry], flags=flags))
    return policy.homes.get(f"opt.state.0.{name}"), [where for where, _ in policy.refused]


@pytest.mark.parametrize(
    ("algorithm", "flags", "to", "home", "refused"),
    [
        ("Adam", (), "mps", "cpu", []),
        ("Adam", (("capturable", False), ("fused", False)), "cuda:1", "cpu", []),
        ("Adam", (("capturable", True),), "cuda:1", "cuda:1", []),
        ("Adam", (("capturable", True),), "cpu", "cpu", ["opt.param_groups.0.capturable"]),
        ("Adam", (("capturable", True),), "mps", "cpu", ["opt.param_groups.0.capturable"]),
        ("Adam", (("fused", True),), "mps", "mps", []),
        ("Adam", (("fused", True),), "cpu", "cpu", []),
        ("Adam", (("capturable", True), ("fused", True)), "mps", "mps", ["opt.param_groups.0.capturable"]),
        ("ASGD", (), "mps", "mps", []),
        ("ASGD", (("capturable", True),), "mps", "mps", ["opt.param_groups.0.capturable"]),
        ("Adafactor", (), "cuda:1", "cpu", []),
        (None, (), "cuda:1", "cpu", []),
        ("SparseAdam", (), "cuda:1", "cpu", []),
    ],
)
def test_step_lies_where_its_optimizer_would_create_it(algorithm, flags, to, home, refused):
    entry = adam_entry(step_device="cuda:0")
    assert home_of("step", algorithm, entry, MoveRequest(to=to), flags) == (home, refused)


def test_every_scalar_of_an_optimizer_has_its_home():
    entry = (
        ("step", tensor("opt.state.0.step", role="optimizer", shape=())),
        ("mu_product", tensor("opt.state.0.mu_product", role="optimizer", shape=(1,))),
        ("exp_avg", tensor("opt.state.0.exp_avg", role="optimizer", shape=())),
    )
    policy = policy_for(MoveRequest(to="cuda:1"), optimizer("NAdam", [entry]))
    assert policy.homes == {"opt.state.0.step": "cpu", "opt.state.0.mu_product": "cpu"}
    stranger = policy_for(MoveRequest(to="cuda:1"), optimizer(None, [entry]))
    assert stranger.homes == {"opt.state.0.step": "cpu"}


def test_a_step_of_many_elements_is_no_counter():
    entry = (("step", tensor("opt.state.0.step", role="optimizer", shape=(2, 2))), *adam_entry()[1:])
    assert home_of("step", "Adam", entry, MoveRequest(to="cuda:1")) == (None, [])


def test_the_moments_say_where_the_parameter_will_be():
    request = MoveRequest(to=None, mapping=(("cuda:0", "cuda:2"), ("cuda:1", "cuda:3")))
    both = optimizer("Adam", [adam_entry(0, "cuda:0"), adam_entry(1, "cuda:1")], flags=(("capturable", True),))
    assert policy_for(request, both).homes == {"opt.state.0.step": "cuda:2", "opt.state.1.step": "cuda:3"}


@pytest.mark.parametrize(
    ("request_", "home"),
    [
        (MoveRequest(to="cuda:1"), "cuda:1"),
        (MoveRequest(to=None, mapping=(("cuda:0", "xpu:0"),)), "xpu:0"),
        (MoveRequest(to=None, mapping=(("mps", "cpu"),)), "cuda:0"),
    ],
)
def test_without_moments_a_capturable_step_goes_as_its_device(request_, home):
    bare = (("step", tensor("opt.state.0.step", role="optimizer", shape=())),)
    meta = (*bare, ("exp_avg", tensor("opt.state.0.exp_avg", "meta", "optimizer")))
    for entry in (bare, meta):
        assert home_of("step", "Adam", entry, request_, (("capturable", True),)) == (home, [])


def test_one_moment_on_a_refusing_device_clears_the_flag_of_its_group():
    request = MoveRequest(to="cuda:0", keep=("opt.state.1.*",))
    mixed = optimizer("Adam", [adam_entry(0), adam_entry(1, "cpu")], flags=(("capturable", True),))
    policy = policy_for(request, mixed)
    assert [where for where, _ in policy.refused] == ["opt.param_groups.0.capturable"]
    assert policy.homes["opt.state.0.step"] == "cpu"


def test_a_fresh_optimizer_has_its_flags_settled_by_the_target():
    fresh = optimizer("Adam", [], flags=(("capturable", True),))
    assert len(policy_for(MoveRequest(to="cpu"), fresh).refused) == 1
    assert not policy_for(MoveRequest(to="cuda:0"), fresh).refused
    assert not policy_for(MoveRequest(to=None, mapping=(("cuda:*", "cpu"),)), fresh).refused


def test_a_kept_group_keeps_its_flags():
    request = MoveRequest(to="cpu", keep=("opt.*",))
    kept = optimizer("Adam", [adam_entry()], flags=(("capturable", True),))
    assert not policy_for(request, kept).refused


def test_state_of_no_group_is_not_capturable():
    record = optimizer("Adam", [adam_entry()], flags=(("capturable", True),))
    stray = OptimizerRecord("opt", record.groups, (StateEntry("9", record.state[0].tensors, ()),), "Adam")
    assert policy_for(MoveRequest(to="cuda:1"), stray).homes == {"opt.state.0.step": "cpu"}


def test_an_unknown_device_is_sent_nowhere_without_a_target():
    policy = policy_for(MoveRequest(to=None, mapping=(("cuda:0", "cpu"),)))
    assert policy.destination("cuda:0") == "cpu"
    assert policy.destination("cuda:1") is None
    assert policy.mapped("cuda:1") is None


# --- options that are tensors ----------------------------------------------------------------------------------------


def with_option(name="lr", device="cpu", *, moments="cuda:0", flags=(), shape=(), entries=True, **fields):
    """An optimizer with an option that is a tensor, and that option."""
    entry = [adam_entry(device=moments, step_device="cpu")] if entries else []
    option = tensor(f"opt.param_groups.0.{name}", device, "optimizer", shape, **fields)
    return optimizer("Adam", entry, flags=flags), option


@pytest.mark.parametrize(
    ("option", "to", "expected"),
    [
        # A CPU lr stays, with parameters on an accelerator or with parameters that leave the CPU.
        ({}, "cuda:0", ("param-group", "cpu")),
        ({}, "mps", ("param-group", "cpu")),
        ({"moments": "cpu"}, "cuda:0", ("param-group", "cpu")),
        ({"moments": "cpu", "shape": (1,)}, "cuda:0", ("param-group", "cpu")),
        ({"name": "betas.0", "moments": "cpu"}, "cuda:0", ("param-group", "cpu")),
        ({"entries": False}, "cuda:0", ("param-group", "cpu")),
        # A captured graph reads it on the device: it goes along with parameters that come from the CPU.
        ({"moments": "cpu", "flags": (("capturable", True),)}, "cuda:0", ("target", "cuda:0")),
        ({"moments": "cpu", "flags": (("fused", True),)}, "mps", ("target", "mps")),
        ({"entries": False, "flags": (("fused", True),)}, "cuda:0", ("target", "cuda:0")),
        ({"moments": "cpu", "flags": (("capturable", True),)}, "mps", ("param-group", "cpu")),  # the flag is cleared
        ({"flags": (("capturable", True),)}, "cuda:1", ("param-group", "cpu")),  # the run had it there
        # Most state has to be on the device of its parameter.
        ({"moments": "cpu", "shape": (3,)}, "cuda:0", ("target", "cuda:0")),
        ({"shape": (3,)}, "cuda:0", ("param-group", "cpu")),
        # An lr on an accelerator does not stay on a device that the target machine may lack.
        ({"device": "cuda:0"}, "cpu", ("target", "cpu")),
        ({"device": "cuda:0"}, "cuda:3", ("target", "cuda:3")),
        ({"device": "cuda:0"}, "mps", ("target", "mps")),
        # The parameters themselves, as a pickled optimizer lists them.
        ({"name": "params.0", "moments": "cpu"}, "cuda:0", ("target", "cuda:0")),
    ],
)
def test_torch_never_moves_an_option_of_a_group(option, to, expected):
    record, lr = with_option(**option)
    assert decide(policy_for(MoveRequest(to=to), record, tensors=(lr,)), lr) == expected


def test_a_mapping_does_not_take_an_option_from_the_cpu():
    record, lr = with_option(moments="cpu")
    assert decide(policy_for(MoveRequest(to=None, mapping=(("cpu", "cuda:0"),)), record, tensors=(lr,)), lr) == (
        "param-group", "cpu",
    )  # fmt: skip


def test_a_model_on_an_accelerator_says_where_parameters_without_state_are():
    record, lr = with_option(entries=False, flags=(("fused", True),))
    tensors = (tensor("model.w", "cuda:0"), lr)
    assert decide(policy_for(MoveRequest(to="cuda:0"), record, tensors=tensors), lr) == ("param-group", "cpu")


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("scheduler.base_lrs.0", (), ("param-group", "cpu")),
        ("scheduler._last_lr.0", (), ("param-group", "cpu")),
        ("scheduler._schedulers.1._last_lr.0", (), ("param-group", "cpu")),
        ("scheduler.base_lrs.7", (), ("param-group", "cpu")),  # of no group that is known
        ("scheduler.base_lrs.0", (("fused", True),), ("target", "cuda:0")),
        ("scheduler.best", (), ("target", "cuda:0")),
    ],
)
def test_the_copies_that_a_scheduler_keeps_follow_the_rates(name, flags, expected):
    record, _ = with_option(moments="cpu", flags=flags)
    rate = tensor(name, "cpu", "scheduler", ())
    assert decide(policy_for(MoveRequest(to="cuda:0"), record, tensors=(rate,)), rate) == expected


def test_a_rate_that_the_model_learns_goes_with_the_model():
    record, lr = with_option(moments="cpu")
    learned = tensor("model.lr", "cpu", shape=())._replace(storage=lr.storage)
    policy = policy_for(MoveRequest(to="cuda:0"), record, tensors=(learned, lr))
    assert not policy.group_options
    assert decide(policy, lr) == ("target", "cuda:0")


def test_an_option_without_a_storage_is_no_rate():
    record, lr = with_option(moments="cpu")
    assert not policy_for(MoveRequest(to="cuda:0"), record, tensors=(lr._replace(storage=None),)).group_options
