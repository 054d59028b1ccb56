"""All rules together: an inventory for each finding, healthy inventories, and the growth of time."""

from __future__ import annotations

import ast
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from ckptmove.checkpoint.directories import CodeBeside, DanglingPointer, DirectoryInventory, UnreadFile
from ckptmove.findings import archive, devices, dtypes, keys, numbers, optimizer, resume, safety, saves
from ckptmove.findings import beside as files_beside
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.findings.context import Context, target_device
from ckptmove.findings.registry import find_all
from ckptmove.model import ArchiveFact, BrokenNumber, GlobalUse, Mention, Severity
from ckptmove.text import Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.model import Inventory

EVIL = GlobalUse("os.system", None, "dangerous")
ODD = GlobalUse("argparse.Namespace", None, "safe")


def beside(make: Any, **facts: Any) -> Inventory:
    """The inventory of a directory with one file, and what lies beside it."""
    return DirectoryInventory(**asdict(make.inventory(())), files=(), **facts)


#: For each code: an inventory with the finding, the context, and a similar healthy inventory.
TRIPS: dict[str, tuple[Callable[[Any], Inventory], dict[str, Any], Callable[[Any], Inventory]]] = {
    "D101": (
        lambda make: make.inventory((*make.model(), make.tensor("criterion.w", role="criterion", device="cpu"))),
        {},
        lambda make: make.inventory((*make.model(), make.tensor("ema.w", role="ema", device="cpu"))),
    ),
    "D102": (
        lambda make: make.inventory(optimizers=[make.optimizer(device="cpu")]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer()]),
    ),
    "D103": (
        lambda make: make.inventory(make.model(device="cuda:1")),
        {"device_count": 1},
        lambda make: make.inventory(make.model(device="cuda:0")),
    ),
    "D104": (
        lambda make: make.inventory(mentions=(Mention("args.device", "string", "cuda:1"),)),
        {},
        lambda make: make.inventory(mentions=(Mention("args.device", "string", "cuda"),)),
    ),
    "O201": (
        lambda make: make.inventory(optimizers=[make.optimizer(step="cuda:0")]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer(step="cuda:0", fused=True)]),
    ),
    "O202": (
        lambda make: make.inventory(optimizers=[make.optimizer(capturable=True)]),
        {"target": "mps"},
        lambda make: make.inventory(optimizers=[make.optimizer(capturable=False)]),
    ),
    "O203": (
        lambda make: make.inventory(optimizers=[make.optimizer(capturable=True)]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer(capturable=True, step="cuda:0")]),
    ),
    "O204": (
        lambda make: make.inventory(optimizers=[make.optimizer([(4, 3), (5,), (2, 4), (2,)])]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer()]),
    ),
    "O205": (
        lambda make: make.inventory(optimizers=[make.optimizer([(4, 3), None, (2, 4), (2,)])]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer([(4, 3), (4,)])]),
    ),
    "O206": (
        lambda make: make.inventory(optimizers=[make.optimizer([*make.layers.values(), (2,)])]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer([(2,)])]),
    ),
    "O207": (
        lambda make: make.inventory(optimizers=[make.without(make.optimizer(), "1", "exp_avg_sq")]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer([(4, 3), (4,), (2, 4), None])]),
    ),
    "O208": (
        lambda make: make.inventory(optimizers=[make.optimizer([(4,), (4, 3), (2, 4), (2,)])]),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer([(4, 3), (2, 4), (2,)])]),
    ),
    "O210": (
        lambda make: make.inventory(optimizers=[make.cast(make.optimizer(), "step", "bfloat16")]),
        {},
        lambda make: make.inventory(optimizers=[make.cast(make.optimizer(), "exp_avg", "float64")]),
    ),
    "O211": (
        lambda make: make.inventory(optimizers=[make.with_options(make.optimizer(), train_mode=True, weight_sum=1.0)]),
        {},
        lambda make: make.inventory(optimizers=[make.with_options(make.optimizer(), train_mode=False, weight_sum=1.0)]),
    ),
    "R301": (
        lambda make: make.inventory([make.tensor("rng", (16,), dtype="uint8", role="rng")]),
        {},
        lambda make: make.inventory([make.tensor("rng", (16,), dtype="uint8", role="rng", device="cpu")]),
    ),
    "R302": (
        lambda make: make.inventory(optimizers=[make.optimizer()], contents=frozenset({"scheduler", "counter"})),
        {},
        lambda make: make.inventory(contents=frozenset()),
    ),
    "R303": (
        lambda make: make.inventory(rng_devices=(("rng.cuda", 4),)),
        {"device_count": 3},
        lambda make: make.inventory(rng_devices=(("rng.cuda", 1),)),
    ),
    "R304": (
        lambda make: make.inventory(optimizers=[make.optimizer()], last_rates=(("scheduler._last_lr", (0.5,)),)),
        {},
        lambda make: make.inventory(optimizers=[make.optimizer()], last_rates=(("scheduler._last_lr", (0.1,)),)),
    ),
    "T402": (
        lambda make: make.inventory(
            [make.tensor("a.weight", dtype="float8_e4m3fn"), make.tensor("a.weight_scale_inv", (1,))]
        ),
        {},
        lambda make: make.inventory([make.tensor("a.weight"), make.tensor("a.weight_scale_inv", (1,))]),
    ),
    "T401": (
        lambda make: make.inventory(make.model(device="cpu", dtype="float64")),
        {"target": "mps"},
        lambda make: make.inventory(make.model(device="cpu")),
    ),
    "N501": (
        lambda make: make.inventory(broken_numbers=(BrokenNumber("scheduler.best", False, "nan"),)),
        {},
        lambda make: make.inventory(broken_numbers=(BrokenNumber("scaler.scale", True, "nan"),)),
    ),
    "N503": (
        lambda make: make.inventory(broken_numbers=(BrokenNumber("scaler.scale", True, "0.0"),)),
        {},
        lambda make: make.inventory(broken_numbers=(BrokenNumber("scheduler.best", False, "nan"),)),
    ),
    "K601": (
        lambda make: make.inventory(make.model("model.a._orig_mod.")),
        {},
        lambda make: make.inventory(make.model("model.a_orig_mod.")),
    ),
    "S701": (
        lambda make: make.inventory(globals=(ODD,)),
        {},
        lambda make: make.inventory(globals=(GlobalUse("collections.OrderedDict", "2.4", "safe"),)),
    ),
    "S702": (
        lambda make: make.inventory(globals=(EVIL,)),
        {},
        lambda make: make.inventory(globals=(ODD,)),
    ),
    "S703": (
        lambda make: make.inventory(globals=(GlobalUse("builtins.set", "2.6", "safe"),)),
        {},
        lambda make: make.inventory(globals=(GlobalUse("torch.float32", "2.4", "safe"),)),
    ),
    "S704": (
        lambda make: beside(make, code=(CodeBeside("config.json", "", ("modeling_x.py",)),)),
        {},
        lambda make: beside(make, unread=(UnreadFile("vocab.pkl", "an empty file"),)),
    ),
    "S705": (
        lambda make: beside(make, unread=(UnreadFile("vocab.pkl", "a git-lfs pointer"),)),
        {},
        lambda make: beside(make, unread=(UnreadFile("stats.npy", "a numpy array", ("os.system",)),)),
    ),
    "F811": (
        lambda make: beside(make, pointers=(DanglingPointer("latest", "global_step9", ""),)),
        {},
        lambda make: beside(make, code=(CodeBeside("config.json", "", ("modeling_x.py",)),)),
    ),
    **{
        code: (
            lambda make, kind=kind: make.inventory(facts=(ArchiveFact(kind, "model.0.weight", 48),)),
            {},
            lambda make: make.inventory(),
        )
        for code, kind in {
            "F801": "crc-mismatch",
            "F802": "short-storage",
            "F803": "compressed-storage",
            "F804": "orphan-record",
            "F805": "stray-bytes",
            "F806": "newer-file",
            "F807": "other-save",
            "F808": "missing-rank",
            "F809": "absent-shard",
            "F810": "other-replica",
            "F815": "outside-member",
        }.items()
    },
}  # fmt: skip


def test_every_code_is_tripped_here_or_found_by_verify() -> None:
    by_verify = {code for code, entry in CATALOGUE.items() if entry.found_by == "verify"}

    assert by_verify == {"O209", "N502"}
    assert set(TRIPS) | by_verify == set(CATALOGUE)
    rooms = (devices, optimizer, resume, dtypes, numbers, keys, safety, files_beside, archive, saves)
    assert sum(len(room.RULES) for room in rooms) == len(TRIPS)


@pytest.mark.parametrize("code", TRIPS)
class TestEachRule:
    def test_trips_once(self, make, code) -> None:
        trip, context, _ = TRIPS[code]

        [finding] = make.findings(trip(make), code, **context)

        assert (finding.name, finding.severity) == (CATALOGUE[code].name, CATALOGUE[code].severity)
        assert finding.message
        assert "\n" not in finding.message + finding.fix

    def test_fix_is_a_command_with_the_file_or_a_sentence(self, make, code) -> None:
        trip, context, _ = TRIPS[code]

        [finding] = make.findings(trip(make), code, **context)

        if isinstance(finding.fix, Command):
            assert shlex.split(finding.fix)[:1] in (["ckptmove"], ["git"])
            assert shlex.split(finding.fix)[2] == "runs/my run.pth"
        elif finding.fix:
            assert not finding.fix.startswith("ckptmove")
            with pytest.raises(SyntaxError):
                ast.parse(finding.fix)

    def test_spares_what_is_like_it_and_healthy(self, make, code) -> None:
        _, context, healthy = TRIPS[code]

        assert make.findings(healthy(make), code, **context) == ()


ALGORITHMS = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("target", [None, "cuda:0", "cpu"])
def test_a_healthy_file_of_each_optimizer_has_nothing_above_info(make, algorithm, target) -> None:
    shapes = [*make.layers.values()]
    if algorithm == "LBFGS":
        shapes = [shapes[0], None, None, None]
    optimizer = make.optimizer(shapes, algorithm, step="cuda:0" if algorithm == "ASGD" else "cpu")

    found = make.findings(make.inventory(optimizers=[optimizer], contents=frozenset()), target=target)

    assert {finding.code for finding in found} == {"R302"}
    assert all(finding.severity is Severity.INFO for finding in found)


def test_an_empty_file_has_no_findings(make) -> None:
    assert make.findings(make.inventory(())) == ()


def test_a_file_is_judged_for_where_most_of_its_model_lies(make) -> None:
    meta = make.tensor("model.big", (1000,), device="meta", storage=None)
    lost = make.tensor("model.odd", (1000,), device="unknown", storage=None, kind="wrapper-subclass")
    some = make.tensor("other.x", device="cuda:1", role="other")

    def target(*tensors, context=Context()):  # noqa: B008  # frozen
        return target_device(make.inventory(tensors), context)

    assert target(meta, lost, some, *make.model(device="mps")) == "mps"
    assert target(meta, lost, some) == "cuda:1"
    assert target(meta, lost) is None
    assert target(meta, context=Context(target="cuda:2")) == "cuda:2"
    assert not make.findings(make.inventory((meta, lost)))


@pytest.mark.parametrize(("device", "to"), [("xla:0", "cpu"), ("cuda", "cuda:0"), ("mps", "mps")])
def test_the_command_that_mends_names_a_device_that_convert_takes(make, device, to) -> None:
    [finding] = make.findings(make.inventory((*make.model(device=device), make.tensor("model.x", device="cpu"))))

    assert finding.fix == f"ckptmove convert 'runs/my run.pth' --to {to}"


def test_findings_come_in_the_order_of_their_codes(make) -> None:
    inventory = make.inventory(
        make.model("module.", device="cuda:3"),
        [make.optimizer(device="cpu", step="cuda:3")],
        root_keys=tuple(f"module.{key}" for key in make.layers),
        globals=(EVIL,),
    )

    codes = [finding.code for finding in make.findings(inventory)]

    assert codes == ["D102", "D103", "O201", "K601", "S701", "S702"]


def test_work_grows_with_the_file_and_not_faster(make) -> None:
    def calls(layers: int) -> int:
        """How often the rules call a function, of Python or of C."""
        shapes = [(8, 8) if index % 2 else (8,) for index in range(layers)]
        tensors = [make.tensor(f"model.{index}.weight", shape) for index, shape in enumerate(shapes)]
        tensors += [make.tensor(f"model.{index}.running_mean", (8,)) for index in range(layers)]
        inventory = make.inventory(tensors, [make.optimizer(shapes)])
        inventory = make.replace(inventory, storages=tuple(make.storage(t.name, t.nbytes) for t in inventory.tensors))
        events = Counter()
        sys.setprofile(lambda _frame, event, _argument: events.update([event]))
        try:
            found = find_all(inventory, Context())
        finally:
            sys.setprofile(None)
        assert found == ()
        return events["call"] + events["c_call"]

    # Ten times the tensors: ten times the calls, where a quadratic loop would make a hundred.
    assert calls(1000) < 12 * calls(100)
