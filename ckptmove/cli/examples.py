"""Examples for the end of each ``--help``, and for the man page."""

from __future__ import annotations

from typing import Final

#: For each command, command lines with their meaning, and its page in the documentation.
EXAMPLES: Final[dict[str, tuple[tuple[tuple[str, str], ...], str]]] = {
    "": (
        (
            ("ckptmove inspect run.pth", "what is inside, and on which devices"),
            ("ckptmove convert run.pth --to cuda:0", "write run.cuda0.pth"),
            ("ckptmove verify run.cuda0.pth", "prove that it resumes"),
        ),
        "docs/index.md",
    ),
    "inspect": (
        (
            ("ckptmove inspect run.pth", "devices and problems"),
            ("ckptmove inspect run.pth --tensors", "every tensor"),
            ("ckptmove inspect 'runs/*/last.pth' -q", "a line for each file"),
            ("ckptmove inspect run.pth --expect cpu", "exit 1 if a tensor is elsewhere"),
            ("ckptmove inspect run.pth --fit 64x80GiB", "exit 1 if it does not fit"),
            ("ckptmove inspect 's3://bucket/runs/**' --format jsonl", ""),
        ),
        "docs/formats.md",
    ),
    "convert": (
        (
            ("ckptmove convert run.pth --to cpu", "write run.cpu.pth"),
            ("ckptmove convert run.pth --map 'cuda:*=cuda:0'", "gather it on one GPU"),
            ("ckptmove convert run.pth --to mps --dry-run", "print the plan"),
            ("ckptmove convert run.pth --as-root model -o m.safetensors", ""),
        ),
        "docs/convert.md",
    ),
    "verify": (
        (
            ("ckptmove verify run.pth --to cuda:0", "simulated without a GPU"),
            ("ckptmove verify new.pth --against run.pth", "and the same values"),
            ("ckptmove verify run.pth --case train.py:case", "and a step of your model"),
            ("ckptmove verify run.pth --script train.py -- --resume run.pth", ""),
        ),
        "docs/verify.md",
    ),
    "diff": (
        (
            ("ckptmove diff epoch1.pth epoch2.pth", "tensors, devices and values"),
            ("ckptmove diff run.pth run.cuda0.pth --json", "for programs"),
        ),
        "docs/diff.md",
    ),
    "rules": (
        (
            ("ckptmove rules", "every finding"),
            ("ckptmove rules D102", "one of them"),
            ("ckptmove rules step", "those that are about step"),
        ),
        "docs/rules.md",
    ),
}  # fmt: skip


def epilog(command: str = "") -> str:
    """The end of the help of a command; without a command, of the program."""
    examples, page = EXAMPLES[command]
    longest = max(len(line) for line, meaning in examples if meaning)
    lines = [f"  {line:<{longest}}  # {meaning}" if meaning else f"  {line}" for line, meaning in examples]
    # After \b, lines are not joined.
    return "\n".join(["\b", "Examples:", *lines, "", f"More: man ckptmove, and {page} of the source."])
