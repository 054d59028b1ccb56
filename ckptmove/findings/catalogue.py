"""The catalogue of findings: meaning, consequences and fix of each code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ckptmove.model import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable


class Entry(NamedTuple):
    """Documentation of one code."""

    code: str  # stable code
    name: str  # name in kebab case
    severity: Severity  # severity of its findings, unless `when` names another one
    when: str  # condition for the finding, in one line
    why: str  # consequences for the user, with the error message of torch if it has one
    mend: str  # how to fix it
    found_by: Literal["inspect", "verify"] = "inspect"  # command that finds it


def found(code: str, message: str, where: Iterable[str], fix: str) -> Finding:
    """Create a finding with the name and the severity of its code."""
    entry = CATALOGUE[code]
    return Finding(code=code, name=entry.name, severity=entry.severity, message=message, where=tuple(where), fix=fix)


_ENTRIES: Final = (
    Entry(
        code="D101",
        name="mixed-devices",
        severity=Severity.WARNING,
        when="tensors of the model, or of its loss, are on more than one device (an error for a pickled module with "
        "tensors on the CPU)",
        why="A forward pass needs its tensors on one device: 'Expected all tensors to be on the same device, but "
        "found at least two devices'. load_state_dict copies each tensor to the device of the model, so a "
        "resume that goes through it works, as long as torch.load finds every device. A pickled module, or a "
        "tensor that no load_state_dict restores (pos_weight of a loss), stays on the device in the file. In the "
        "file of a model-parallel run, several devices are correct.",
        mend="Gather it on one device with 'ckptmove convert PATH --to DEVICE'. For a model-parallel run, leave it.",
    ),
    Entry(
        code="D102",
        name="optimizer-device",
        severity=Severity.WARNING,
        when="optimizer state is on another device than its parameter (an error in a pickled optimizer)",
        why="The model was moved after the optimizer was built, or only one of them was mapped. load_state_dict of a "
        "torch.optim class moves moments to their parameter, so a resume works when it runs after model.to(device). "
        "If it runs before, in optimizers with their own load_state_dict, and for a pickled optimizer, the first step "
        "raises 'Expected all tensors to be on the same device'.",
        mend="Move both at once with 'ckptmove convert PATH --to DEVICE': moments follow, and 'step' stays where torch "
        "keeps it.",
    ),
    Entry(
        code="D103",
        name="device-index",
        severity=Severity.ERROR,
        when="a tag names an index that the target machine lacks (by --devices, --to or --expect); if unknown, a note",
        why="torch.load without map_location raises 'Attempting to deserialize object on CUDA device 3 but "
        "torch.cuda.device_count() is 1'. A torch.device object with this index loads, and fails at its first "
        "use; map_location does not change it.",
        mend="'ckptmove convert PATH --to cuda:0', or correct the number that --devices gives.",
    ),
    Entry(
        code="D104",
        name="device-mention",
        severity=Severity.WARNING,
        when="a torch.device, a device string or device_ids in the stored objects names another accelerator than the "
        "model's device, or the DeviceMesh of a DTensor another device type than the DTensor's; or the graph of a "
        "torch.export archive takes a weight on another device than the file has it on (an error)",
        why="map_location moves tensors only: after torch.load(map_location='cpu'), args.device is still 'cuda:3'. A "
        "script that reads its device from the checkpoint then goes to the old one, and fails there, or uses the "
        "wrong GPU without a word. The cpu is everywhere, and often meant: it is not counted. A DTensor of a mesh with "
        "another device type than the model's raises at the first copy: 'Cannot run aten.copy_.default on inputs with "
        "different meshes'.",
        mend="'ckptmove convert PATH --to DEVICE' moves torch.device objects and meshes; --rewrite-strings moves "
        "strings too. Device ids are for your script to set. A torch.export program is moved before it is saved, by "
        "torch.export.passes.move_to_device_pass.",
    ),
    Entry(
        code="O201",
        name="step-on-accelerator",
        severity=Severity.WARNING,
        when="'step' (NAdam: also 'mu_product') is on an accelerator, and its group is neither capturable nor fused",
        why="map_location took the step counters along. Nothing fails in torch today: each step of each parameter "
        "reads its counter back from the GPU and waits for it, so training is slower, sometimes several times. "
        "torch 1.12.0 raised 'If capturable=False, state_steps should not be CUDA tensors'. load_state_dict "
        "leaves the counters there. ASGD is not concerned: torch creates its counters on the device.",
        mend="'ckptmove convert PATH --to DEVICE' puts the counters on the CPU, where torch creates them.",
    ),
    Entry(
        code="O202",
        name="capturable-unsupported",
        severity=Severity.ERROR,
        when="a group is capturable=True and not fused, and the target (cpu, mps) cannot do that; or the target has no "
        "fused kernels, and a group is fused=True",
        why="load_state_dict restores the flag from the file, also over the argument of the constructor. The "
        "first step then raises 'If capturable=True, params and state_steps must be on supported devices', or "
        "'`fused=True` requires all the params to be floating point Tensors of supported devices'.",
        mend="'ckptmove convert PATH --to DEVICE' sets the flag as the target needs it.",
    ),
    Entry(
        code="O203",
        name="step-on-cpu",
        severity=Severity.INFO,
        when="a group is capturable or fused, its 'step' is on the CPU, and the target is an accelerator",
        why="torch needs the counters of this group on the device of the parameters. load_state_dict of recent torch "
        "moves them there; older versions did not, and raised at the first step.",
        mend="Recent torch needs no fix; 'ckptmove convert PATH --to DEVICE' moves them in the file.",
    ),
    Entry(
        code="O204",
        name="state-shape",
        severity=Severity.ERROR,
        when="a moment has another shape than its parameter, or than any tensor that could be its parameter",
        why="The state belongs to another model, a layer was changed, or the parameters were reordered. "
        "load_state_dict checks no shapes; the first step raises 'The size of tensor a (3) must match the size of "
        "tensor b (2)', or broadcasts and is wrong without a word.",
        mend="Build the optimizer with the parameters in the order they had when the file was saved, or resume with "
        "the weights alone and let the optimizer start anew.",
    ),
    Entry(
        code="O205",
        name="state-missing",
        severity=Severity.WARNING,
        when="some parameters of a group have state and others do not, or none has any after steps of the training",
        why="A parameter that never had a gradient (a frozen layer, an unused head) has no state, and that is "
        "healthy. If it was trained, its state was lost: its moments start at zero, its step count at one, and "
        "the loss jumps. The file does not show which of the two it is. A weight that its library always freezes "
        "(dfl.conv.weight of YOLO) is not counted.",
        mend="If those parameters were frozen, nothing. If not, save the checkpoint again from the run.",
    ),
    Entry(
        code="O206",
        name="group-size",
        severity=Severity.ERROR,
        when="the groups list more parameters, in all or of one shape, than the file has tensors that could be, or the "
        "state has entries that no group lists; in the folder of an adapter (PEFT), a warning",
        why="load_state_dict compares the groups with those of the new optimizer: 'loaded state dict contains a "
        "parameter group that doesn't match the size of optimizer's group'. State that no group lists is never "
        "used. Fewer parameters than tensors is no fault: buffers, frozen and tied weights, and a second "
        "optimizer explain it.",
        mend="Take model and optimizer from the same checkpoint, or resume with the weights alone.",
    ),
    Entry(
        code="O207",
        name="state-incomplete",
        severity=Severity.ERROR,
        when="a group or a state entry lacks a key that its optimizer reads",
        why="load_state_dict does not check the keys; the first step then raises KeyError: 'exp_avg_sq', on the "
        "parameter of that entry.",
        mend="Save the checkpoint again from the run, or resume with the weights alone.",
    ),
    Entry(
        code="O208",
        name="state-order",
        severity=Severity.WARNING,
        when="the moments of a single group have the shapes of the model's tensors, but neither in its order, nor "
        "backward, nor in that of its layers in another order",
        why="load_state_dict gives the n-th state to the n-th parameter and compares no shapes. A script may list its "
        "parameters in an order of its own, and has to list them so again; an entry at the wrong place looks the same. "
        "Backward, or layer by layer in another order, is common in scripts: no finding, though two swapped entries "
        "may fit it too. 'ckptmove verify' proves no resume of any of them; with --case it does.",
        mend="If your script lists its parameters in an order of its own, pass --ignore O208. If not, save the "
        "checkpoint again from the run, or resume with the weights alone.",
    ),
    Entry(
        code="O209",
        name="uneven-steps",
        severity=Severity.INFO,
        when="the step counts of parameters in one group differ",
        why="Adam corrects its moments by the count: a stale count makes steps too large. It is correct for a layer "
        "that was frozen or unused for a time.",
        mend="If no layer was, take another checkpoint: 'ckptmove diff' with an earlier one shows which counts did not "
        "change.",
        found_by="verify",
    ),
    Entry(
        code="O210",
        name="state-precision",
        severity=Severity.WARNING,
        when="a step count is float16 or bfloat16, or moments have a lower precision than their parameters",
        why="The whole checkpoint was cast before it was saved. bfloat16 counts to 256 and float16 to 2048: a further "
        "step adds nothing, and Adam's bias correction stays where it was. Moments lose digits, and small second "
        "moments become zero. load_state_dict casts moments to the dtype of their parameter: what was lost stays lost.",
        mend="Cast only the model's state_dict before torch.save, and save the optimizer as it is. From this file, "
        "resume with the weights alone, or accept other steps.",
    ),
    Entry(
        code="O211",
        name="schedule-free-mode",
        severity=Severity.WARNING,
        when="a schedule-free optimizer was saved in train mode",
        why="In train mode the model holds the weights at which gradients are taken. The averaged weights, which are "
        "those to evaluate and to publish, are not in the file. Training resumes from both.",
        mend="Call optimizer.eval() before torch.save, and optimizer.train() after it.",
    ),
    Entry(
        code="R301",
        name="rng-on-accelerator",
        severity=Severity.ERROR,
        when="the state of a random generator is not a CPU ByteTensor",
        why="map_location took it along, or it was cast. torch.set_rng_state and torch.cuda.set_rng_state, too, want "
        "it on the CPU: 'RNG state must be a torch.ByteTensor'.",
        mend="'ckptmove convert PATH --to DEVICE' puts RNG states back on the CPU. One that was cast cannot be mended.",
    ),
    Entry(
        code="R302",
        name="resume-incomplete",
        severity=Severity.INFO,
        when="the file has a model and its optimizer, but no scheduler, RNG states or counters (or no GradScaler for "
        "float16); printed only with -v, --strict or --select R302, and in JSON",
        why="Training goes on, but not as it would have: the learning rate starts over, the data comes in another "
        "order, dropout falls elsewhere. A GradScaler is missed only where float16 tensors show that one was "
        "needed: bfloat16 and float32 runs have none.",
        mend="Save those too: scheduler.state_dict(), scaler.state_dict(), torch.get_rng_state(), "
        "torch.cuda.get_rng_state_all(), and the epoch.",
    ),
    Entry(
        code="R303",
        name="rng-count",
        severity=Severity.WARNING,
        when="the file has more per-device RNG states than the target machine has devices (--devices N)",
        why="torch.cuda.set_rng_state_all sets a state on each device, from the first on, and fails at the first one "
        "that is not there: 'IndexError: tuple index out of range'. Fewer states than devices are all set.",
        mend="Set as many states as there are devices.",
    ),
    Entry(
        code="R304",
        name="scheduler-rate",
        severity=Severity.WARNING,
        when="the learning rates that a scheduler has set last are not those in the optimizer's param_groups",
        why="A scheduler puts its rates into the groups at every step, so both are equal when they are saved "
        "together. StepLR, CosineAnnealingLR and others go on from the rate in the group: after a resume they follow "
        "another curve. The file is correct if the script itself sets lr in addition to its scheduler.",
        mend="Save both at the same moment, or set the groups: for group, lr in zip(optimizer.param_groups, "
        "scheduler.get_last_lr()): group['lr'] = lr.",
    ),
    Entry(
        code="T401",
        name="dtype-unsupported",
        severity=Severity.ERROR,
        when="the target does not support a dtype (mps: float64, complex128, float8, float4, quantized, bits dtypes)",
        why="torch.load and .to raise 'Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't "
        "support float64'. A float8 tensor loads, and the first operation raises 'Trying to convert Float8_e4m3fn to "
        "the MPS backend but it does not have support for that dtype'; so does a cast. (torch 2.15 begins to take it.)",
        mend="'ckptmove convert PATH --to mps --cast' makes float64 float32 and complex128 complex64, moments too. It "
        "takes no other dtype: load the file on the CPU and cast there; bfloat16 holds each value of a float8 dtype. "
        "--keep leaves a tensor on the CPU.",
    ),
    Entry(
        code="T402",
        name="stored-scales",
        severity=Severity.INFO,
        when="a quantized weight is stored beside its scales",
        why="The stored numbers are no weights: each is multiplied by a scale, of its block, channel or tensor, before "
        "it is used. A cast of the numbers alone gives another model, so 'convert --dtype' refuses it.",
        mend="Nothing: load it with the library that quantized it.",
    ),
    Entry(
        code="N501",
        name="not-finite",
        severity=Severity.ERROR,
        when="weights or optimizer state contain NaN or Inf (only verify reads them), or a scheduler contains NaN or "
        "an infinite learning rate",
        why="Every step spreads it: the loss is NaN from then on, or at the next use of that weight.",
        mend="Resume from an earlier checkpoint.",
    ),
    Entry(
        code="N502",
        name="negative-moment",
        severity=Severity.ERROR,
        when="a second moment or a step count is below zero; or a step count is not a whole number, or is 0 beside "
        "moments; or another scalar of the state is out of its range",
        why="No optimizer writes that: the bytes were damaged or mixed up, or the counts were lost. Adam takes the "
        "square root of a second moment, which is NaN, and divides by a power of the count.",
        mend="Resume from an earlier checkpoint, or without this optimizer state.",
        found_by="verify",
    ),
    Entry(
        code="N503",
        name="scaler-scale",
        severity=Severity.ERROR,
        when="the scale of a GradScaler is 0, infinite or NaN",
        why="GradScaler multiplies the loss by it and divides the gradients by it. With 0, they become NaN, and the "
        "step writes them into the weights; with Inf or NaN, every step is skipped without a word.",
        mend="Make a new GradScaler in place of restoring this one, or resume from an earlier checkpoint.",
    ),
    Entry(
        code="K601",
        name="wrapper-prefix",
        severity=Severity.WARNING,
        when="keys of a state_dict contain the prefix of a wrapper: _orig_mod., _checkpoint_wrapped_module., "
        "_fsdp_wrapped_module. or _forward_module. at any place; a note if every key starts with module. only",
        why="The state_dict of a compiled, checkpointed or sharded model, or of one in DataParallel or DDP, was saved. "
        "A plain model refuses it: 'Missing key(s) in state_dict', 'Unexpected key(s)'; with strict=False it loads "
        "nothing under those keys and keeps its random weights. module. may also be a part of the model: policies of "
        "tensordict and torchrl have one.",
        mend="'ckptmove convert PATH --strip-prefix' removes it from the file. Or load into a wrapped model. If only "
        "module. is in front, use it when load_state_dict refuses the keys.",
    ),
    Entry(
        code="S701",
        name="weights-only",
        severity=Severity.WARNING,
        when="the pickle uses names, or opcodes, that torch.load(weights_only=True) refuses; or the file is a tar of "
        "torch 0.1, which it always refuses",
        why="weights_only=True is the default since torch 2.6: 'Weights only load failed'. With weights_only=False "
        "the file may run any code it holds. A note where transformers or accelerate resume anyway: they allow the "
        "state of NumPy's generator, and do not read training_args.bin.",
        mend="The finding names the first of these that works on the file. 'ckptmove convert PATH --plain' replaces "
        "the objects by plain values. For the classes of torchao, of DTensors and of jagged tensors, import their "
        "module before torch.load(weights_only=True). ckptmove.load(PATH) reads opcodes that torch refuses. None of "
        "them runs code of the file. If no fix is named, save it again without the objects, in the program that made "
        "it.",
    ),
    Entry(
        code="S702",
        name="dangerous-global",
        severity=Severity.ERROR,
        when="a pickle in the file, or in one beside it, names something of the standard library, torch or numpy that "
        "is not known to be harmless, or calls a function of another package",
        why="torch.load(weights_only=False) and pickle.load would run it with your rights. A class of another package "
        "that the pickle makes, and a function that it only stores, are S701.",
        mend="Do not load it. Ask its author for safetensors.",
    ),
    Entry(
        code="S703",
        name="weights-only-older",
        severity=Severity.INFO,
        when="the pickle uses names that torch.load(weights_only=True) accepts in a newer torch and refuses in an "
        "older one (from 2.4 on)",
        why="The list of accepted names has grown: bytes came with torch 2.5; sets, complex numbers and uint16 with "
        "2.6; float8_e8m0fnu with 2.7. An older torch raises 'Unsupported global'.",
        mend="Load it with the newer torch.",
    ),
    Entry(
        code="S704",
        name="code-beside",
        severity=Severity.INFO,
        when="the folder of the checkpoint has code that a loader would import: auto_map of a config.json with its .py "
        "file, or a case, a script or an optimizer class of another module in [tool.ckptmove] of a pyproject.toml",
        why="The checkpoint itself may be harmless, but from_pretrained(..., trust_remote_code=True) runs the code, "
        "and ckptmove verify runs the case, the script or the module. No inspection of the checkpoint covers it.",
        mend="Read the code before you load the model in this way.",
    ),
    Entry(
        code="S705",
        name="unread-file",
        severity=Severity.INFO,
        when="a file beside the checkpoint was not read, although a loader may unpickle it: .bin, .pkl or .pt with "
        "something else in it, a compressed pickle, an archive, an array of objects, a pickle in a hidden folder, or a "
        "git-lfs pointer",
        why="Nothing is known of its content but what the finding names. Programs open such files by their names.",
        mend="Inspect it by its own path, after unpacking it if it is compressed. For a git-lfs pointer, fetch the "
        "real file with 'git lfs pull'.",
    ),
    Entry(
        code="F801",
        name="crc-mismatch",
        severity=Severity.ERROR,
        when="the bytes of a record differ from the CRC that the archive holds for them (inspect --check, verify, "
        "convert)",
        why="A copy or a disk has changed them. torch.load does not check: it loads wrong weights without an error.",
        mend="Copy or download it again; the lost bytes are not in the file.",
    ),
    Entry(
        code="F802",
        name="truncated",
        severity=Severity.ERROR,
        when="a record reaches past the end of the file, a storage is shorter than its tensors, or absent, or a piece "
        "of a distributed checkpoint differs from .metadata; or a tar of files has no end (a warning)",
        why="The copy or the save was cut off: 'PytorchStreamReader failed', or 'file in archive is not in a "
        "subdirectory', or too few bytes for a tensor. A tar that was cut between two members is a shorter tar to "
        "tar and to Python: only the blocks of zeros at its end are missing. A whole piece may be of another save.",
        mend="Copy or download it again, all files of one save, or go back to an earlier checkpoint.",
    ),
    Entry(
        code="F803",
        name="compressed-records",
        severity=Severity.ERROR,
        when="the bytes of a storage are compressed in the archive",
        why="Some tool zipped the file again. torch.load reads it correctly, but torch.load(mmap=True) reads the "
        "compressed bytes as numbers: garbage weights, and no error.",
        mend="'ckptmove convert PATH --compact' stores them uncompressed. Until then, load it without mmap.",
    ),
    Entry(
        code="F804",
        name="dead-bytes",
        severity=Severity.INFO,
        when="bytes of the file are reached by no tensor (at least 1 KiB and 1 % of the file), or a record by no "
        "storage, or a file by no .metadata, or a conversion in place has kept the replaced bytes; or an archive of "
        "files has another one in it that may hold checkpoints (a warning)",
        why="torch.save writes the whole storage of a view: four rows of an embedding cost the whole table. Nothing "
        "fails; the file is larger than its tensors, and may contain data that you do not want to share. Archives in "
        "archives are copied unchanged: checkpoints in them are not listed, converted or verified.",
        mend="'ckptmove convert PATH --compact' writes only the bytes that tensors reach. In the script, save "
        "tensor.clone() instead of the view. convert --undo reverts a conversion in place. Unpack an archive that "
        "contains others.",
    ),
    Entry(
        code="F805",
        name="ambiguous-archive",
        severity=Severity.WARNING,
        when="the archive has bytes outside of every record, or after the end of its pickle; or another reader sees "
        "something else in the file, for example a safetensors file that is a pickle too (an error)",
        why="torch.save writes none of these. torch.load ignores such bytes; a scanner, or a reader that looks for "
        "records from the front, may take them for another checkpoint than the one that torch loads. Where two readers "
        "see different content, convert refuses the file. Worse faults (two records of one name, records that share "
        "bytes, headers that disagree) are errors, not findings.",
        mend="Trust the file no more than its source. 'ckptmove convert PATH --compact' leaves such bytes out; it "
        "does not change an archive with code, which its own program has to save again.",
    ),
    Entry(
        code="F806",
        name="newer-files",
        severity=Severity.WARNING,
        when="files of a distributed checkpoint were written after its .metadata",
        why="torch.distributed.checkpoint.save writes .metadata last. A later save into the same folder that was "
        "interrupted leaves files of both saves, and a load reads them without an error. A copy that does not keep "
        "the times of files looks the same.",
        mend="'ckptmove diff' with an earlier checkpoint shows what changed. Save each checkpoint to a folder of its "
        "own, and copy with 'cp -a' or 'rsync -a'.",
    ),
    Entry(
        code="F807",
        name="mixed-saves",
        severity=Severity.ERROR,
        when="files of a distributed checkpoint were written after its .metadata, and their step counts are not those "
        "of the other files; or all step counts in a file are equal, and others than in the files that have parts of "
        "the same parameters; or files of ranks have different step counts",
        why="A rank was killed while torch.distributed.checkpoint.save replaced an earlier checkpoint in the folder. "
        "Some parameters are of one save, and some of the other. A load reads them without an error.",
        mend="Resume from another checkpoint. Save each checkpoint to a folder of its own.",
    ),
    Entry(
        code="F808",
        name="missing-rank",
        severity=Severity.ERROR,
        when="files of ranks are missing: the device mesh of the others, or the world size in their names, has more "
        "ranks than there are files (info if the other files have every part of each tensor)",
        why="Each rank has saved its own shards. The others load without an error, and the shards of the missing ranks "
        "are in no file.",
        mend="Copy the missing files from the machines of their ranks, or go back to an earlier checkpoint.",
    ),
    Entry(
        code="F809",
        name="absent-shard",
        severity=Severity.WARNING,
        when="a rank has no file of safetensors shards, and most bytes in the files of the other ranks are in tensors "
        "with fewer chunks than other tensors have",
        why="HuggingFaceStorageWriter saves no shapes of whole tensors: a tensor ends where its last chunk ends. If "
        "the file of the last rank is lost, its tensors are too short. A checkpoint with tensors that one rank has "
        "saved whole, because all ranks have them, looks the same.",
        mend="Compare the shapes with those of the model. If they are too short, copy the missing file.",
    ),
    Entry(
        code="F810",
        name="other-replica",
        severity=Severity.ERROR,
        when="several ranks have saved the same shard of a tensor (HSDP, tensor parallel), and its bytes differ by "
        "their CRCs. Of files without CRCs, inspect --check and verify compare the bytes. Shards that are views of a "
        "larger storage are not compared",
        why="Replicas are equal after each step. If they differ, a file is of another save, or the ranks have drifted "
        "apart in training. Each rank resumes from its own values.",
        mend="Resume from an earlier checkpoint, or copy the file of the rank that has the right values.",
    ),
    Entry(
        code="F811",
        name="dangling-pointer",
        severity=Severity.WARNING,
        when="'latest' (DeepSpeed) or 'latest_checkpointed_iteration.txt' (Megatron, verl) names a checkpoint that is "
        "not beside it",
        why="The trainer reads this file first. It then fails, or starts anew from random weights, although other "
        "checkpoints are there.",
        mend="Copy that checkpoint to its place, or write the name of another one into the file.",
    ),
    Entry(
        code="F815",
        name="unsafe-member",
        severity=Severity.ERROR,
        when="an archive has a member whose name or link leads out of the folder that it is unpacked to (../, an "
        "absolute path, a drive, also with backslashes), a file with a setuid or setgid bit, a device or a pipe",
        why="Some programs follow such a name when they unpack it, and write over files elsewhere. A setuid file runs "
        "with the rights of its owner. No trainer writes such members.",
        mend="Do not unpack it. Ask for an archive without such members. convert refuses to copy it.",
    ),
)

#: Every code, in the documented order.
CATALOGUE: Final[dict[str, Entry]] = {entry.code: entry for entry in _ENTRIES}
