from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.conversion.plan import plan_move
from ckptmove.errors import UnsupportedDtype
from ckptmove.model import (
    FlagValue,
    Inventory,
    Mention,
    OptimizerRecord,
    ParamGroup,
    StateEntry,
    StorageRef,
    TensorRecord,
)
from ckptmove.moves import Kept, MoveRequest, StorageEdit

TO_CUDA = MoveRequest(to="cuda:0")
TO_MPS = MoveRequest(to="mps")
TO_CPU = MoveRequest(to="cpu")


class Draft:
    """A checkpoint, record by record."""

    def __init__(self):
        self.tensors = []
        self.storages = {}
        self.optimizers = []
        self.mentions = []

    def storage(self, key, device="cpu", dtype="float32", *, classes=True):
        site = 100 * (len(self.storages) + 1)
        self.storages[key] = StorageRef(key, device, dtype, 2, 8, (site,), (site + 1,) if classes else ())
        return self.storages[key]

    def tensor(self, name, device="cpu", role="model", *, storage=None, shape=(2,), dtype="float32", **fields):
        held = self.storages.get(storage or name) or self.storage(storage or name, device, dtype)
        record = TensorRecord(name, role, held.device, dtype, shape, (1,) * len(shape), held.key, 0, 8, **fields)
        self.tensors.append(record)
        return record

    def adam(self, device="cpu", *, step="cpu", flags=(), algorithm="Adam", where="opt"):
        path = f"{where}.state.0"
        tensors = (
            ("step", self.tensor(f"{path}.step", step, "optimizer", shape=())),
            ("exp_avg", self.tensor(f"{path}.exp_avg", device, "optimizer")),
        )
        settled = tuple(FlagValue(name, value, 9000 + index) for index, (name, value) in enumerate(flags))
        group = ParamGroup(f"{where}.param_groups.0", ("0",), (), (), settled)
        self.optimizers.append(OptimizerRecord(where, (group,), (StateEntry("0", tensors, ()),), algorithm))

    def mention(self, value, kind="torch.device", site=5000, index_site=None, tuple_site=5010, where="device"):
        self.mentions.append(Mention(where, kind, value, site, index_site, tuple_site))

    def inventory(self):
        return Inventory(
            path="x.pt",
            container="torch-zip",
            layout="plain",
            size_bytes=1,
            tensors=tuple(self.tensors),
            storages=tuple(self.storages.values()),
            optimizers=tuple(self.optimizers),
            mentions=tuple(self.mentions),
        )

    def plan(self, request):
        return plan_move(self.inventory(), request)


@pytest.fixture
def draft():
    return Draft()


def moves(plan):
    return {edit.storage: (edit.source, edit.target, edit.reason) for edit in plan.edits}


def test_everything_goes_to_the_target_but_what_belongs_elsewhere(draft):
    draft.tensor("model.w")
    draft.adam()
    draft.tensor("rng", role="rng")
    plan = draft.plan(TO_CUDA)
    assert moves(plan) == {
        "model.w": ("cpu", "cuda:0", "target"),
        "opt.state.0.exp_avg": ("cpu", "cuda:0", "target"),
    }
    assert plan.kept == (Kept("opt.state.0.step", "cpu", "optimizer-scalar"), Kept("rng", "cpu", "rng-state"))
    assert plan.edits[0] == StorageEdit("model.w", ("model.w",), "cpu", "cuda:0", 8, "target", None, (100,), (101,))
    assert not plan.flags
    assert plan.request is TO_CUDA


def test_a_file_that_map_location_spoiled_is_mended(draft):
    draft.tensor("model.w", "cuda:0")
    draft.adam("cuda:0", step="cuda:0")
    draft.tensor("rng", "cuda:0", role="rng")
    repairs = {
        "opt.state.0.step": ("cuda:0", "cpu", "optimizer-scalar"),
        "rng": ("cuda:0", "cpu", "rng-state"),
    }
    assert moves(draft.plan(TO_CUDA)) == repairs
    assert moves(draft.plan(MoveRequest(to=None, mapping=(("cuda:5", "cpu"),)))) == repairs
    plan = draft.plan(TO_CPU)
    assert moves(plan).keys() == {"model.w", "opt.state.0.exp_avg", "opt.state.0.step", "rng"}
    assert not plan.kept


def test_what_lies_there_already_is_not_said_to_be_kept(draft):
    draft.tensor("model.w", "cuda:0")
    plan = draft.plan(TO_CUDA)
    assert plan.is_empty
    assert not plan.kept
    assert draft.plan(MoveRequest(to=None, mapping=(("mps", "cpu"),))).is_empty


def test_views_move_with_their_storage(draft):
    draft.tensor("model.head", "cuda:1", storage="0")
    draft.tensor("model.tail", "cuda:1", storage="0")
    [edit] = draft.plan(TO_CUDA).edits
    assert (edit.storage, edit.names) == ("0", ("model.head", "model.tail"))


def test_the_highest_rule_decides_for_a_shared_storage(draft):
    draft.tensor("model.w", "cuda:1", storage="0")
    draft.tensor("ema.w", "cuda:1", storage="0")
    plan = draft.plan(MoveRequest(to="cpu", keep=("ema.*",)))
    assert plan.is_empty
    assert plan.kept == (Kept("model.w", "cuda:1", "keep"), Kept("ema.w", "cuda:1", "keep"))


def test_keep_beats_map_and_map_beats_to(draft):
    for name in ("a", "b", "c"):
        draft.tensor(name, {"c": "cuda:1"}.get(name, "cuda:0"))
    plan = draft.plan(MoveRequest(to="mps", mapping=(("cuda:0", "cpu"),), keep=("a",)))
    assert moves(plan) == {"b": ("cuda:0", "cpu", "map"), "c": ("cuda:1", "mps", "target")}
    assert plan.kept == (Kept("a", "cuda:0", "keep"),)


def test_a_mapping_alone_leaves_the_rest(draft):
    draft.tensor("a", "cuda:0")
    draft.tensor("b", "cuda:1")
    plan = draft.plan(MoveRequest(to=None, mapping=(("cuda:1", "cuda:0"),)))
    assert moves(plan) == {"b": ("cuda:1", "cuda:0", "map")}
    assert not plan.kept


def test_meta_tensors_stay(draft):
    draft.tensors.append(TensorRecord("m", "model", "meta", "float32", (2,), (1,), None, 0, 0, "meta"))
    plan = draft.plan(TO_CPU)
    assert plan.is_empty
    assert plan.kept == (Kept("m", "meta", "without-bytes"),)


def test_the_parts_of_a_sparse_tensor_move_together(draft):
    parts = tuple(draft.tensor(f"s.{label}", "cuda:0") for label in ("indices", "values"))
    draft.tensors = [parts[1]._replace(name="s", kind="sparse_coo", parts=parts)]
    plan = draft.plan(TO_CPU)
    assert [(edit.storage, edit.names) for edit in plan.edits] == [("s.indices", ("s",)), ("s.values", ("s",))]


def test_a_storage_of_two_parts_names_its_tensor_once(draft):
    parts = tuple(draft.tensor(f"s.{label}", "cuda:0", storage="0") for label in ("indices", "values"))
    draft.tensors = [parts[1]._replace(name="s", kind="sparse_coo", parts=parts)]
    assert [edit.names for edit in draft.plan(TO_CPU).edits] == [("s",)]


def test_the_sizes_of_a_nested_tensor_stay_where_torch_keeps_them(draft):
    parts = tuple(draft.tensor(f"n.{label}") for label in ("buffer", "sizes", "strides", "storage_offsets"))
    draft.tensors = [parts[0]._replace(name="n", kind="nested", parts=parts)]
    plan = draft.plan(TO_CUDA)
    assert moves(plan) == {"n.buffer": ("cpu", "cuda:0", "target")}
    assert not plan.kept


def test_a_tensor_that_no_storage_tags_moves_by_its_own_device(draft):
    draft.storage("0")
    on_xla = TensorRecord("x", "model", "xla:0", "float32", (2,), (1,), "0", 0, 8, "device-data", device_site=77)
    draft.tensors += [on_xla, on_xla._replace(name="tied"), on_xla._replace(name="n", storage=None, device_site=78)]
    plan = draft.plan(TO_CUDA)
    assert plan.edits == (
        StorageEdit("x", ("x", "tied"), "xla:0", "cuda:0", 8, "target", None, (77,), ()),
        StorageEdit("n", ("n",), "xla:0", "cuda:0", 8, "target", None, (78,), ()),
    )
    kept = draft.plan(MoveRequest(to="cuda:0", keep=("*",)))
    assert kept.is_empty
    assert [entry.name for entry in kept.kept] == ["x", "tied", "n"]


def test_a_storage_that_no_tensor_views_goes_as_its_device(draft):
    draft.storage("0", "cuda:1")
    assert moves(draft.plan(TO_CPU)) == {"0": ("cuda:1", "cpu", "target")}
    assert moves(draft.plan(MoveRequest(to=None, mapping=(("cuda:1", "mps"),)))) == {"0": ("cuda:1", "mps", "map")}
    assert draft.plan(MoveRequest(to=None, mapping=(("cuda:0", "mps"),))).is_empty


# --- dtypes ----------------------------------------------------------------------------------------------------------


def test_what_the_target_cannot_hold_is_refused_with_the_list(draft):
    draft.tensor("a", dtype="float64", storage="0")
    draft.tensor("b", dtype="float64", storage="0")
    draft.tensor("c", dtype="complex128")
    draft.tensor("d")
    with pytest.raises(UnsupportedDtype) as caught:
        draft.plan(TO_MPS)
    assert caught.value.target == "mps"
    assert caught.value.tensors == (("a", "float64"), ("b", "float64"), ("c", "complex128"))


def test_a_cast_is_part_of_the_move(draft):
    draft.tensor("a", dtype="float64")
    draft.tensor("b", "mps", dtype="complex128")
    draft.tensor("c")
    plan = draft.plan(MoveRequest(to="mps", cast=True))
    assert [(edit.storage, edit.source, edit.target, edit.cast) for edit in plan.edits] == [
        ("a", "cpu", "mps", ("float64", "float32")),
        ("b", "mps", "mps", ("complex128", "complex64")),
        ("c", "cpu", "mps", None),
    ]


def test_what_stays_elsewhere_needs_no_cast(draft):
    draft.tensor("w")
    draft.tensor("kept", dtype="float64")
    plan = draft.plan(MoveRequest(to="mps", keep=("kept",)))
    assert moves(plan).keys() == {"w"}
    assert draft.plan(TO_CUDA).edits[1].cast is None


def test_a_cast_needs_a_storage_class_to_change(draft):
    draft.storage("0", dtype="float64", classes=False)
    with pytest.raises(UnsupportedDtype) as caught:
        draft.plan(MoveRequest(to="mps", cast=True))
    assert caught.value.tensors == (("0", "float64"),)


# --- related values --------------------------------------------------------------------------------------------------


def flags(plan):
    return {edit.where: (edit.source, edit.target, edit.reason) for edit in plan.flags}


def test_a_flag_that_the_target_refuses_is_cleared(draft):
    draft.adam("cuda:0", step="cuda:0", flags=(("capturable", True), ("fused", True)))
    plan = draft.plan(TO_CPU)
    assert flags(plan) == {"opt.param_groups.0.capturable": ("True", "False", "group-flag")}
    assert plan.flags[0].site == 9000
    assert plan.flags[0].mention is None
    assert not draft.plan(MoveRequest(to="cuda:1")).flags


@pytest.mark.parametrize(
    ("value", "tensors", "request_", "target"),
    [
        ("cuda:0", ["cuda:0"], TO_MPS, "mps"),
        ("cuda:0", ["cuda:0"], TO_CUDA, None),
        ("cuda", ["cuda:0"], TO_CUDA, None),
        ("cuda", ["cuda:3"], MoveRequest(to="cuda:1"), "cuda:1"),
        ("cuda", ["cuda:3"], TO_CPU, "cpu"),
        ("cuda", ["cuda:1"], MoveRequest(to=None, mapping=(("cuda:1", "cpu"),)), "cpu"),
        ("cuda:0", ["cuda:1"], MoveRequest(to=None, mapping=(("cuda:1", "cpu"),)), None),
        ("cuda", ["cpu"], MoveRequest(to="cuda:1"), "cuda:1"),
        ("cuda", ["cpu"], MoveRequest(to="cuda:1", mapping=(("cuda:0", "cuda:0"),)), "cuda:1"),
        ("cuda:7", ["cpu"], TO_CPU, "cpu"),
        ("cuda:7", ["cpu"], MoveRequest(to=None, mapping=(("cuda:7", "cpu"),)), "cpu"),
        ("mps:0", ["mps"], TO_MPS, None),
        ("cpu", ["cpu"], TO_CUDA, "cuda:0"),
        ("cpu", ["cuda:1"], TO_CUDA, None),
        ("cpu", ["cuda:1"], TO_CPU, None),
        ("meta", ["cpu"], TO_CUDA, None),
        ("cuda:0", ["cuda:0"], MoveRequest(to="cpu", keep=("w0",)), None),
        ("cuda:0", ["cuda:0", "cuda:0"], MoveRequest(to="cpu", keep=("w0",)), "cpu"),
        ("cuda:0", ["cuda:0"], MoveRequest(to="cpu", keep=("device",)), None),
    ],
)
def test_a_named_device_follows_its_tensors(draft, value, tensors, request_, target):
    for index, device in enumerate(tensors):
        draft.tensor(f"w{index}", device)
    draft.mention(value)
    expected = {} if target is None else {"device": (value, target, "device-mention")}
    plan = draft.plan(request_)
    assert flags(plan) == expected
    assert [edit.mention for edit in plan.flags] == draft.mentions[: len(expected)]


def test_the_cpu_is_not_left_because_other_tensors_leave_it(draft):
    draft.tensor("loss", role="other")
    draft.tensor("w", "cuda:0")
    draft.tensors.append(TensorRecord("m", "model", "meta", "float32", (2,), (1,), None, 0, 0, "meta"))
    draft.mention("cpu")
    assert not draft.plan(TO_CUDA).flags


def test_a_device_that_only_repaired_tensors_lay_on_is_left(draft):
    draft.tensor("w")
    draft.tensor("rng", "cuda:1", role="rng")
    draft.mention("cuda:1")
    assert flags(draft.plan(TO_CPU)) == {"device": ("cuda:1", "cpu", "device-mention")}


def test_strings_are_rewritten_on_request_only_and_ids_never(draft):
    draft.tensor("w", "cuda:0")
    draft.mention("cuda:0", kind="string", where="args.device", tuple_site=None)
    draft.mention("[0, 1]", kind="device_ids", where="args.device_ids")
    assert not draft.plan(TO_CPU).flags
    plan = draft.plan(MoveRequest(to="cpu", rewrite_strings=True))
    assert flags(plan) == {"args.device": ("cuda:0", "cpu", "device-mention")}


def test_a_mention_without_a_place_is_reported_only(draft):
    draft.tensor("w", "cuda:0")
    draft.mention("cuda:0", site=None)
    draft.mention("cuda:0", tuple_site=None)
    assert not draft.plan(TO_CPU).flags


# --- a plan that was carried out -------------------------------------------------------------------------------------


def carried_out(inventory, plan):
    tags = {edit.storage: edit.target for edit in plan.edits}
    values = {edit.where: edit.target for edit in plan.flags}

    def moved(record):
        return record._replace(device=tags.get(record.storage, record.device))

    optimizers = tuple(
        optimizer._replace(
            groups=tuple(
                group._replace(
                    flags=tuple(
                        flag._replace(value=flag.value and f"{group.where}.{flag.name}" not in values)
                        for flag in group.flags
                    ),
                )
                for group in optimizer.groups
            ),
            state=tuple(
                entry._replace(tensors=tuple((key, moved(record)) for key, record in entry.tensors))
                for entry in optimizer.state
            ),
        )
        for optimizer in inventory.optimizers
    )
    return replace(
        inventory,
        tensors=tuple(map(moved, inventory.tensors)),
        storages=tuple(
            storage._replace(device=tags.get(storage.key, storage.device)) for storage in inventory.storages
        ),
        optimizers=optimizers,
        mentions=tuple(
            mention._replace(value=values.get(mention.where, mention.value)) for mention in inventory.mentions
        ),
    )


DEVICES = st.sampled_from(["cpu", "cuda:0", "cuda:1", "mps", "cuda", "odd"])
TARGETS = st.sampled_from(["cpu", "cuda:0", "cuda:1", "mps"])
ROLES = st.sampled_from(["model", "optimizer", "rng", "ema"])


@st.composite
def checkpoints(draw):
    draft = Draft()
    for index, (device, role, shared) in enumerate(
        draw(st.lists(st.tuples(DEVICES, ROLES, st.booleans()), max_size=5))
    ):
        draft.tensor(f"{role}.{index}", device, role, storage="shared" if shared else None)
    for index in range(draw(st.integers(0, 2))):
        draft.adam(
            draw(DEVICES),
            step=draw(DEVICES),
            flags=(("capturable", draw(st.booleans())), ("fused", draw(st.booleans()))),
            algorithm=draw(st.sampled_from(["Adam", "ASGD", None])),
            where=f"opt{index}",
        )
    for index, value in enumerate(draw(st.lists(DEVICES, max_size=3))):
        draft.mention(value, draw(st.sampled_from(["torch.device", "string"])), where=f"args.{index}")
    return draft.inventory()


@st.composite
def requests(draw):
    """Requests that send nothing away from where they send something else."""
    to = draw(st.none() | TARGETS)
    globs = draw(st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:*", "mps", "odd"]), max_size=3))
    mapping = tuple((glob, draw(TARGETS)) for glob in globs)
    keep = tuple(draw(st.lists(st.sampled_from(["ema.*", "opt0.*", "*.step", "args.1"]), max_size=2)))
    return MoveRequest(to=to, mapping=mapping, keep=keep, rewrite_strings=draw(st.booleans()))


def sends_on(request):
    from ckptmove.conversion.policy import Policy

    policy = Policy(Draft().inventory(), request)
    ends = {request.to, *(target for _, target in request.mapping)} - {None}
    return any(policy.destination(end) not in {None, end} for end in ends)


@given(checkpoints(), requests())
def test_a_plan_carried_out_leaves_nothing_to_do(inventory, request):
    if sends_on(request):
        return
    once = plan_move(inventory, request)
    assert once == plan_move(inventory, request)
    again = plan_move(carried_out(inventory, once), request)
    assert again.is_empty, again
