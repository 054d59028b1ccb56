"""D101 to D104: files with and without each finding."""

from __future__ import annotations

import pytest
from figures import figures

from ckptmove.model import Mention, Severity, StateEntry


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


class TestDevices:
    def test_optimizer_left_behind(self, make) -> None:
        [finding] = make.findings(make.inventory(optimizers=[make.optimizer(device="cpu")]), "D102")

        assert finding.message == "8 of 8 optimizer moments are on cpu, their parameters on cuda:0"
        assert finding.where[0] == "optimizer.state.0.exp_avg"
        assert finding.fix == "ckptmove convert 'runs/my run.pth' --to cuda:0"

    def test_each_optimizer_is_named_where_there_are_several(self, make) -> None:
        both = [make.optimizer(device="cpu", where="opt_a"), make.optimizer(where="opt_b")]

        [finding] = make.findings(make.inventory(optimizers=both), "D102")

        assert finding.message.startswith("opt_a: 8 of 8")

    def test_a_model_on_two_devices_is_judged_by_pairing(self, make) -> None:
        model = make.model()
        model = (*model[:2], *(make.replace(one, device="cuda:1") for one in model[2:]))
        optimizer = make.optimizer(device="cuda:0")

        [finding] = make.findings(make.inventory(model, [optimizer]), "D102", device_count=2)

        assert figures(finding.message) == ["4", "8", "0", "1"]

    @pytest.mark.parametrize(("device", "expected"), [("cuda:1", 0), ("cpu", 1)])
    def test_without_a_certain_pairing_any_device_of_the_model_will_do(self, make, device, expected) -> None:
        model = (make.tensor("model.a"), make.tensor("model.b", device="cuda:1"))

        found = make.findings(make.inventory(model, [make.optimizer([(4,)], device=device)]), "D102", device_count=2)

        assert len(found) == expected

    def test_no_model_no_verdict(self, make) -> None:
        assert make.findings(make.inventory((), [make.optimizer(device="cpu")]), "D102") == ()

    def test_meta_tensors_are_nowhere(self, make) -> None:
        model = (*make.model(), make.tensor("model.z", device="meta"))

        assert make.findings(make.inventory(model)) == ()

    def test_a_parameter_on_meta_says_nothing_of_its_moments(self, make) -> None:
        model = (make.tensor("model.a"), make.tensor("model.b", device="cuda:1"), make.tensor("model.c", device="meta"))

        found = make.findings(make.inventory(model, [make.optimizer([(4,)] * 3)]), "D102", device_count=2)

        assert [finding.where[0] for finding in found] == ["optimizer.state.1.exp_avg"]

    def test_a_bare_tag_is_the_first_of_its_type(self, make) -> None:
        model = (make.tensor("model.a", device="mps"), make.tensor("model.b", device="mps:0"))
        optimizer = make.optimizer([(4,), (4,)], device="mps:0")

        assert make.findings(make.inventory(model, [optimizer])) == ()

    def test_a_wrapper_and_the_tensor_inside_it_count_once(self, make) -> None:
        first, second = make.wrapped(make.tensor("model.a")), make.wrapped(make.tensor("model.b", device="cpu"))

        [finding] = make.findings(make.inventory((*first, *second, make.tensor("model.c"))), "D101")

        assert finding.where == ("model.b",)
        assert "3 tensors" in finding.message
        assert "cuda:0 (2), cpu (1)" in finding.message

    @pytest.mark.parametrize("outer", ["cuda:0", "meta"])
    def test_the_tensor_inside_a_wrapper_counts_where_the_wrapper_says_otherwise(self, make, outer) -> None:
        wrapper, inner = make.wrapped(make.tensor("model.a", device="cpu"))
        inventory = make.inventory((make.replace(wrapper, device=outer), inner, make.tensor("model.c", (8,))))

        [finding] = make.findings(inventory, "D101")

        assert finding.where == ("model.a._local_tensor",)

    def test_a_moment_that_is_a_wrapper_counts_once(self, make) -> None:
        outer, inner = make.wrapped(make.tensor("optimizer.state.0.exp_avg", role="optimizer", device="cpu"))
        optimizer = make.optimizer([(4,)])
        pairs = (("exp_avg", outer), ("exp_avg._local_tensor", inner))
        optimizer = optimizer._replace(state=(StateEntry("0", pairs, ()),))

        [finding] = make.findings(make.inventory([make.tensor("model.w")], [optimizer]), "D102")

        assert finding.where == ("optimizer.state.0.exp_avg",)
        assert finding.message.startswith("1 of 1")

    def test_more_devices_make_room(self, make) -> None:
        inventory = make.inventory(make.model(device="cuda:3"))

        assert codes(make.findings(inventory, device_count=3)) == ["D103"]
        assert make.findings(inventory, device_count=4) == ()

    def test_an_index_on_an_unknown_machine_is_a_note_of_what_the_file_needs(self, make) -> None:
        model = (*make.model(device="cuda:1"), make.tensor("model.x", device="cuda:3"))

        [finding] = make.findings(make.inventory(model), "D103")

        assert finding.severity is Severity.INFO
        assert finding.message.endswith(": needs a machine with 4 cuda devices")
        assert len(finding.where) == 5
        assert finding.fix.endswith("--to cuda:0"), "for a machine with fewer"

    @pytest.mark.parametrize(
        ("context", "severity", "to"),
        [
            ({"target": "cuda:3"}, Severity.ERROR, "cuda:3"),
            ({"target": "cuda:5"}, None, ""),
            ({"device_count": 6}, None, ""),
            ({"device_count": 5}, Severity.ERROR, "cuda:0"),
            ({"target": "cuda:3", "device_count": 5}, Severity.ERROR, "cuda:3"),
            ({"target": "cuda:3", "device_count": 2}, Severity.ERROR, "cuda:0"),
            ({"target": "xpu:1"}, Severity.INFO, "xpu:1"),
            ({"target": "cpu"}, Severity.INFO, "cpu"),
            ({"target": "mps"}, Severity.INFO, "mps"),
        ],
    )
    def test_a_target_says_how_many_devices_of_its_type_there_are(self, make, context, severity, to) -> None:
        found = make.findings(make.inventory(make.model(device="cuda:5")), "D103", **context)

        assert [one.severity for one in found] == ([severity] if severity else [])
        assert all(one.fix.endswith(f"--to {to}") for one in found)

    def test_the_first_device_needs_no_note(self, make) -> None:
        assert make.findings(make.inventory(make.model(device="cuda:0")), "D103") == ()

    def test_what_is_kept_may_be_on_a_device_that_is_not_there(self, make) -> None:
        model = make.model(device="cuda:3")

        [finding] = make.findings(make.inventory(model), "D103", device_count=1, kept={"model.0.weight"})

        assert finding.where == tuple(tensor.name for tensor in model[1:])
        kept = {tensor.name for tensor in model}
        assert make.findings(make.inventory(model), "D103", device_count=1, kept=kept) == ()

    def test_what_is_kept_is_not_misplaced(self, make) -> None:
        left = make.inventory(optimizers=[make.optimizer(device="cpu")])
        moments = [tensor.name for tensor in left.tensors if tensor.role == "optimizer"]
        model = [tensor.name for tensor in left.tensors if tensor.role == "model"]

        [finding] = make.findings(left, "D102", kept={"model.0.weight", *moments[3:]})
        assert finding.where == tuple(moments[1:3])
        assert make.findings(left, "D102", kept=moments) == make.findings(left, "D102", kept=model) == ()

    def test_the_moments_of_a_kept_parameter_are_where_the_user_wants_them(self, make) -> None:
        first, *rest = make.model()
        model = (make.replace(first, device="cpu"), *rest)
        inventory = make.inventory(model, [make.optimizer()])

        assert codes(make.findings(inventory)) == ["D101", "D102"]
        assert make.findings(inventory, kept={first.name}) == ()

    @pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
    def test_a_model_parallel_run_is_a_warning_at_most(self, make, device) -> None:
        """Each moment is on the device of its parameter, on several devices or on a single one."""
        model = [make.replace(one, device="cuda:1" if "2." in one.name else device) for one in make.model()]
        optimizer = make.optimizer(device=device)
        state = tuple(
            entry._replace(
                tensors=tuple(
                    (key, make.replace(one, device="cuda:1") if one.shape else one) for key, one in entry.tensors
                )
            )
            if entry.key in "23"
            else entry
            for entry in optimizer.state
        )

        found = make.findings(make.inventory(model, [optimizer._replace(state=state)]))

        loud = [(one.code, one.severity) for one in found if one.severity is not Severity.INFO]
        assert loud == ([("D101", Severity.WARNING)] if device == "cuda:0" else [])

    def test_an_object_alone_has_a_bad_index(self, make) -> None:
        mention = Mention("cfg.device", "torch.device", "cuda:7")

        [finding] = make.findings(make.inventory(mentions=(mention,)), "D103", device_count=1)

        assert finding.where == ("cfg.device",)
        assert finding.message.startswith("torch.device objects ")
        assert figures(finding.message) == ["7", "1", "1"]

    def test_tensors_and_objects_together(self, make) -> None:
        mention = Mention("cfg.device", "torch.device", "cuda:7")

        [finding] = make.findings(
            make.inventory(make.model(device="cuda:7"), mentions=(mention,)), "D103", target="cpu", device_count=1
        )

        tensors, objects = finding.message.split(" and ")
        assert "cuda:7 (4)" in tensors
        assert objects.startswith("torch.device objects for cuda:7 (1)")
        assert finding.fix.endswith("--to cpu")


class TestMentions:
    @pytest.mark.parametrize(
        ("where", "kind", "value", "device", "is_found"),
        [
            ("args.device", "string", "cuda", "cuda:3", False),
            ("args.device", "torch.device", "cuda:3", "cuda:3", False),
            ("args.device", "torch.device", "cuda:0", "cpu", True),
            ("args.device", "string", "cpu", "cuda:0", False),
            ("args.device", "torch.device", "cpu", "mps", False),
            ("args.device", "torch.device", "meta", "cuda:0", False),
            ("args.device", "string", "mps", "cuda:0", True),
            ("args.device", "string", "mps:0", "mps", False),
            ("args.map_location", "string", "cpu", "cuda:0", False),
            ("args.device_ids", "device_ids", "[0, 1]", "cuda:0", True),
            ("args.device_ids", "device_ids", "[0]", "cuda:0", False),
            ("args.device_ids", "device_ids", "[3]", "cuda:3", False),
            ("args.device_ids", "device_ids", "[1]", "cuda:0", True),
            ("args.gpu_ids", "device_ids", "[0]", "cpu", True),
            ("args.gpus", "device_ids", "4", "cpu", False),
            ("args.gpu", "device_ids", "1", "cuda:0", True),
            ("args.gpu", "device_ids", "0", "cuda:0", False),
        ],
    )
    def test_which_name_another_device(self, make, where, kind, value, device, is_found) -> None:
        inventory = make.inventory(make.model(device=device), mentions=(Mention(where, kind, value),))

        assert bool(make.findings(inventory, "D104", device_count=1)) is is_found

    @pytest.mark.parametrize(
        ("context", "is_found"),
        [({}, False), ({"device_count": 2}, False), ({"device_count": 1}, True), ({"target": "cuda:0"}, True)],
    )
    def test_replicas_of_data_parallel_exist_on_an_unknown_machine(self, make, context, is_found) -> None:
        mentions = (Mention("args.device_ids", "device_ids", "[0, 1]"),)

        assert bool(make.findings(make.inventory(mentions=mentions), "D104", **context)) is is_found

    def test_counters_and_rng_there_do_not_excuse_a_mention(self, make) -> None:
        rng = make.tensor("rng", (16,), dtype="uint8", role="rng", device="cuda:0")
        model = make.model(device="cpu")
        inventory = make.inventory((*model, rng), mentions=(Mention("args.device", "string", "cuda:0"),))

        assert codes(make.findings(inventory)) == ["D104", "R301"]

    def test_random_states_do_not_stand_for_a_model(self, make) -> None:
        mentions = (Mention("device", "string", "cuda:0"),)
        states = [make.tensor("rng", (5056,), dtype="uint8", role="rng", device="cpu")]

        assert make.findings(make.inventory(states, mentions=mentions)) == ()

    def test_without_a_model_any_tensor_counts_and_without_tensors_nothing_does(self, make) -> None:
        mentions = (Mention("device", "string", "cuda:0"),)

        assert make.findings(make.inventory([make.tensor("x", role="other")], mentions=mentions)) == ()
        assert make.findings(make.inventory((), mentions=mentions)) == ()

    def test_strings_are_moved_on_request(self, make) -> None:
        mentions = (Mention("a.device", "torch.device", "cuda:0"), Mention("b.device", "string", "cuda:0"))

        [finding] = make.findings(make.inventory(make.model(device="cpu"), mentions=mentions), "D104")

        assert finding.message == "a.device names cuda:0 and 1 more, the model is on cpu"
        assert finding.fix == "ckptmove convert 'runs/my run.pth' --to cpu --rewrite-strings"

    def test_no_conversion_is_offered_for_lines_of_code(self, make) -> None:
        lines = (Mention("code/a.py:3", "torch.device", "cuda:7"), Mention("code/a.py:9", "torch.device", "cuda:7"))
        model = make.model(device="cpu")

        found = make.findings(make.inventory(model, mentions=lines, container="torchscript"), device_count=1)

        assert codes(found) == ["D103", "D104"]
        assert found[0].message.startswith("code for cuda:7 (2), but")
        assert found[1].message.startswith("code/a.py:3 names cuda:7 and 1 more, ")
        assert found[0].fix == found[1].fix
        assert found[0].fix.endswith(
            "replace cuda:7 by x.device of an input x, then torch.jit.save(torch.jit.script(module), ...) again"
        )

    def test_what_stands_beside_the_code_is_moved(self, make) -> None:
        line = Mention("code/a.py:3", "torch.device", "cuda:7")
        device = make.replace(line, where="home", site=4)
        inventory = make.inventory(make.model(device="cpu"), mentions=(line, device), container="torchscript")

        found = make.findings(inventory, device_count=1)

        objects, code = found[0].message.split(" and ")
        assert (objects.endswith("objects for cuda:7 (1)"), code.startswith("code for cuda:7 (1)")) == (True, True)
        assert {one.fix for one in found} == {"ckptmove convert 'runs/my run.pth' --to cpu"}

    @pytest.mark.parametrize(
        ("value", "device", "mended"),
        [("[2]", "cuda:0", "[0]"), ("2", "cuda:0", "0"), ("[0]", "cpu", "[]"), ("0", "cpu", "None")],
    )
    def test_device_ids_are_for_the_script_to_set(self, make, value, device, mended) -> None:
        inventory = make.inventory(make.model(device=device), mentions=(Mention("a.device_ids", "device_ids", value),))

        [finding] = make.findings(inventory, "D104")

        assert finding.fix.endswith(f", set a.device_ids to {mended}")
