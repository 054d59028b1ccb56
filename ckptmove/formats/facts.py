"""The properties of each format, by its name."""

from __future__ import annotations

from typing import Final, NamedTuple

#: Suffixes that ``torch.save`` and pickle files usually have.
TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


class FormatFacts(NamedTuple):
    """The properties of a format."""

    name: str  # its name in the JSON output
    has_devices: bool = True  # whether it stores a device for each storage
    why_no_devices: str = ""  # the reason why it stores none, for messages
    #: the reason why a file without tensors has no device to change, for messages; empty if it is converted to a copy.
    no_devices_when_empty: str = ""
    has_code: bool = False  # whether it holds code that relies on the dtypes of its tensors
    is_script: bool = False  # whether that code is TorchScript, which names devices
    is_table: bool = False  # whether it holds tensors by name and no objects, sorted by their names
    is_distributed: bool = False  # whether a folder of several files is one checkpoint
    #: whether ``torch.save`` writes it, in a form that ``torch.load`` has read since 0.1.10.
    is_torch_save: bool = False
    is_editable: bool = True  # whether ``convert`` can change it
    is_written: bool = True  # whether a file whose devices change keeps the format
    unwritten_hint: str = ""  # what to do instead, if it is not written and ``rewritten_as`` no format
    rewritten_as: str = ""  # the format of a file whose keys or parts change, if it is another one
    suffixes: tuple[str, ...] = ()  # suffixes of file names that its readers expect
    is_mappable: bool = False  # whether ``torch.load(mmap=True)`` maps it
    loader: str = "torch.load"  # the function or the library that reads its tensors
    #: value of this argument that loads the file. False if weights-only mode rejects the format. None if the loader
    #: has no such argument.
    weights_only: bool | None = True
    not_weights_only: str = ""  # the reason why ``torch.load(weights_only=True)`` rejects the format, for messages
    #: what to do with a file that is recognized but not supported.
    unsupported_hint: str = "ckptmove reads files of torch.save"


_FACTS: Final = {
    facts.name: facts
    for facts in (
        FormatFacts(
            "torch-zip",
            is_torch_save=True,
            suffixes=(*TORCH_SUFFIXES, ".zip", ".tar"),  # model.pth.tar is common
            is_mappable=True,
        ),
        FormatFacts("torch-legacy", is_torch_save=True, rewritten_as="torch-zip", suffixes=(*TORCH_SUFFIXES, ".tar")),
        FormatFacts(
            "torch-tar",
            is_written=False,
            rewritten_as="torch-zip",
            suffixes=(*TORCH_SUFFIXES, ".tar"),
            weights_only=False,
            not_weights_only="it is a tar of torch 0.1, which weights_only=True refuses since torch 2.6",
        ),
        FormatFacts(
            "torchscript",
            has_code=True,
            is_script=True,
            suffixes=(*TORCH_SUFFIXES, ".zip", ".tar"),
            loader="torch.jit.load",
            weights_only=None,
            not_weights_only="it is a TorchScript archive, which weights_only=True refuses since torch 2.6",
        ),
        FormatFacts(
            "torch-export",
            has_code=True,
            is_editable=False,
            is_written=False,
            unwritten_hint="move the program before torch.export.save: "
            "torch.export.passes.move_to_device_pass(program, 'DEVICE')",
            suffixes=(".pt2", ".zip"),
            loader="torch.export.load",
            weights_only=None,
            unsupported_hint="export the model again with torch 2.8 or newer: "
            "torch.export.save(torch.export.export(...), 'x.pt2')",
        ),
        FormatFacts(
            "safetensors",
            has_devices=False,
            why_no_devices="safetensors stores no device: load_file(path, device=...) decides",
            is_table=True,
            suffixes=(".safetensors",),
            loader="safetensors",
            unsupported_hint="it stores no devices: safetensors.torch.load_file(path, device='cuda:0') "
            "loads it on any device",
        ),
        FormatFacts(
            "pickle",
            no_devices_when_empty="there is no tensor in the pickle, and so no device to rewrite",
            rewritten_as="torch-zip",
            suffixes=(*TORCH_SUFFIXES, ".tar"),
            loader="pickle.load",
            weights_only=None,
        ),
        FormatFacts(
            "dcp",
            has_devices=False,
            why_no_devices="a distributed checkpoint stores no device: each tensor is loaded to where the model has it",
            is_distributed=True,
            is_editable=False,
            unwritten_hint="convert cannot change a distributed checkpoint: fix it in the script after loading",
            loader="torch.distributed.checkpoint.load",
            unsupported_hint="save it again in the program that made it, with tensors of torch's own dtypes and no "
            "extensions",
        ),
        FormatFacts(
            "rank-files",
            has_devices=False,
            why_no_devices="each rank has saved its shards from its own device",
        ),
    )
}


def facts_of(name: str) -> FormatFacts:
    """The properties of a format; those that most have of a directory or an archive of files."""
    return _FACTS.get(name) or FormatFacts(name)
