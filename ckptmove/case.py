"""What a project's own function hands to ``verify --case``: its models, optimizers, loss and one batch.

Never imports torch: the user's script has done so before this is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One step of your own training, for ``ckptmove verify FILE --to cuda:0 --case train.py:case``.

    ``case`` is a function of yours that takes the device and does what your script does before it resumes::

        def case(device):
            model = Net().to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            criterion = nn.CrossEntropyLoss()
            images, labels = torch.rand(8, 3, 32, 32), torch.randint(10, (8,))

            def step(batch):  # what your loop does with a batch, as far as the loss
                images, labels = batch
                return criterion(model(images.to(device)), labels.to(device))

            return ckptmove.Case(model, optimizer, criterion, (images, labels), step)

    The stored state goes through ``load_state_dict`` of the model (strict, wrapper prefixes aside) and of the
    optimizer; then follow forward, loss, backward and ``optimizer.step()`` on that device. On a simulated one,
    ``device`` stands for it, and so do ``"cuda"`` and ``.cuda()`` in your code.

    Several models and optimizers are dicts, whose keys are those of the checkpoint. With a dict of optimizers ``step``
    is the whole body of your loop, ``backward()`` and ``optimizer.step()`` included. With one optimizer it returns the
    loss, also where the models are a dict. Of a GAN that is saved as ``{"netG": ..., "netD": ...,
    "optG": ..., "optD": ...}``::

        return ckptmove.Case(
            {"netG": netG, "netD": netD}, {"optG": optG, "optD": optD}, batch=images, step=step
        )

    A function without parameters builds on the CPU, and ``model.to(device)`` is called for it: on the models alone.

    Attributes:
        model: the ``nn.Module``, in the mode that it is to be stepped in; or a dict of modules, each restored from the
            part of the checkpoint that its key names.
        optimizer: over its parameters, in the order of the run that was saved; or a dict of optimizers, likewise. The
            resume is proven if every stored optimizer is restored into one of them, and each steps its parameters.
        criterion: the loss, called with the model's output and the targets; None (the default) where the model returns
            it.
        batch: one batch as your loader gives it, or the loader, which is asked for one batch; None by default. Without
            ``step`` it is moved to the device and means: a pair is the inputs and the targets, and inputs in a tuple or
            a dict are the model's arguments; a dict is the model's keyword arguments, less ``labels`` where a
            ``criterion`` wants them; without a criterion, all of it goes to the model, whose output is the loss or has
            one (``.loss``, ``["loss"]``).
        step: from the batch, not moved, to the loss, as your loop does it: ``lambda batch: module.training_step(batch,
            0)``. Only here can be found what your loop forgets to move. With a dict of optimizers it does all of a
            training step, and what it returns (a loss, a dict of losses, nothing) is only looked at for NaN and Inf.
            None (the default) for the meaning that ``batch`` has without it; not with a dict.
        part: where the checkpoint holds several models that fit: the key of the model's state_dict, or its path with
            dots (``"netD"``, ``"ema.state_dict"``). None (the default) takes the only one that fits.
        optimizer_part: the same for the optimizer.
    """

    model: torch.nn.Module | Mapping[str, torch.nn.Module]
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
    criterion: Callable[..., Any] | None = None
    batch: Any = None
    step: Callable[[Any], Any] | None = None
    part: str | None = None
    optimizer_part: str | None = None
