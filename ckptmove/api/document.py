"""The JSON documents of all commands, version 1. Their JSON Schema is ``schema.json`` in this folder.

Every key of the schema is always present, empty or null if it does not apply.

Prose (messages, hints, fixes, details, notes) has escapes in place of control characters, because programs print it.
Data (names, paths, devices, values) is exact, because programs look things up by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove.api.figures import shares
from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.pairing import parameter_names
from ckptmove.text import escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.failures import Failure
    from ckptmove.api.figures import Expectation
    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.checkpoint.summary import CheckpointSummary
    from ckptmove.comparison.differences import Differences, Gap
    from ckptmove.conversion.results import Converted, UndoResult
    from ckptmove.findings.catalogue import Entry
    from ckptmove.findings.fit import Fit
    from ckptmove.io.contracts import Traffic
    from ckptmove.model import Finding, Inventory, TensorRecord
    from ckptmove.moves import MovePlan
    from ckptmove.proof.evidence import RanksOfRun, Verdict

Json: TypeAlias = "dict[str, Any]"  # what json.dumps takes; a closed type would be recursive

SCHEMA_VERSION: Final = 1
_NO_CONVERSION: Final = {
    "plan": None, "format": None, "output": None, "in_place": False, "bytes_copied": 0, "seconds": 0.0,
    "verified": None,
}  # fmt: skip


def dumps(document: Json, *, indent: int | None = None) -> str:
    """Serialize a document as ASCII, which every encoding can write, lone surrogates included."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False, indent=indent)


def envelope(command: str | None, exit_code: int, failures: Sequence[Failure]) -> Json:
    """The keys that every document has, and those of its command, without an answer.

    The command is None if the command line names no known one.
    """
    errors = [failure_to_json(failure) for failure in failures]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "checkpoints": [],
        "error": errors[0] if errors else None,
        "errors": errors,
        **_own_keys(command),
    }


def _own_keys(command: str | None) -> Json:
    """The keys of one command, empty."""
    if command == "convert":
        return {**_NO_CONVERSION, "notes": [], "conversions": []}
    if command == "diff":
        return {"same": None, "added": [], "removed": [], "changed": [], "uncompared": [], "notes": []}
    return {"verify": {"results": []}, "rules": {"rules": []}}.get(command or "", {})


def conversion(result: Converted) -> Json:
    """The keys of ``convert``."""
    return {
        "plan": _plan(result.plan),
        "format": result.container,
        "output": result.output,
        "in_place": result.in_place,
        "bytes_copied": result.bytes_copied,
        "seconds": result.seconds,
        "verified": result.verified,
        "notes": [escaped(note) for note in (*map(str, result.unmatched), *result.warnings, *result.notes)],
    }


def not_converted(output: str) -> Json:
    """The keys of ``convert`` for a checkpoint that was left out because its output exists."""
    return {**_NO_CONVERSION, "notes": [escaped(f"skipped: {output} exists")]}


def undone(result: UndoResult) -> Json:
    """The keys of ``convert --undo``, which has no plan and copies nothing."""
    return {
        "output": result.path if result.is_done else None,
        "in_place": True,
        "seconds": result.seconds,
        "notes": [*map(escaped, result.notes)],
    }


def difference(result: Differences) -> Json:
    """The keys of ``diff``."""
    return {
        "same": result.same,
        "added": list(result.added),
        "removed": list(result.removed),
        "changed": [
            {
                "name": change.name,
                "what": change.what,
                "from": change.source,
                "to": change.target,
                "max_abs": _plain(change.gap.max_abs) if change.gap is not None else None,
                "max_rel": _plain(change.gap.max_rel) if change.gap is not None else None,
                "lone_nan": _lone_nan(change.gap),
            }
            for change in result.changed
        ],
        "uncompared": [{"name": one.name, "reason": escaped(one.reason)} for one in result.uncompared],
        "notes": [*map(escaped, result.notes)],
    }


def _lone_nan(gap: Gap | None) -> Json | None:
    lone = None if gap is None else gap.lone_nan
    if lone is None:
        return None
    apart = {"max_abs": _plain(lone.max_abs), "max_rel": _plain(lone.max_rel)}
    return {"from": lone.first, "to": lone.second, "elements": lone.elements, **apart}


def rule(entry: Entry) -> Json:
    """One entry of ``rules``."""
    return {
        "code": entry.code,
        "name": entry.name,
        "severity": entry.severity.value,
        "when": entry.when,
        "why": entry.why,
        "fix": entry.mend,
        "found_by": entry.found_by,
    }


def failure_to_json(failure: Failure) -> Json:
    """One entry of ``errors``."""
    return {
        "kind": failure.kind,
        "message": escaped(failure.message),
        "hint": escaped(failure.hint),
        "path": failure.path,
        "exit_code": failure.exit_code,
    }


def checkpoint(
    inventory: Inventory,
    findings: Sequence[Finding],
    *,
    tensors: Sequence[TensorRecord],
    summary: CheckpointSummary,
    pairings: Sequence[Pairing] = (),
    expectation: Expectation | None = None,
    fit: Fit | None = None,
    unchecked: Sequence[str] = (),
    traffic: Traffic | None = None,
    version: str | None = None,
) -> Json:
    """One entry of ``checkpoints``, the answer of ``inspect``.

    Args:
        findings: the problems to list.
        tensors: the tensors to list.
        unchecked: paths of files without CRCs to compare.
        version: fingerprint of the sizes and versions of its files, or None.
    """
    parameters = parameter_names(inventory.optimizers, pairings)
    return {
        "path": inventory.path,
        "version": version,
        "container": inventory.container,
        "layout": inventory.layout,
        "size_bytes": inventory.size_bytes,
        "torch_version": inventory.torch_version,
        "producer": inventory.producer,
        "summary": _summary(summary),
        "files": [_file(one) for one in inventory.files] if isinstance(inventory, DirectoryInventory) else [],
        "devices": [
            {"device": share.device, "role": share.role, "tensors": share.tensors, "bytes": share.nbytes}
            for share in shares(inventory.tensors)
        ],
        "tensors": [_tensor(tensor) | {"parameter": parameters.get(tensor.name)} for tensor in tensors],
        "mentions": [
            {"where": mention.where, "kind": mention.kind, "value": mention.value} for mention in inventory.mentions
        ],
        "globals": [
            {
                "name": use.name,
                "weights_only": use.weights_only,
                "weights_only_since": use.weights_only_since,
                "verdict": use.verdict,
                "record": use.record or None,
            }
            for use in (*inventory.globals, *inventory.apart)
        ],
        "findings": [_finding(finding) for finding in findings],
        "expected": _expected(expectation) if expectation else None,
        "fit": None if fit is None else fit._asdict(),
        "unchecked": list(unchecked),
        "remote": None if traffic is None else {"requests": traffic.requests, "bytes_read": traffic.nbytes},
    }


def _summary(summary: CheckpointSummary) -> Json:
    return {
        "parameters": summary.parameters,
        "dtypes": dict(summary.dtypes),
        "epoch": summary.epoch,
        "step": summary.step,
        "learning_rates": list(summary.learning_rates),
        "optimizers": list(summary.optimizers),
    }


def _file(one: FileRecord) -> Json:
    return {
        "path": one.path,
        "roles": list(one.roles),
        "container": one.container,
        "layout": one.layout,
        "size_bytes": one.size_bytes,
        "tensors": one.tensors,
        "devices": list(one.devices),
    }


def _tensor(tensor: TensorRecord) -> Json:
    return {
        "name": tensor.name,
        "role": tensor.role,
        "kind": tensor.kind,
        "device": tensor.device,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride),
        "storage": tensor.storage,
        "storage_offset": tensor.storage_offset,
        "bytes": tensor.nbytes,
    }


def _finding(finding: Finding) -> Json:
    return finding_to_json(finding) | {"message": escaped(finding.message), "fix": escaped(finding.fix)}


def finding_to_json(finding: Finding) -> Json:
    """A finding, with its texts as they are."""
    return {**finding._asdict(), "severity": finding.severity.value, "where": list(finding.where)}


def _expected(expectation: Expectation) -> Json:
    return {
        "device": expectation.device,
        "met": not expectation.misplaced,
        "unplaced": expectation.unplaced,
        "misplaced": [
            {"storage": edit.storage, "names": list(edit.names), "from": edit.source, "to": edit.target}
            for edit in expectation.misplaced
        ],
    }


def _plan(plan: MovePlan) -> Json:
    return {
        "edits": [
            {
                "storage": edit.storage,
                "names": list(edit.names),
                "from": edit.source,
                "to": edit.target,
                "bytes": edit.nbytes,
                "reason": edit.reason,
                "cast": {"from": edit.cast[0], "to": edit.cast[1]} if edit.cast else None,
            }
            for edit in plan.edits
        ],
        "kept": [{"name": kept.name, "device": kept.device, "reason": kept.reason} for kept in plan.kept],
        "flags": [
            {"where": flag.where, "from": flag.source, "to": flag.target, "reason": flag.reason} for flag in plan.flags
        ],
        "renamed": [{"where": one.where, "from": one.source, "to": one.target} for one in plan.renamed],
        "dropped": [
            {"name": one.name, "tensors": one.tensors, "bytes": one.nbytes, "reason": one.reason}
            for one in plan.dropped
        ],
        "replaced": [{"where": one.where, "from": one.source, "to": one.target} for one in plan.replaced],
        "trimmed": [
            {"storage": one.storage, "names": list(one.names), "from": one.source_nbytes, "to": one.nbytes}
            for one in plan.trimmed
        ],
    }


def result_to_json(result: Verdict) -> Json:
    """One entry of ``results``, the answer of ``verify``."""
    return {
        "path": result.path,
        "target": result.target,
        "mode": result.mode,
        "passed": result.passed,
        "proven": result.proven,
        "checks": [
            {
                "name": check.name,
                "status": check.status,
                "detail": escaped(check.detail),
                "evidence": {name: _plain(value) for name, value in check.evidence},
            }
            for check in result.checks
        ],
        "findings": [_finding(finding) for finding in result.findings],
        "sample": None if result.sample is None else result.sample._asdict(),
        "fixed": [one._asdict() for one in result.fixed],
        "unfixed": escaped(result.unfixed) or None,
        "not_looked_at": list(result.not_looked_at),
        **_ranks(result.run),
    }


def _ranks(run: RanksOfRun | None) -> Json:
    """The keys of a run under torchrun; null and empty for any other."""
    if run is None:
        return {"ranks": None, "mesh": None, "saved_by": None, "rank_faults": []}
    return {
        "ranks": run.ranks,
        "mesh": {"shape": list(run.shape), "dims": list(run.dims)} if run.shape else None,
        "saved_by": run.saved_by,
        "rank_faults": [{**fault._asdict(), "fault": escaped(fault.fault)} for fault in run.faults],
    }


def _plain(value: object) -> object:
    """A value as JSON has it: NaN and infinities, which JSON lacks, become strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)
