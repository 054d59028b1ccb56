"""Rules about RNG states, schedulers and counters for an exact resume: R301 to R304."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.state_dicts import model_tensors
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import census, convert_command, target_device
from ckptmove.text import amount
from ckptmove.torch_facts.devices import NO_DEVICE, is_accelerator, split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, TensorRecord

#: Elements of torch's generator states: CPU (mt19937), CUDA and XPU (philox), mps, and CUDA before torch 1.6.
_STATE_SIZES: Final = frozenset({5056, 16, 44, 824016})
#: Key of the inner schedulers of a SequentialLR or a ChainedScheduler.
_PARTS_OF_SCHEDULER: Final = "._schedulers."
#: The files of a part that transformers/trainer.py (``_save_checkpoint``) writes with each checkpoint.
_OF_TRAINER: Final = {
    "scheduler": "scheduler.pt",
    "RNG states": "rng_state.pth",
    "the script's epoch or step": "trainer_state.json",
    "GradScaler": "scaler.pt",
}
#: What makes accelerate/checkpointing.py (``save_accelerator_state``) write a part, and its file.
_OF_ACCELERATE: Final = {
    "scheduler": "accelerator.prepare(scheduler) adds scheduler.bin",
    "RNG states": "accelerator.save_state() writes random_states_0.pkl",
    "the script's epoch or step": "accelerator.register_for_checkpointing(counters) adds custom_checkpoint_0.pkl",
    "GradScaler": "Accelerator(mixed_precision='fp16') adds scaler.pt",
}
_PARTS: Final = (("scheduler", "scheduler"), ("rng", "RNG states"), ("counter", "the script's epoch or step"))


def rng_on_accelerator(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """R301: a generator state is not a ByteTensor on the CPU."""
    states = [tensor for tensor in inventory.tensors if tensor.role == "rng" and _is_moved_or_cast(tensor)]
    if not states:
        return
    held = census(f"{tensor.dtype} on {tensor.device}" for tensor in states)
    message = f"{amount(len(states), 'RNG state')} not uint8 on the CPU: {held}"
    cast = next((tensor.name for tensor in states if tensor.dtype != "uint8"), None)
    where = [tensor.name for tensor in states]
    fix = convert_command(inventory, context, where) if cast is None else f"do not restore {cast}: it was cast"
    yield found("R301", message, where, fix)


def resume_incomplete(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """R302: a checkpoint lacks parts that an exact resume needs.

    Only a file with a model and an optimizer counts: others are one of several files, or weights only. A GradScaler is
    reported only if float16 tensors show that one was used. With autocast the weights are float32 and show nothing; a
    report for each float32 and bfloat16 file would be noise.
    """
    model = model_tensors(inventory)
    if not model or not inventory.optimizers:
        return
    absent = [words for part, words in _PARTS if part not in inventory.contents]
    if "scaler" not in inventory.contents and any(tensor.dtype == "float16" for tensor in model):
        absent.append("GradScaler")
    if absent:
        place = "directory" if isinstance(inventory, DirectoryInventory) else "file"
        message = f"not in the {place}: {', '.join(absent)}; needed for an exact resume"
        yield found("R302", message, (), _save_line(inventory, context, absent))


def rng_count(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """R303: more per-device RNG states than devices cannot all be set; fewer can.

    A list has a state for each device of the machine, used or not (``get_rng_state_all``). So it is compared only with
    a number of devices from the user, not with the least number that the target implies.
    """
    target, devices = target_device(inventory, context), context.device_count
    if target is None or devices is None or not is_accelerator(target):
        return
    kind = split(target)[0]
    lists = [(where, count) for where, count in inventory.rng_devices if count > devices]
    if not lists:
        return
    where, count = lists[0]
    has = amount(devices, f"{kind} device")
    message = f"{where} holds {amount(count, 'RNG state')}, and the target machine has {has}"
    loop = f"for index, state in enumerate(states[:{devices}]): torch.{kind}.set_rng_state(state, index)"
    fix = f"in the training script, with {where} as states: {loop}"
    yield found("R303", message, [path for path, _ in lists], fix)


def scheduler_rate(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """R304: no optimizer has the learning rates that a scheduler has set last.

    From torch/optim/lr_scheduler.py ``_update_lr``: both are written in one step. The file does not record the
    optimizer of a scheduler. Of several schedulers in turn (SWALR after another one) only the last has the rates of the
    groups. So one scheduler that agrees with any optimizer is enough. Inner schedulers of a SequentialLR or a
    ChainedScheduler do not count, nor do rates that are tensors.
    """
    optimizers = [tuple(dict(group.options).get("lr") for group in one.groups) for one in inventory.optimizers]
    pairs = [
        (where, last, own)
        for where, last in inventory.last_rates
        if _PARTS_OF_SCHEDULER not in where
        for own in optimizers
        if len(own) == len(last) and all(type(rate) in {float, int} for rate in own)
    ]
    if not pairs or any(last == own for _, last, own in pairs):
        return
    where, last, own = pairs[0]
    place = next(place for place, one in enumerate(last) if one != own[place])
    message = f"{where}[{place}] is {last[place]:g}, and lr of the optimizer's group {place} {own[place]:g}"
    loop = "for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()): group['lr'] = lr"
    yield found(
        "R304", message, [where], f"in the training script, once {where or 'the scheduler'} is restored: {loop}"
    )


def _is_moved_or_cast(tensor: TensorRecord) -> bool:
    """Whether a generator state of torch is not uint8 on the CPU. Seeds (0-d) and NumPy's state may have any dtype."""
    if len(tensor.shape) != 1 or (tensor.dtype != "uint8" and tensor.shape[0] not in _STATE_SIZES):
        return False
    return tensor.dtype != "uint8" or tensor.device not in {"cpu", NO_DEVICE}


def _save_line(inventory: Inventory, context: Context, absent: list[str]) -> str:
    """The change of the script that writes the file; the Trainer of Lightning calls a hook of the module instead."""
    if inventory.layout == "hf-trainer":
        return f"copy what its Trainer wrote with it: {', '.join(_OF_TRAINER[words] for words in absent)}"
    if inventory.layout == "accelerate":
        return f"in the training script, with accelerate: {'; '.join(_OF_ACCELERATE[words] for words in absent)}"
    target = target_device(inventory, context) or "cpu"
    kind = split(target)[0]
    states = f", '{kind}_rng': torch.{kind}.get_rng_state{'_all' * (kind == 'cuda')}()" * is_accelerator(target)
    lines = {
        "scheduler": "'scheduler': scheduler.state_dict()",
        "RNG states": f"'rng': torch.get_rng_state(){states}",
        "the script's epoch or step": "'epoch': epoch",
        "GradScaler": "'scaler': scaler.state_dict()",
    }
    if inventory.layout == "lightning":
        hook = "def on_save_checkpoint(self, checkpoint): checkpoint.update"
        return f"in the LightningModule: {hook}({{{lines['RNG states']}}})" if "RNG states" in absent else ""
    return f"in the training script, save with the rest: {', '.join(lines[words] for words in absent)}"


#: The rules, in the order of the codes.
RULES: Final = (rng_on_accelerator, resume_incomplete, rng_count, scheduler_rate)
