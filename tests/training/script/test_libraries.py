"""`verify --script` with the trainers of libraries, which are not required for the other tests."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import untraced

from ckptmove.api import functions as api

pytestmark = pytest.mark.unmeasured

LIGHTNING = """
import argparse, torch
import lightning
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
data = torch.utils.data.TensorDataset(torch.rand(16, 6), torch.randint(3, (16,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
device = "cuda" if args.resume else "cpu"
"""
#: The first is that of the quick set: its imports are the shortest.
SCRIPTS = {
    "accelerate": """
        import argparse, torch
        from accelerate import Accelerator
        from torch import nn

        parser = argparse.ArgumentParser()
        parser.add_argument("--resume")
        args = parser.parse_args()
        data = torch.utils.data.TensorDataset(torch.rand(16, 6), torch.randint(3, (16,)))
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
        )
        if args.resume:
            accelerator.load_state(args.resume)
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if not args.resume:
            accelerator.save_state("checkpoint-1")
        """,
    "transformers": """
        import argparse, torch
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        parser = argparse.ArgumentParser()
        parser.add_argument("--resume")
        args = parser.parse_args()
        rows = [{"input_ids": torch.arange(9), "labels": n % 2} for n in range(16)]
        model = BertForSequenceClassification(
            BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        )
        options = TrainingArguments(
            ".", per_device_train_batch_size=4, max_steps=3, save_steps=1, report_to=[]
        )
        Trainer(model=model, args=options, train_dataset=rows).train(resume_from_checkpoint=args.resume)
        """,
    "lightning": LIGHTNING
    + """
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = lightning.Trainer(
    accelerator=device, devices=1, max_epochs=2 if args.resume else 1, logger=False, enable_checkpointing=False,
)
trainer.fit(Lit(), loader, ckpt_path=args.resume)
if not args.resume:
    trainer.save_checkpoint("checkpoint-1")
""",
    "lightning.fabric": LIGHTNING
    + """
fabric = lightning.Fabric(accelerator=device, devices=1)
model = nn.Linear(6, 3)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
state = {"model": model, "optimizer": optimizer}
if args.resume:
    fabric.load(args.resume, state)
for x, y in fabric.setup_dataloaders(loader):
    fabric.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
if not args.resume:
    fabric.save("checkpoint-1", state)
""",
}


@pytest.mark.slow
@pytest.mark.usefixtures("skip_what_this_torch_cannot_simulate")
@pytest.mark.parametrize("library", SCRIPTS)
def test_the_trainer_of_a_library_resumes(tmp_path, monkeypatch, library):
    pytest.importorskip(library.partition(".")[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPTS[library]))
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True, env=untraced.environment())
    result = api.verify(
        "checkpoint-1", to="cuda:0", keep=["*"], script="train.py", script_args=["--resume", "checkpoint-1"]
    )
    check = result.checks[-1]
    assert (check.name, check.status) == ("script", "passed"), check.detail
    assert dict(check.evidence)["proven"] is True, check.detail
