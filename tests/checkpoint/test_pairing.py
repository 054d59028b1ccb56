"""Pairing: each way to match parameters, and each reason for no match."""

from __future__ import annotations

from math import prod

import pytest

from ckptmove.checkpoint.pairing import match_unordered, moments, pair_all, parameter_shape
from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, StateEntry, TensorRecord


def tensor(name, shape, role="model", dtype="float32", **changes):
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    facts = {"storage": name, "storage_offset": 0, "nbytes": 4 * prod(shape), "device": "cpu", "stride": stride}
    return TensorRecord(name=name, role=role, dtype=dtype, shape=shape, **{**facts, **changes})


def entry(key, **shapes):
    scalars = tuple((name, value) for name, value in shapes.items() if not isinstance(value, tuple))
    tensors = tuple((name, tensor(f"s.{name}", s, "optimizer")) for name, s in shapes.items() if isinstance(s, tuple))
    return StateEntry(str(key), tensors, scalars)


def optimizer(groups, where="optimizer", algorithm="Adam", names=()):
    """Groups as shapes of their parameters; None has no state."""
    made, state, number = [], [], 0
    for index, shapes in enumerate(groups):
        keys = [str(number + place) for place in range(len(shapes))]
        number += len(shapes)
        made.append(ParamGroup(f"{where}.param_groups.{index}", tuple(keys), tuple(names), (), ()))
        state += [
            entry(key, step=(), exp_avg=shape, exp_avg_sq=shape)
            for key, shape in zip(keys, shapes, strict=True)
            if shape is not None
        ]
    return OptimizerRecord(where, tuple(made), tuple(state), algorithm)


def pair(tensors, *optimizers, roots=None):
    roots = roots or tuple(dict.fromkeys(one.name.partition(".")[0] for one in tensors))
    return pair_all(
        Inventory(
            path="x.pt", container="torch-zip", layout="plain", size_bytes=0, root_keys=roots, tensors=tuple(tensors),
            optimizers=optimizers,
        )
    )  # fmt: skip


def names(pairing):
    return [None if one is None else one.name for _, one in pairing.matches]


W, B = (4, 4), (4,)
MODEL = [tensor("model.0.weight", W), tensor("model.0.bias", B), tensor("model.1.weight", (2, 4))]


def wrapped(one):
    """A wrapper subclass with one tensor inside it, as the walk lists a DTensor."""
    inner = one._replace(name=f"{one.name}._local_tensor")
    return one._replace(kind="wrapper-subclass", storage=None, nbytes=0), inner


class TestByOrder:
    def test_a_model_of_parameters_only(self) -> None:
        [found] = pair(MODEL, optimizer([[W, B, (2, 4)]]))

        assert (found.how, found.reason, found.is_certain) == ("order", "", True)
        assert names(found) == ["model.0.weight", "model.0.bias", "model.1.weight"]
        assert found.by_key()["1"].name == "model.0.bias"

    def test_known_buffers_integers_and_ema_are_no_parameters(self) -> None:
        others = [
            tensor("model.1.running_mean", B),
            tensor("model.1.num_batches_tracked", (), dtype="int64"),
            tensor("ema.0.weight", W, "ema"),
        ]

        [found] = pair([*others, *MODEL], optimizer([[None, B, (2, 4)]]))

        assert found.how == "order"
        assert names(found)[0] == "model.0.weight"

    def test_the_average_stands_for_a_model_that_was_not_saved(self) -> None:
        average = [one._replace(name=f"ema.{place}", role="ema") for place, one in enumerate(MODEL)]
        [pairing] = pair(average, optimizer([[W, B, (2, 4)]]))
        assert (pairing.how, names(pairing)) == ("order", ["ema.0", "ema.1", "ema.2"])

    def test_a_weight_that_is_never_trained_has_its_shape_without_state(self) -> None:
        frozen = tensor("model.2.dfl.conv.weight", (1, 16, 1, 1))
        unknown = tensor("model.2.anchors", (3,))
        [pairing] = pair([*MODEL, unknown, frozen], optimizer([[W, B, (2, 4), None]]))
        assert (pairing.how, names(pairing)[-1]) == ("order", frozen.name)

    def test_unknown_buffers_are_stepped_over_by_shape(self) -> None:
        [found] = pair([MODEL[0], tensor("model.anchors", (9, 2)), *MODEL[1:]], optimizer([[W, B, (2, 4)]]))

        assert found.how == "order"
        assert names(found) == [one.name for one in MODEL]

    def test_a_buffer_of_a_parameters_shape_is_ambiguous(self) -> None:
        [found] = pair([*MODEL[:2], tensor("model.0.scale", B), MODEL[2]], optimizer([[W, B, (2, 4)]]))

        assert found.how == "ambiguous"
        assert not found.is_certain
        assert "tensors" in found.reason
        assert names(found) == [one.name for one in MODEL]

    def test_an_optimizer_of_one_layer(self) -> None:
        [found] = pair([*MODEL, tensor("model.1.scale", B)], optimizer([[W, B]]))

        assert (found.how, names(found)) == ("order", ["model.0.weight", "model.0.bias"])

    def test_tied_weights_count_once(self) -> None:
        tied = tensor("model.head.weight", W, storage="model.0.weight")

        [found] = pair([*MODEL, tied], optimizer([[None, None, None]]))

        assert found.how == "order"

    def test_tensors_outside_of_storages_are_not_taken_for_tied(self) -> None:
        twice = [tensor(f"model.{index}.weight", W, storage=None) for index in range(2)]

        [found] = pair(twice, optimizer([[W, W]]))

        assert names(found) == ["model.0.weight", "model.1.weight"]

    def test_parameters_that_the_file_marks_leave_no_room_for_buffers(self) -> None:
        marked = [tensor(one.name, one.shape, kind="parameter") for one in MODEL]

        [found] = pair([tensor("model.scale", W), *marked], optimizer([[W, None, None]]))

        assert (found.how, names(found)[0]) == ("order", "model.0.weight")

    def test_decay_and_no_decay_groups_interleave(self) -> None:
        model = [tensor(f"model.{i}.{n}", s) for i in range(3) for n, s in (("weight", W), ("bias", B))]

        [found] = pair(model, optimizer([[W, W, W], [B, B, B]]))

        assert found.how == "order"
        assert names(found) == [f"model.{i}.{n}" for n in ("weight", "bias") for i in range(3)]

    @pytest.mark.parametrize(
        ("last_bias", "how"),
        [
            (True, "order"),
            (False, "ambiguous"),  # as many biases as other vectors
        ],
    )
    def test_groups_of_biases_of_other_vectors_and_of_the_rest(self, last_bias, how) -> None:
        layers = [
            tensor(f"model.{at}.{leaf}", shape)
            for at in range(2)
            for leaf, shape in (("conv.weight", W), ("bn.weight", B), ("bn.bias", B))
        ]
        ends = [tensor("model.2.weight", W), *[tensor("model.2.bias", B)] * last_bias]
        [pairing] = pair([*layers, *ends], optimizer([[B] * (2 + last_bias), [W] * 3, [B] * 2]))
        assert pairing.how == how
        found = names(pairing)
        assert (found[:2] == ["model.0.bn.bias", "model.1.bn.bias"]) is last_bias

    def test_groups_that_share_shapes_never_share_a_tensor(self) -> None:
        model = [tensor(f"model.{index}", shape) for index, shape in enumerate([W, B, W, B, W, W])]

        [found] = pair(model, optimizer([[W, W], [B, W], [B, W]]))

        assert found.how == "order"
        assert sorted(names(found)) == [one.name for one in model]

    def test_state_that_no_group_lists_has_no_parameter(self) -> None:
        one = optimizer([[W, B, (2, 4)]])
        extra = OptimizerRecord(one.where, one.groups, (*one.state, entry(9, exp_avg=W)), "Adam")

        [found] = pair(MODEL, extra)

        assert found.matches[-1] == ("9", None)
        assert found.how == "order"


class TestWrapperSubclasses:
    def test_a_wrapper_is_one_parameter(self) -> None:
        model = [one for member in MODEL for one in wrapped(member)]

        [found] = pair(model, optimizer([[W, B, (2, 4)]]))

        assert (found.how, found.reason) == ("order", "")
        assert names(found) == ["model.0.weight", "model.0.bias", "model.1.weight"]

    def test_no_wrapper_is_the_place_of_a_state_twice(self) -> None:
        shapes = {"model.0.weight": (3, 4), "model.0.bias": (3,), "model.1.weight": (5, 3), "model.1.bias": (5,)}
        plain = [tensor(name, shape) for name, shape in shapes.items()]
        model = [one for member in plain for one in wrapped(member)]
        swapped = optimizer([[(5, 3), (3,), (3, 4), (5,)]])

        assert [found.how for found in pair(model, swapped)] == [found.how for found in pair(plain, swapped)]
        assert [found.how for found in pair(model, swapped)] == ["permuted"]

    def test_the_parameters_of_a_loss_may_be_wrappers(self) -> None:
        loss = wrapped(tensor("criterion.weight", (3, 2), "criterion"))

        [found] = pair([*MODEL, *loss], optimizer([[W, B, (2, 4), (3, 2)]]))

        assert (found.how, names(found)[-1]) == ("order", "criterion.weight")

    def test_a_wrapper_at_the_root_is_one_parameter(self) -> None:
        [found] = pair((*wrapped(tensor("", W))[:1], tensor("_local_tensor", W)), optimizer([[W]]), roots=("x",))

        assert (found.how, names(found)) == ("order", [""])


class TestSeveralModels:
    GENERATOR = (tensor("netG.0.weight", W), tensor("netG.0.bias", B))
    DISCRIMINATOR = (tensor("netD.0.weight", W), tensor("netD.0.bias", B))

    @pytest.mark.parametrize(("where", "first"), [("optG", "netG.0.weight"), ("optimizer_d", "netD.0.weight")])
    def test_twins_are_told_by_the_optimizers_name(self, where, first) -> None:
        [found] = pair([*self.GENERATOR, *self.DISCRIMINATOR], optimizer([[W, B]], where))

        assert (found.how, names(found)[0]) == ("order", first)

    def test_twins_without_names_are_ambiguous(self) -> None:
        [found] = pair([*self.GENERATOR, *self.DISCRIMINATOR], optimizer([[W, B]]))

        assert found.how == "ambiguous"
        assert found.reason.endswith(": netG, netD")

    def test_tied_weights_are_one_parameter_in_whichever_part(self) -> None:
        tied = [tensor("model.emb.weight", W), tensor("model.out.weight", W, storage="model.emb.weight")]

        [found] = pair(tied, optimizer([[W]]))

        assert (found.how, found.reason, names(found)) == ("order", "", ["model.emb.weight"])

    @pytest.mark.parametrize("change", [{"storage": "other"}, {"storage": None}, {"storage_offset": 16}])
    def test_parts_that_share_no_view_are_two_parameters(self, change) -> None:
        twins = [
            tensor("model.emb.weight", W),
            tensor("model.out.weight", W, **{"storage": "model.emb.weight", **change}),
        ]

        [found] = pair(twins, optimizer([[W]]))

        assert (found.how, found.reason) == ("ambiguous", "it fits several parts: model.emb, model.out")

    def test_names_that_no_part_has_are_no_view(self) -> None:
        model = [tensor("netG.a.weight", W), tensor("netD.a.weight", W, storage="netG.a.weight")]

        [found] = pair(model, optimizer([[W, B]], names=["a.weight", "b.bias"]))

        assert (found.how, names(found)) == ("names", ["netG.a.weight", None])

    def test_target_networks_are_never_stepped(self) -> None:
        actor = [tensor("actor_target.w", W), tensor("actor.w", W)]

        [found] = pair(actor, optimizer([[W]]))

        assert (found.how, names(found)) == ("order", ["actor.w"])

    def test_each_by_its_shapes(self) -> None:
        critic = [tensor("critic.w", (7, 7))]

        found = pair([*self.GENERATOR, *critic], optimizer([[(7, 7)]], "a"), optimizer([[W, B]], "b"))

        assert [(one.how, names(one)[0]) for one in found] == [("order", "critic.w"), ("order", "netG.0.weight")]

    def test_parts_of_one_state_dict(self) -> None:
        model = [
            tensor("state_dict.gen.0.weight", W), tensor("state_dict.gen.1.weight", W),
            tensor("state_dict.disc.weight", W),
        ]  # fmt: skip

        [found] = pair(model, optimizer([[W]], "optimizer_disc"))

        assert (found.how, names(found)) == ("order", ["state_dict.disc.weight"])


class TestByNames:
    def test_param_names(self) -> None:
        found = pair(MODEL, optimizer([[B, W]], names=("0.bias", "0.weight")))[0]

        assert (found.how, found.reason) == ("names", "")
        assert names(found) == ["model.0.bias", "model.0.weight"]

    def test_wrappers_on_either_side_do_not_matter(self) -> None:
        model = [tensor("model.module.0.weight", W)]

        [found] = pair(model, optimizer([[W]], names=("_orig_mod.0.weight",)))

        assert names(found) == ["model.module.0.weight"]

    def test_state_keyed_by_names(self) -> None:
        group = ParamGroup("param_groups.0", ("0.weight", "gone", "0.bias"), (), (), ())
        named = OptimizerRecord("", (group,), (entry("0.weight", exp_avg=W),), "Adam")

        [found] = pair(MODEL, named)

        assert found.how == "names"
        assert found.reason.startswith("1 of 3 names ")
        assert names(found) == ["model.0.weight", None, "model.0.bias"]

    def test_names_of_another_model_are_not_believed(self) -> None:
        [found] = pair(MODEL, optimizer([[W, B, (2, 4)]], names=("x", "y", "z")))

        assert found.how == "order"

    def test_names_that_several_models_have(self) -> None:
        both = [tensor("a_net.weight", W), tensor("b_net.weight", W)]

        [found] = pair(both, optimizer([[W]], names=("weight",)))

        assert (found.how, found.is_certain) == ("ambiguous", False)


class TestWithoutAMatch:
    def test_as_many_but_a_few_shapes_part(self) -> None:
        [found] = pair(MODEL, optimizer([[W, (5,), (2, 4)]]))

        assert (found.how, found.is_certain) == ("position", True)
        assert "1 of 3" in found.reason
        assert names(found)[1] == "model.0.bias"

    @pytest.mark.parametrize(
        "groups",
        [
            [[(9,), (8,), (2, 4)]],  # most shapes part
            [[W, B, (2, 4), B]],  # more parameters than tensors
            [[(9, 9)]],
        ],
    )
    def test_other_shapes(self, groups) -> None:
        [found] = pair(MODEL, optimizer(groups))

        assert (found.how, set(names(found))) == ("none", {None})
        assert "shapes" in found.reason

    def test_the_shapes_of_the_model_in_another_order(self) -> None:
        [found] = pair(MODEL, optimizer([[B, W, (2, 4)]]))

        assert (found.how, found.is_certain, set(names(found))) == ("permuted", False, {None})
        assert "order" in found.reason

    @pytest.mark.parametrize(
        ("order", "reason"),
        [
            (
                [3, 2, 1, 0],
                "it fits the model's tensors only from last to first: correct if the script lists them in this order",
            ),
            (
                [2, 3, 0, 1],
                "it fits the parts of the model only in another order: correct if the script lists them in this order",
            ),
        ],
    )
    def test_orders_that_scripts_choose(self, order, reason) -> None:
        shapes = {"enc.weight": W, "enc.bias": B, "dec.weight": (7, 4), "dec.bias": (7,)}
        model = [tensor(f"model.{name}", shape) for name, shape in shapes.items()]
        [found] = pair(model, optimizer([[model[place].shape for place in order]]))

        assert (found.how, found.reason) == ("ambiguous", reason)
        assert names(found) == [model[place].name for place in order]

    def test_groups_in_the_order_of_sorted_names(self) -> None:
        shapes = {"b.weight": W, "b.bias": B, "a.weight": (7, 4), "a.bias": (7,), "head": (2, 7)}
        model = [tensor(f"model.{name}", shape) for name, shape in shapes.items()]
        [found] = pair(model, optimizer([[(7, 4), W, (2, 7)], [(7,), B]]))

        assert (found.how, found.is_certain) == ("sorted", True)
        assert names(found) == [f"model.{name}" for name in ("a.weight", "b.weight", "head", "a.bias", "b.bias")]

    def test_no_model_and_no_parameters(self) -> None:
        (no_model,), (no_parameters,) = pair([], optimizer([[W]])), pair(MODEL, optimizer([]))
        assert (no_model.how, "model tensors" in no_model.reason) == ("none", True)
        assert (no_parameters.how, "groups" in no_parameters.reason) == ("none", True)
        assert pair(MODEL) == ()


class TestGroupsInAnotherOrder:
    def test_state_of_unknown_shape_does_not_make_the_place_certain(self) -> None:
        """GaLore lists the matrices first, and keeps moments of other shapes for them."""
        model = [*MODEL, tensor("model.1.bias", (2,))]

        [found] = pair(model, optimizer([[None, None], [B, (2,)]]))
        [parted] = pair(model, optimizer([[None, None], [(9,), (2,)]]))

        assert (found.how, found.is_certain) == ("none", False)
        assert (parted.how, parted.is_certain) == ("position", True)


class TestShapesOfState:
    @pytest.mark.parametrize(
        ("algorithm", "state", "shape"),
        [
            ("Adam", {"step": (), "exp_avg": W, "exp_avg_sq": W}, W),
            ("Adam", {"step": (), "exp_avg": (), "exp_avg_sq": ()}, ()),
            ("SGD", {"momentum_buffer": W}, W),
            ("SGD", {"momentum_buffer": None}, None),
            ("LBFGS", {"d": (30,), "n_iter": 3}, None),
            ("Adafactor", {"step": (), "row_var": (4, 1), "col_var": (1, 3)}, (4, 3)),
            ("Adafactor", {"step": (), "variance": B}, B),
            ("Adafactor", {"step": ()}, None),
            (None, {"exp_avg": W}, W),
            (None, {"state1": (64,), "absmax1": (1,)}, None),
            ("RAdam", {"step": 3, "exp_avg": (2, 4), "exp_avg_sq": (2, 4), "projector": None}, None),
        ],
    )
    def test_what_a_state_says_of_its_parameter(self, algorithm, state, shape) -> None:
        assert parameter_shape(entry(0, **state), algorithm) == shape

    def test_moments_leave_out_counters(self) -> None:
        found = moments(entry(0, step=(), mu_product=(), exp_avg=W), "NAdam")

        assert [key for key, _ in found] == ["exp_avg"]


def test_keys_of_the_root_may_hold_dots() -> None:
    model = [tensor("my.model.state_dict.0.weight", W), tensor("lonely.0.weight", W)]

    [found] = pair(model, optimizer([[W]], names=("0.weight",), where="optimizer_my"), roots=("my.model",))

    assert names(found) == ["my.model.state_dict.0.weight"]


def test_a_state_dict_at_the_root() -> None:
    model = [tensor("0.weight", W), tensor("0.bias", B)]

    [found] = pair(model, optimizer([[B]], names=("0.bias",)), roots=("0.weight", "0.bias"))

    assert names(found) == ["0.bias"]


class TestALossWithParameters:
    def test_they_are_found_in_the_model_or_beside_it(self) -> None:
        for name in ("model.loss_fn.weight", "criterion.weight"):
            loss = tensor(name, (3, 2), "criterion")

            [found] = pair([*MODEL, loss], optimizer([[W, B, (2, 4), (3, 2)]]))

            assert (found.how, names(found)[-1]) == ("order", name)

    def test_they_are_found_by_name(self) -> None:
        loss = tensor("model.loss_fn.weight", (3, 2), "criterion")
        listed = ("0.weight", "loss_fn.weight")

        [found] = pair([*MODEL, loss], optimizer([[W, (3, 2)]], names=listed))

        assert (found.how, found.reason) == ("names", "")
        assert names(found) == ["model.0.weight", "model.loss_fn.weight"]

    def test_a_buffer_of_a_loss_is_no_rival_of_a_parameter(self) -> None:
        loss = tensor("model.loss_fn.pos_weight", B, "criterion")

        [found] = pair([*MODEL, loss], optimizer([[W, B, (2, 4)]]))

        assert (found.how, names(found)[1]) == ("order", "model.0.bias")

    def test_what_does_not_fit_with_the_loss_either_is_told_of_the_model(self) -> None:
        loss = tensor("criterion.weight", (3, 2), "criterion")

        stranger = optimizer([[W, B, (2, 4), (7, 7)]])

        assert pair([*MODEL, loss], stranger) == pair(MODEL, stranger)


def match(states, *tensors):
    found = match_unordered(states, tensors)
    if found is None:
        return None
    return [None if one is None else one.name for one in found[0]], found[1]


def test_each_shape_once_is_certain() -> None:
    states = [(W, "float32"), (B, "float32")]
    assert match(states, tensor("b", B), tensor("w", W)) == (["w", "b"], True)
    assert match(states, tensor("b", B), tensor("w", W), tensor("x", (9,))) == (["w", "b"], True)


def test_among_tensors_of_one_shape_people_count() -> None:
    names = ["layer.10", "layer.2", "layer.02"]
    found = match([(B, "float32")] * 3, *(tensor(name, B) for name in names))
    assert found == (["layer.02", "layer.2", "layer.10"], False)


def test_a_shape_that_others_have_too_is_not_certain() -> None:
    assert match([(B, "float32")], tensor("a", B), tensor("b", B)) == (["a"], False)


def test_the_dtype_of_a_moment_is_likely_that_of_its_parameter() -> None:
    states = [(B, "float32"), (B, "bfloat16"), (B, "float32")]
    found = match(states, tensor("a", B, dtype="bfloat16"), tensor("b", B), tensor("c", B, dtype="bfloat16"))
    assert found == (["b", "a", "c"], False)


def test_what_does_not_fit_is_no_match() -> None:
    assert match([(B, "float32")] * 2, tensor("a", B)) is None
    assert match([(W, "float32")], tensor("a", B)) is None


def test_a_parameter_of_which_nothing_is_known_is_left_out() -> None:
    assert match([None, (B, "float32")], tensor("a", B), tensor("w", W)) == ([None, "a"], True)


def test_where_nothing_is_known_of_any_the_next_will_do() -> None:
    assert match([None, None], tensor("b", B), tensor("a", W), tensor("c", B)) == (["a", "b"], False)
    assert match([None], tensor("b", B)) == (["b"], True)
