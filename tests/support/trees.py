"""Trees of files of torch.save, and the objects of changed trees."""

from __future__ import annotations

import contextlib
import importlib
import io
import zipfile

import torch
from open_containers import open_container

from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.limits import Limits
from ckptmove.pickles.tree import Call, Dict, Global, List, Persistent, Set, Tuple


class SavedTree:
    """A saved object as a tree, with its inventory."""

    def __init__(self, folder, content, **options):
        self.path = folder / "tree.pth"
        torch.save(content, self.path, **options)
        container = open_container(str(self.path), Limits())
        with contextlib.closing(container.source):
            machine = container.read()
            self.inventory = build_inventory(container, machine, Limits())
        self.root = machine.root

    def load(self, root):
        """Build the object of a changed tree, with the storages of the file."""
        archive = zipfile.ZipFile(io.BytesIO(self.path.read_bytes()))
        return _Evaluation({name.rpartition("/")[2]: name for name in archive.namelist()}, archive).value(root)


class _Evaluation:
    def __init__(self, records, archive):
        self.records, self.archive, self.made = records, archive, {}

    def value(self, node):
        if id(node) not in self.made:
            self.made[id(node)] = node, self.build(node)
        return self.made[id(node)][1]

    def build(self, node):
        if isinstance(node, Dict):
            return {self.value(key): self.value(one) for key, one, _ in node.pairs()}
        if isinstance(node, List | Tuple | Set):
            return {List: list, Tuple: tuple, Set: set}[type(node)](map(self.value, node.items))
        if isinstance(node, Global):
            found = importlib.import_module(node.module)
            for part in node.name.split("."):
                found = getattr(found, part)
            return found
        if isinstance(node, Persistent):
            _, kind, key, _, _ = map(self.value, node.pid.items)
            data = torch.frombuffer(bytearray(self.archive.read(self.records[key])), dtype=torch.uint8)
            return torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=kind._dtype, _internal=True)
        return self.call(node) if isinstance(node, Call) else node

    def call(self, node):
        made = self.value(node.func)(*self.value(node.args))
        if node.state is not None:
            made.__dict__.update(self.value(node.state))
        for key, one, _ in node.assigned.pairs() if node.assigned is not None else ():
            made[self.value(key)] = self.value(one)
        return made
