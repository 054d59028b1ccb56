"""F801 to F805: files with and without each finding."""

from __future__ import annotations

import pytest
from figures import figures

from ckptmove.model import ArchiveFact, TensorRecord


class TestArchive:
    def test_tensors_of_damaged_records_are_named(self, make) -> None:
        model = make.model()
        part = make.replace(model[0], name="model.sparse.values")
        sparse = make.replace(model[0], name="model.sparse", storage=None, parts=(part,))
        inventory = make.inventory(
            (sparse, *model[1:]),
            storages=(make.storage("model.0.weight", 48), make.storage("model.0.bias", 16)),
            facts=(
                ArchiveFact("crc-mismatch", "archive/data/model.0.weight", 48),
                ArchiveFact("crc-mismatch", "archive/data.pkl", 500),
            ),
        )

        [finding] = make.findings(inventory)

        assert finding.where == ("model.sparse", "archive/data.pkl")
        assert (finding.code, figures(finding.message)) == ("F801", ["2", "548"])

    def test_a_cut_file_is_one_finding(self, make) -> None:
        facts = (
            ArchiveFact("past-end", "archive/data/7", 100),
            ArchiveFact("missing-storage", "8", 16),
            ArchiveFact("missing-storage", "9", 16),
        )

        [finding] = make.findings(make.inventory(facts=facts))

        assert finding.code == "F802"
        past, absent = finding.message.split("; ")
        assert ("end" in past, figures(past)) == (True, ["1", "100"])
        assert ("absent" in absent, figures(absent)) == (True, ["2", "32"])

    @pytest.mark.parametrize(
        ("views", "nbytes", "wasted"),
        [
            ([((4,), (1,), 0)], 8000, 7984),  # a few elements of many
            ([((1000,), (1,), 0), ((1000,), (1,), 1000)], 8000, None),  # halves
            ([((1200,), (1,), 0), ((1200,), (1,), 100)], 8000, 2800),  # views that overlap
            ([((20,), (100,), 0)], 8000, 7920),  # a column: the extent is wide, the elements are few
            ([((0,), (1,), 0)], 8000, 8000),
            ([((3, 4), (0, 1), 0)], 8000, 7984),  # expanded
            ([((1,), (1,), 0)], 800, None),  # less than 1 KiB
        ],
    )
    def test_bytes_that_no_view_reaches(self, make, views, nbytes, wasted) -> None:
        tensors = [
            make.tensor(f"model.{index}", shape, stride=stride, storage="0", storage_offset=offset)
            for index, (shape, stride, offset) in enumerate(views)
        ]
        found = make.findings(make.inventory(tensors, storages=(make.storage("0", nbytes),)), "F804")

        assert [figures(finding.message) for finding in found] == ([[f"{wasted:,}", "1"]] if wasted else [])

    def test_waste_in_a_large_file_is_no_news(self, make) -> None:
        tensors = [make.tensor("model.0", (4,), storage="0")]
        inventory = make.inventory(tensors, storages=(make.storage("0", 8000),), size_bytes=10_000_000)

        assert make.findings(inventory) == ()

    def test_views_and_orphans_together(self, make) -> None:
        inventory = make.inventory(
            [make.tensor("model.0", (4,), storage="0"), make.tensor("model.1", (4,), storage="1")],
            storages=(make.storage("0", 8000), make.storage("1", 16), make.storage("unseen", 8000)),
            facts=(ArchiveFact("orphan-record", "archive/data/5", 64),),
        )

        [finding] = make.findings(inventory)

        assert finding.where == ("model.0", "archive/data/5")
        assert finding.message == (
            "7,984 bytes in 1 storage are reached by no tensor; 64 bytes in 1 record belong to no storage"
        )
        assert finding.fix == "ckptmove convert 'runs/my run.pth' --compact"

    @pytest.mark.parametrize(("stride", "offset", "is_cut"), [(500, 0, False), (500, 1, True), (2, 0, True)])
    def test_gaps_inside_a_view_are_not_cut(self, make, stride, offset, is_cut) -> None:
        """A column of a matrix spans from its first to its last row; --compact keeps the elements between."""
        tensors = [
            make.tensor("model.0", (4, 1), storage="0", storage_offset=offset, stride=(stride, 1)),
            make.tensor("model.1", (0,), storage="0"),
        ]
        inventory = make.inventory(tensors, storages=(make.storage("0", (3 * 500 + 1 + offset) * 4),))

        [finding] = make.findings(inventory, "F804")

        assert ("--compact" in finding.fix) == is_cut

    def test_views_without_a_convert_command_are_cloned(self, make) -> None:
        tensors = [make.tensor("model.0", (4,), storage="0")]
        inventory = make.inventory(tensors, storages=(make.storage("0", 8000),), container="torchscript")

        [finding] = make.findings(inventory, "F804")

        assert ".clone() of 1 view" in finding.fix

    def test_a_script_is_saved_again_as_one(self, make) -> None:
        facts = (ArchiveFact("orphan-record", "archive/data/5", 64),)

        [finding] = make.findings(make.inventory(facts=facts, container="torchscript"))

        assert finding.fix == "save it again in the program that made it"

    def test_tensors_without_storages_reach_nothing(self, make) -> None:
        lone = TensorRecord("model.x", "model", "meta", "float32", (4,), (1,), None, 0, 16, "meta")

        assert make.findings(make.inventory([lone], storages=(make.storage("0", 8000),))) == ()
