"""O201 to O206: files with and without each finding."""

from __future__ import annotations

import pytest
from figures import figures

from ckptmove.model import StateEntry
from ckptmove.text import Command


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


class TestOptimizers:
    def test_step_on_the_gpu(self, make) -> None:
        optimizer = make.optimizer(algorithm="NAdam", step="cuda:0")

        [finding] = make.findings(make.inventory(optimizers=[optimizer]))

        assert finding.code == "O201"
        assert finding.message.startswith("4 'step' and 4 'mu_product' ")
        assert "cuda:0" in finding.message

    def test_capturable_without_a_device_is_nobodys_fault(self, make) -> None:
        inventory = make.inventory((), [make.optimizer([None], capturable=True)])

        assert make.findings(inventory) == ()

    def test_capturable_is_judged_by_the_state_where_there_is_no_model(self, make) -> None:
        on_cpu = make.inventory((), [make.optimizer(device="cpu", capturable=True)])
        on_gpu = make.inventory((), [make.optimizer(device="cuda:0", step="cuda:0", capturable=True)])

        assert codes(make.findings(on_cpu)) == ["O202"]
        assert make.findings(on_gpu) == ()

    @pytest.mark.parametrize(
        ("flag", "target", "expected"),
        [
            ("fused", "mps", ["O203"]),
            ("capturable", "mps", ["O202"]),
            ("fused", "cpu", []),
            ("fused", "cuda:0", ["O203"]),
        ],
    )
    def test_flags_count_where_the_target_knows_them(self, make, flag, target, expected) -> None:
        inventory = make.inventory(optimizers=[make.optimizer(**{flag: True})])

        assert codes(make.findings(inventory, target=target)) == expected

    def test_a_fused_group_is_not_asked_whether_it_can_be_captured(self, make) -> None:
        inventory = make.inventory(
            make.model(device="cpu"), [make.optimizer(device="cpu", fused=True, capturable=True)]
        )

        assert make.findings(inventory, target="cpu") == ()
        [finding] = make.findings(inventory, target="vulkan:0")
        assert finding.code == "O202"
        group = inventory.optimizers[0].groups[0].where
        assert finding.where == (f"{group}.fused", f"{group}.capturable")

    def test_shapes_that_part(self, make) -> None:
        optimizer = make.optimizer([(4, 3), (5,), (2, 4), (2,)])

        [finding] = make.findings(make.inventory(optimizers=[optimizer]))

        assert finding.message == "optimizer.state.1.exp_avg is [5], model.0.bias is [4] and 1 more"
        assert finding.where == ("optimizer.state.1.exp_avg", "optimizer.state.1.exp_avg_sq")

    def test_one_moment_that_parts(self, make) -> None:
        optimizer = make.optimizer()
        entry = optimizer.state[0]
        bad = make.replace(entry.tensors[2][1], shape=(3, 4))
        entry = make.replace(entry, tensors=(*entry.tensors[:2], (entry.tensors[2][0], bad)))
        optimizer = make.replace(optimizer, state=(entry, *optimizer.state[1:]))

        [finding] = make.findings(make.inventory(optimizers=[optimizer]))

        assert finding.message == "optimizer.state.0.exp_avg_sq is [3, 4], model.0.weight is [4, 3]"

    def test_lbfgs_keeps_all_state_on_its_first_parameter(self, make) -> None:
        optimizer = make.optimizer([(4, 3), None, None, None], "LBFGS")

        assert make.findings(make.inventory(optimizers=[optimizer])) == ()

    def test_missing_state_is_said_by_group(self, make) -> None:
        optimizer = make.optimizer([(4, 3), None, (2, 4), None])

        [finding] = make.findings(make.inventory(optimizers=[optimizer]))

        assert (finding.code, figures(finding.message)) == ("O205", ["2", "4"])
        assert finding.where == ("optimizer.param_groups.0.params.1", "optimizer.param_groups.0.params.3")

    @pytest.mark.parametrize(
        ("names", "shapes", "expected"),
        [
            (["0.weight", "1.dfl.conv.weight"], [(4,), None], []),
            (["0.weight", "1.conv.weight"], [(4,), None], ["O205"]),
            (["0.weight", "1.dfl.conv.weight", "2.weight"], [(4,), None, None], ["O205"]),
            (["0.weight", "1.weight", "2.dfl.conv.weight", "2.weight"], [(4,), (4,), None], []),  # ambiguous
        ],
    )
    @pytest.mark.parametrize("role", ["model", "ema"])
    def test_a_weight_that_its_library_freezes_has_none(self, make, names, shapes, expected, role) -> None:
        tensors = [make.tensor(f"{role}.{name}", role=role) for name in names]

        assert codes(make.findings(make.inventory(tensors, [make.optimizer(shapes)]), "O205")) == expected

    def test_no_state_at_all_is_an_optimizer_without_momentum(self, make) -> None:
        assert make.findings(make.inventory(optimizers=[make.optimizer([None] * 4, "SGD")])) == ()

    def test_state_that_no_group_lists(self, make) -> None:
        optimizer = make.optimizer(where="")
        optimizer = make.replace(optimizer, state=(*optimizer.state, make.entry("9", (2,), where="")))

        [finding] = make.findings(make.inventory(optimizers=[optimizer]))

        assert (finding.code, finding.where) == ("O206", ("state.9",))
        assert figures(finding.message) == ["1"]

    def test_keys_of_another_type_are_mended_by_a_sentence(self, make) -> None:
        optimizer = make.optimizer()._replace(mistyped=("0", "1"))

        [finding] = make.findings(make.inventory(optimizers=[optimizer]), "O206")

        assert finding.where == tuple(f"{optimizer.where}.state.{key}".lstrip(".") for key in ("0", "1"))
        assert not isinstance(finding.fix, Command)
        assert not set("[]{}();") & set(finding.fix)

    @pytest.mark.parametrize("layout", ["deepspeed", "hf-trainer"])
    def test_a_model_in_another_file_cannot_be_counted(self, make, layout) -> None:
        optimizer = make.optimizer([None] * 9)

        assert codes(make.findings(make.inventory(optimizers=[optimizer]))) == ["O206"]
        assert make.findings(make.inventory(optimizers=[optimizer], layout=layout)) == ()
        assert make.findings(make.inventory((), [optimizer])) == ()

    def test_anything_that_could_be_a_parameter_excuses_a_long_group(self, make) -> None:
        others = (
            make.tensor("criterion.w", role="criterion"),
            make.tensor("Optimizer:critic.w", role="optimizer"),
            make.tensor("model.count", (), dtype="int64"),
        )

        assert make.findings(make.inventory((*make.model(), *others), [make.optimizer([None] * 7)])) == ()
        assert codes(make.findings(make.inventory((*make.model(), *others), [make.optimizer([None] * 8)]))) == ["O206"]

    @pytest.mark.parametrize("count", [4, 8])
    def test_a_wrapper_is_one_candidate(self, make, count) -> None:
        optimizer = make.optimizer([(4,)] * count)
        plain = [make.tensor(f"model.{place}") for place in range(4)]
        wrapped = [part for one in plain for part in make.wrapped(one)]

        expected = [(one.code, one.message) for one in make.findings(make.inventory(plain, [optimizer]))]
        found = [(one.code, one.message) for one in make.findings(make.inventory(wrapped, [optimizer]))]

        assert found == expected
        assert [code for code, _ in found] == (["O206"] if count == 8 else [])

    def test_a_moment_that_is_a_wrapper_has_one_shape(self, make) -> None:
        moment = make.tensor("optimizer.state.0.exp_avg", role="optimizer")
        outer, inner = make.wrapped(moment)
        pairs = (("exp_avg", outer), ("exp_avg._local_tensor", make.replace(inner, shape=(2,))))
        optimizer = make.optimizer([(4,)])
        optimizer = optimizer._replace(state=(StateEntry("0", pairs, ()),))

        found = make.findings(make.inventory([make.tensor("model.w", (5,))], [optimizer]), "O204")

        assert [one.where for one in found] == [("optimizer.state.0.exp_avg",)]
        assert make.findings(make.inventory([make.tensor("model.w")], [optimizer]), "O204") == ()

    @pytest.mark.parametrize(
        ("algorithm", "options", "counters", "expected"),
        [
            ("Adam", {}, {"step": 300}, ["O205"]),
            ("Adam", {}, {"epoch": 3.0}, ["O205"]),
            ("Adam", {}, {"step": 0, "epoch": 0.0}, []),
            ("Adam", {}, {"epoch": 1.0}, []),
            ("SGD", {"momentum": 0.9}, {"step": 300}, ["O205"]),
            ("SGD", {"momentum": 0}, {"step": 300}, []),
            (None, {}, {"step": 300}, []),
        ],
    )
    def test_an_optimizer_without_any_state_after_steps(self, make, algorithm, options, counters, expected) -> None:
        optimizer = make.with_options(make.optimizer([None] * 4, algorithm=algorithm), **options)
        inventory = make.replace(make.inventory(optimizers=[optimizer]), **counters)

        assert codes(make.findings(inventory, "O205")) == expected

    @pytest.mark.parametrize(
        ("state_key", "dtype", "is_found"),
        [
            ("step", "float16", True),
            ("step", "float64", False),
            ("exp_avg", "bfloat16", True),
            ("exp_avg_sq", "float8_e4m3fn", True),
            ("exp_avg", "uint8", False),  # an optimizer that packs its moments
        ],
    )
    def test_the_precision_of_state(self, make, state_key, dtype, is_found) -> None:
        inventory = make.inventory(optimizers=[make.cast(make.optimizer(), state_key, dtype)])

        found = make.findings(inventory, "O210")

        assert [len(one.where) for one in found] == [4] * is_found

    def test_moments_of_half_precision_parameters_are_healthy(self, make) -> None:
        optimizer = make.cast(make.optimizer(), "exp_avg", "bfloat16")

        assert make.findings(make.inventory(make.model(dtype="bfloat16"), [optimizer]), "O210") == ()
