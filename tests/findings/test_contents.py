"""R301 to R304, T401, K601, S701 and S703: files with and without each finding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from figures import figures

from ckptmove.checkpoint.trainers import NUMPY_STATE
from ckptmove.model import OPAQUE, GlobalUse, Mention
from ckptmove.text import Command
from ckptmove.torch_facts.verdicts import classify


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


class TestResume:
    @pytest.mark.parametrize(
        ("shape", "dtype", "device", "is_found"),
        [
            ((5056,), "uint8", "cuda:0", True),
            ((5056,), "float32", "cpu", True),
            ((5056,), "uint8", "cpu", False),
            ((), "int64", "cuda:0", False),
            ((624,), "int64", "cpu", False),
        ],
    )
    def test_states_of_generators(self, make, shape, dtype, device, is_found) -> None:
        rng = make.tensor("rng", shape, dtype=dtype, role="rng", device=device)

        assert bool(make.findings(make.inventory((*make.model(), rng)), "R301")) is is_found

    def test_a_state_that_was_cast_is_lost(self, make) -> None:
        rng = make.tensor("rng", (16,), role="rng", device="cpu")

        [finding] = make.findings(make.inventory([rng]), "R301")

        assert finding.fix == "do not restore rng: it was cast"

    def test_what_is_absent_is_listed_once(self, make) -> None:
        inventory = make.inventory(optimizers=[make.optimizer()], contents=frozenset())

        [finding] = make.findings(inventory)

        assert finding.message.startswith("not in the file: scheduler, RNG states, the script's epoch or step;")
        assert "torch.cuda.get_rng_state_all()" in finding.fix

    @pytest.mark.parametrize(
        ("device", "call"), [("mps", "torch.mps.get_rng_state()"), ("cpu", "torch.get_rng_state()")]
    )
    def test_the_line_saves_the_states_of_that_device(self, make, device, call) -> None:
        optimizer = make.optimizer(device=device)
        contents = frozenset({"scheduler", "counter"})

        [finding] = make.findings(make.inventory(make.model(device=device), [optimizer], contents=contents))

        assert call in finding.fix
        assert "cuda" not in finding.fix

    @pytest.mark.parametrize(
        ("layout", "files"),
        [
            ("hf-trainer", ["scheduler.pt", "rng_state.pth", "trainer_state.json"]),
            ("accelerate", ["scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"]),
        ],
    )
    def test_the_files_of_a_trainer_are_named(self, make, layout, files) -> None:
        inventory = make.inventory(optimizers=[make.optimizer()], contents=frozenset(), layout=layout)

        [finding] = make.findings(inventory)

        assert [name for name in files if name in finding.fix] == files
        assert "torch.get_rng_state" not in finding.fix

    @pytest.mark.parametrize(("contents", "has_hook"), [({"counter"}, True), ({"rng", "counter"}, False)])
    def test_a_lightning_module_saves_the_states_in_a_hook(self, make, contents, has_hook) -> None:
        inventory = make.inventory(optimizers=[make.optimizer()], contents=frozenset(contents))

        [finding] = make.findings(replace(inventory, layout="lightning"))

        assert ("on_save_checkpoint" in finding.fix) == has_hook
        assert "scheduler" not in finding.fix

    @pytest.mark.parametrize(("dtype", "expected"), [("float16", ["R302"]), ("bfloat16", []), ("float32", [])])
    def test_a_grad_scaler_is_missed_in_half_precision_only(self, make, dtype, expected) -> None:
        contents = frozenset({"scheduler", "rng", "counter"})
        inventory = make.inventory(make.model(dtype=dtype), [make.optimizer()], contents=contents)

        assert codes(make.findings(inventory)) == expected

    def test_weights_alone_lack_nothing(self, make) -> None:
        assert make.findings(make.inventory(contents=frozenset())) == ()

    def test_an_optimizer_alone_is_one_file_of_several(self, make) -> None:
        assert make.findings(make.inventory((), [make.optimizer()], contents=frozenset())) == ()

    @pytest.mark.parametrize(
        ("device", "count", "expected"), [("cpu", 4, []), ("cuda:0", 0, []), ("cuda:0", 4, ["R303"])]
    )
    def test_states_for_each_device(self, make, device, count, expected) -> None:
        inventory = make.inventory(make.model(device=device), rng_devices=(("rng.cuda", count),))

        assert codes(make.findings(inventory, device_count=1)) == expected

    @pytest.mark.parametrize("target", [None, "cuda:0", "cuda:3"])
    def test_a_machine_that_nobody_has_counted_may_have_a_device_for_each_state(self, make, target) -> None:
        """A run on one GPU of a machine with eight saves eight states (``get_rng_state_all``)."""
        assert make.findings(make.inventory(rng_devices=(("rng.cuda", 8),)), target=target) == ()

    @pytest.mark.parametrize("states", [1, 4, 8])
    @pytest.mark.parametrize("devices", [1, 3, 4, 8])
    def test_torch_fails_where_states_are_left_over_and_nowhere_else(self, make, monkeypatch, states, devices) -> None:
        torch = pytest.importorskip("torch")
        generators = tuple(torch.Generator() for _ in range(devices))
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        monkeypatch.setattr("torch.cuda.random._lazy_call", lambda call, **_: call())
        found = make.findings(make.inventory(rng_devices=(("rng.cuda", states),)), device_count=devices)

        with pytest.raises(IndexError) if found else nullcontext():
            torch.cuda.set_rng_state_all([torch.get_rng_state()] * states)
        assert codes(found) == (["R303"] if states > devices else [])

    def test_as_many_states_as_devices(self, make) -> None:
        inventory = make.inventory(rng_devices=(("state.rng", 4),), root_keys=("state", "model"))

        assert make.findings(inventory, device_count=4) == ()
        [finding] = make.findings(inventory, device_count=2)
        assert (finding.code, finding.where) == ("R303", ("state.rng",))
        assert figures(finding.message) == ["4", "2"]
        assert "with state.rng as states: " in finding.fix
        assert "(states[:2])" in finding.fix

    @pytest.mark.parametrize(
        ("lists", "expected"),
        [
            ([(0.1,)], []),
            ([(0.1,), (0.2,)], []),  # one took over from the other
            ([(0.3,), (0.2,)], ["R304"]),
            ([(0.2, 0.2)], []),  # for an optimizer of two groups, which is not here
            ([(0.1 + 1e-9,)], ["R304"]),
        ],
    )
    def test_the_rates_of_each_scheduler(self, make, lists, expected) -> None:
        rates = tuple((f"schedulers.{place}._last_lr", rates) for place, rates in enumerate(lists))

        assert codes(make.findings(make.inventory(optimizers=[make.optimizer()], last_rates=rates))) == expected

    def test_a_part_of_a_composed_scheduler_does_not_speak_for_it(self, make) -> None:
        rates = (("scheduler._schedulers.0._last_lr", (0.1,)), ("scheduler._last_lr", (0.5,)))

        [finding] = make.findings(make.inventory(optimizers=[make.optimizer()], last_rates=rates), "R304")
        assert finding.where == ("scheduler._last_lr",)

    def test_a_scheduler_of_one_of_two_optimizers(self, make) -> None:
        slow = make.optimizer()._replace(groups=(make.optimizer().groups[0]._replace(options=(("lr", 0.5),)),))
        rates = (("scheduler._last_lr", (0.5,)),)

        assert make.findings(make.inventory(optimizers=[make.optimizer(), slow], last_rates=rates), "R304") == ()
        [finding] = make.findings(make.inventory(optimizers=[make.optimizer()], last_rates=rates), "R304")
        assert finding.message.startswith("scheduler._last_lr[0] ")
        assert figures(finding.message) == ["0", "0.5", "0", "0.1"]

    def test_a_rate_that_is_a_tensor_is_not_compared(self, make) -> None:
        group = make.optimizer().groups[0]._replace(options=(("lr", OPAQUE),))
        optimizer = make.optimizer()._replace(groups=(group,))

        assert make.findings(make.inventory(optimizers=[optimizer], last_rates=(("_last_lr", (0.5,)),)), "R304") == ()

    def test_nothing_on_a_device_has_no_states_to_miss(self, make) -> None:
        assert make.findings(make.inventory((), rng_devices=(("rng.cuda", 4),))) == ()


class TestDtypes:
    @staticmethod
    def with_double_steps(make, algorithm):
        optimizer = make.optimizer(algorithm=algorithm)
        state = [
            make.replace(
                entry,
                tensors=tuple(
                    (key, make.replace(tensor, dtype="float64" if key == "step" else tensor.dtype))
                    for key, tensor in entry.tensors
                ),
            )
            for entry in optimizer.state
        ]
        return make.replace(optimizer, state=tuple(state))

    def test_what_stays_on_the_cpu_may_be_double(self, make) -> None:
        rng = make.tensor("rng", (4,), dtype="float64", role="rng", device="cpu")
        inventory = make.inventory((*make.model(), rng), [self.with_double_steps(make, "Adam")])

        assert make.findings(inventory, "T401", target="mps") == ()

    def test_what_convert_would_send_there_may_not(self, make) -> None:
        [finding] = make.findings(make.inventory(optimizers=[self.with_double_steps(make, "ASGD")]), target="mps")

        assert (finding.code, len(finding.where)) == ("T401", 4)
        assert (finding.message.startswith("mps "), finding.message.endswith("float64 (4)")) == (True, True)

    def test_what_cannot_be_cast_is_cast_by_hand(self, make) -> None:
        held = make.tensor("model.w", dtype="float64")
        wrapper = make.replace(held, name="model", storage=None, kind="wrapper-subclass")
        where = Mention("model.device", "torch.device", "cuda:0", 70, 71, 72)

        [finding] = make.findings(make.inventory([wrapper, held], mentions=(where,)), "T401", target="mps")

        assert finding.where == ("model", "model.w")
        assert ", cast model from float64: " in finding.fix

    def test_without_a_target_only_what_claims_to_be_there(self, make) -> None:
        model = make.model(device="mps")
        on_cpu = make.tensor("other.x", dtype="float64", role="other", device="cpu")
        on_mps = make.tensor("other.y", dtype="float64", role="other", device="mps")

        assert make.findings(make.inventory((*model, on_cpu))) == ()
        [finding] = make.findings(make.inventory((*model, on_cpu, on_mps)))
        assert (finding.code, finding.where, figures(finding.message)) == ("T401", ("other.y",), ["64", "1"])
        assert finding.fix == "ckptmove convert 'runs/my run.pth' --to mps --cast"


class TestKeys:
    def test_nested_wrappers_are_stripped_one_at_a_time(self, make) -> None:
        inventory = make.inventory(make.model("state.state_dict._orig_mod.module."))

        [finding] = make.findings(inventory)

        assert "state.state_dict " in finding.message
        assert finding.message.endswith("'_orig_mod.module.' (4 tensors)")
        assert finding.fix == "ckptmove convert 'runs/my run.pth' --strip-prefix"

    @pytest.mark.parametrize("container", ["torchscript", "dcp"])
    def test_without_a_convert_command_the_fix_is_a_sentence(self, container, make) -> None:
        model = make.model("state.state_dict._orig_mod.module.")

        [finding] = make.findings(make.inventory(model, container=container), "K601")

        assert not isinstance(finding.fix, Command)
        assert "'_orig_mod.module.'" in finding.fix
        assert "(" not in finding.fix

    @pytest.mark.parametrize(
        ("keys", "severity", "words"),
        [
            (["module.a", "module.b"], "info", ""),
            (["module._orig_mod.a", "module._orig_mod.b"], "warning", "--strip-prefix"),
            (["_orig_mod.module.a", "_orig_mod.module.b"], "warning", "--strip-prefix"),
            (["blocks.0._orig_mod.a", "b"], "warning", "--strip-prefix"),
            (["module.c._orig_mod.a", "module.b"], "warning", "--strip-prefix"),
            (["model._fsdp_wrapped_module.a", "b._checkpoint_wrapped_module.c"], "warning", "--strip-prefix"),
            (["a._forward_module.a", "a.a"], "warning", ""),  # the two keys would become one
        ],
    )
    @pytest.mark.parametrize("role", ["model", "ema"])
    @pytest.mark.parametrize("where", ["", "part."])
    def test_wrappers_at_any_place(self, make, keys, severity, words, role, where) -> None:
        tensors = [make.tensor(f"{where}{key}", role=role) for key in keys]
        roots = ("part",) if where else tuple(keys)

        found = make.findings(make.inventory(tensors, root_keys=roots), "K601")

        assert [one.severity for one in found] == [severity] * (role == "model" or severity != "info")
        assert all(one.fix.endswith(words) and isinstance(one.fix, Command) == bool(words) for one in found)
        assert all(
            (where.rstrip(".") in one.message) and ("--strip-prefix" in one.message) is not bool(one.fix)
            for one in found
        )

    def test_a_note_names_no_command_that_cannot_be_used(self, make) -> None:
        [finding] = make.findings(make.inventory(make.model("model.module."), container="dcp"), "K601")

        assert "--strip-prefix" not in finding.message

    def test_one_key_without_it_clears_them_all(self, make) -> None:
        model = (*make.model("model.module."), make.tensor("model.n_averaged"))

        assert make.findings(make.inventory(model)) == ()

    def test_the_average_beside_a_compiled_model_keeps_its_prefix(self, make) -> None:
        average = [make.tensor(f"ema.module.{name}", role="ema") for name in ("a", "b")]

        [finding] = make.findings(
            make.inventory([*make.model("model._orig_mod."), *average], root_keys=("model", "ema"))
        )

        assert finding.fix == "ckptmove convert 'runs/my run.pth' --strip-prefix _orig_mod."

    def test_a_pickled_wrapper_is_unwrapped(self, make) -> None:
        [finding] = make.findings(make.inventory(make.model("_orig_mod."), layout="module", root_keys=()))

        assert finding.fix == "ckptmove convert 'runs/my run.pth' --plain --strip-prefix"


class TestSafety:
    @pytest.mark.parametrize("other", [(), (GlobalUse("__main__.Config", None, "unknown"),)])
    def test_dtensors_have_a_finding_of_their_own(self, other, make) -> None:
        uses = (GlobalUse("torch.distributed.tensor.DTensor", None, "safe"), *other)

        own, *_ = make.findings(make.inventory(globals=uses), "S701")

        assert (own.severity, own.where) == ("info", ("torch.distributed.tensor.DTensor",))

    @pytest.mark.parametrize(
        ("names", "system", "said"),
        [
            (["pathlib.PosixPath", "pathlib.PureWindowsPath"], "linux", []),
            (["pathlib.WindowsPath"], "linux", ["only on Windows"]),
            (["pathlib._local.WindowsPath"], "linux", ["Python 3.13", "only on Windows"]),
            (["pathlib._local.PosixPath"], "win32", ["Python 3.13", "only on Linux"]),
            (["pathlib.WindowsPath", "pathlib.PurePosixPath"], "win32", []),
        ],
    )
    def test_paths_of_another_python_or_system_are_named(self, make, monkeypatch, names, system, said) -> None:
        monkeypatch.setattr("sys.platform", system)
        [finding] = make.findings(make.inventory(globals=[GlobalUse(name, None, "safe") for name in names]), "S701")
        monkeypatch.undo()

        assert all(words in finding.message for words in said)
        assert finding.message.count(";") == len(said)

    def test_names_are_listed(self, make) -> None:
        names = ["numpy.core.multiarray._reconstruct", "numpy.dtype", "numpy.ndarray", "__main__.Config", "Bare"]
        uses = tuple(GlobalUse(name, None, "unknown") for name in names)

        [finding] = make.findings(make.inventory(globals=uses))

        assert "refuses 5 names: numpy.core.multiarray._reconstruct, numpy.dtype, numpy.ndarray" in finding.message
        assert finding.message.endswith("and 1 more")

    @pytest.mark.parametrize(
        ("layout", "name", "globals_", "severity"),
        [
            ("hf-trainer", "rng_state.pth", NUMPY_STATE, "info"),
            ("hf-trainer", "rng_state_1.pth", ["numpy.core.multiarray._reconstruct"], "warning"),
            ("hf-trainer", "rng_state.pth", [*NUMPY_STATE, "a.B"], "warning"),
            ("hf-trainer", "training_args.bin", ["transformers.training_args.TrainingArguments", "a.B"], "info"),
            ("hf-trainer", "training_args.bin", ["os.system"], "warning"),
            ("hf-trainer", "optimizer.pt", NUMPY_STATE, "warning"),
            ("accelerate", "random_states_0.pkl", NUMPY_STATE, "info"),
            ("plain", "rng_state.pth", NUMPY_STATE, "warning"),
        ],
    )
    def test_a_trainer_resumes_despite_its_own_files(self, make, layout, name, globals_, severity) -> None:
        uses = tuple(classify(one) for one in sorted(globals_))

        finding = make.findings(make.inventory(path=f"runs/{name}", layout=layout, globals=uses), "S701")[0]

        assert finding.severity == severity

    def test_a_trainer_allows_no_opcodes(self, make) -> None:
        uses = tuple(map(classify, NUMPY_STATE))
        facts = {"path": "rng_state.pth", "layout": "hf-trainer", "globals": uses}

        [finding] = make.findings(make.inventory(**facts, foreign_opcodes=("POP",)))

        assert finding.severity == "warning"

    def test_opcodes_are_counted(self, make) -> None:
        [finding] = make.findings(make.inventory(foreign_opcodes=("POP",)))

        assert finding.message == "torch.load(weights_only=True) refuses 1 opcode: POP"

    def test_a_class_that_takes_no_items_is_named_for_them_too(self, make) -> None:
        uses = (GlobalUse("collections.deque", None, "safe"),)

        [finding] = make.findings(make.inventory(globals=uses, filled_classes=("collections.deque",)))

        assert "1 name: collections.deque and items " in finding.message
        assert finding.message.count("collections.deque") == 2

    def test_what_an_older_torch_refuses_besides_is_said(self, make) -> None:
        uses = (GlobalUse("a.B", None, "unknown"), GlobalUse("builtins.set", "2.6", "safe"))

        [finding] = make.findings(make.inventory(globals=uses))

        assert finding.message == (
            "torch.load(weights_only=True) refuses 1 name: a.B; before torch 2.6 also 1 name: builtins.set"
        )

    def test_no_remedy_is_named_that_was_not_tried(self, make) -> None:
        [finding] = make.findings(make.inventory(globals=(GlobalUse("a.B", None, "unknown"),)))

        assert finding.fix == ""

    def test_what_only_an_older_torch_refuses_is_worth_knowing(self, make) -> None:
        uses = (
            GlobalUse("torch.Tensor", "2.4", "safe"),
            GlobalUse("builtins.set", "2.6", "safe"),
            GlobalUse("_codecs.encode", "2.5", "safe"),
        )

        [finding] = make.findings(make.inventory(globals=uses))

        assert (finding.code, finding.where) == ("S703", ("builtins.set", "_codecs.encode"))
        assert finding.message == (
            "torch.load(weights_only=True) before torch 2.6 refuses 2 names: builtins.set, _codecs.encode (since 2.5)"
        )
        assert finding.fix == "load it with torch 2.6 or later"

    @pytest.mark.parametrize("container", ["torchscript", "pickle", "torch-tar", "dcp"])
    def test_a_file_that_weights_only_mode_never_reads_is_refused_by_no_older_torch(self, make, container) -> None:
        uses = (GlobalUse("builtins.set", "2.6", "safe"),)

        assert "S703" not in codes(make.findings(make.inventory(container=container, globals=uses)))

    def test_an_opcode_is_refused_by_every_torch(self, make) -> None:
        uses = (GlobalUse("builtins.set", "2.6", "safe"),)

        assert codes(make.findings(make.inventory(globals=uses, foreign_opcodes=("POP",)))) == ["S701"]

    def test_a_tar_is_refused_whatever_it_names(self, make) -> None:
        tar = replace(make.inventory(), container="torch-tar")
        other = GlobalUse("a.B", None, "unknown")

        [plain] = make.findings(tar, "S701")
        [more] = make.findings(replace(tar, globals=(other,)), "S701")

        assert figures(plain.message) == ["0.1", "2.6"]
        assert more.message == f"{plain.message} and 1 name: a.B"

    @pytest.mark.parametrize("name", ["a.b]); print(1); ([c", "a b; import os.c", ".a", "a.<locals>"])
    def test_what_is_no_name_is_never_written_as_code(self, make, name) -> None:
        [finding] = make.findings(make.inventory(globals=(GlobalUse(name, None, "unknown"),)))

        assert finding.fix.endswith(": ckptmove inspect --globals 'runs/my run.pth'")
        assert "torch" not in finding.fix

    def test_a_dangerous_file_has_no_remedy(self, make) -> None:
        uses = (GlobalUse("os.system", None, "dangerous"), GlobalUse("a.B", None, "unknown"))

        found = make.findings(make.inventory(globals=uses))

        assert codes(found) == ["S701", "S702"]
        assert all(finding.fix.startswith("do not load it") for finding in found)
        assert found[1].where == ("os.system",)


class TestStrangers:
    """Names of other packages in pickles that have no weights-only mode, or that no load reads."""

    @pytest.mark.parametrize(("verdict", "expected"), [("unknown", ["S701"]), ("safe", []), ("dangerous", ["S702"])])
    def test_of_a_distributed_checkpoint(self, make, verdict, expected) -> None:
        inventory = make.replace(make.inventory(), container="dcp", globals=(GlobalUse("mine.Planner", None, verdict),))
        assert codes(make.findings(inventory)) == expected

    def test_of_a_record(self, make) -> None:
        use = GlobalUse("mine.Net", None, "unknown", "a/extra.pkl")
        [finding] = make.findings(make.replace(make.inventory(), apart=(use,)), "S701")
        assert (finding.where, finding.severity) == (("a/extra.pkl: mine.Net",), "warning")
