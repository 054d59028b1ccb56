"""Define ``Case``, the return value of a ``verify --case`` function. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One step of your own training, for ``ckptmove verify FILE --to cuda:0 --case train.py:case``.

    ``case`` is a function in your code. It takes the device and builds what your script builds before it resumes::

        def case(device):
            model = Net().to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            criterion = nn.CrossEntropyLoss()
            images, labels = torch.rand(8, 3, 32, 32), torch.randint(10, (8,))

            def step(batch):  # the body of your loop, up to the loss
                images, labels = batch
                return criterion(model(images.to(device)), labels.to(device))

            return ckptmove.Case(model, optimizer, criterion, (images, labels), step)

    The stored state is loaded with ``load_state_dict`` of the model (strict, ignoring wrapper prefixes), of the
    optimizer, and of what else the case has: ``scheduler``, ``scaler``, ``ema``, ``extra``. Then forward, loss,
    backward and ``optimizer.step()`` run on that device. On a simulated device, ``device``, ``"cuda"`` and ``.cuda()``
    in your code mean the simulated one.

    Pass several models and optimizers as dicts with the keys of the checkpoint. With a dict of optimizers, ``step`` is
    the whole body of your loop, including ``backward()`` and ``optimizer.step()``. With one optimizer it returns the
    loss, also if the models are a dict. For a GAN saved as ``{"netG": ..., "netD": ..., "optG": ..., "optD": ...}``::

        return ckptmove.Case(
            {"netG": netG, "netD": netD}, {"optG": optG, "optD": optD}, batch=images, step=step
        )

    A function without parameters builds everything on the CPU; then ``model.to(device)`` is called, on the models only.

    Attributes:
        model: the ``nn.Module``, in the mode to train in (``train()`` or ``eval()``); or a dict of modules, each
            restored from the part of the checkpoint with its key.
        optimizer: the optimizer of its parameters, in the order of the saved run; or a dict of optimizers. The resume
            is proven if every stored optimizer is restored into one of them, and each steps its parameters.
        criterion: the loss, called with the model's output and the targets. None (the default) if the model returns
            the loss.
        batch: one batch as your loader yields it, or the loader, from which one batch is taken; None by default.
            Without ``step``, the batch is moved to the device and interpreted: a pair is the inputs and the targets,
            and inputs in a tuple or a dict are the model's arguments. A dict is the model's keyword arguments, without
            ``labels`` if a ``criterion`` needs them. Without a criterion, the whole batch goes to the model, whose
            output is the loss or contains it (``.loss``, ``["loss"]``).
        step: function from the batch, not moved, to the loss, as in your loop: ``lambda batch:
            module.training_step(batch, 0)``. Only ``step`` can find tensors that your loop forgets to move. With a dict
            of optimizers it does a whole training step, and its return value (a loss, a dict of losses, nothing) is
            only checked for NaN and Inf. None (the default) interprets ``batch`` as above; not allowed with a dict.
        part: the key of the model's state_dict, if several models in the checkpoint fit, or its dotted path
            (``"netD"``, ``"ema.state_dict"``). None (the default) takes the only one that fits.
        optimizer_part: the same for the optimizer.
        state: the dict that your script gives to ``torch.distributed.checkpoint.save``, for a model that the function
            shards with ``fully_shard`` or ``parallelize_module``. Its keys are those of the checkpoint, and its values
            nested dicts of ``get_state_dict``, or objects with ``state_dict`` and ``load_state_dict``. Run the command
            with ``torchrun``. None (the default) for a model that is not sharded.
        scheduler: the learning rate scheduler, or a dict of schedulers by their keys in the checkpoint. Before the
            step, the stored part goes through its ``load_state_dict``. If the checkpoint holds a scheduler and the case
            does not, the report names it, and the resume is not proven. None by default.
        scaler: the same for the ``GradScaler``.
        ema: the same for the averaged model, or another object with ``load_state_dict``. Its tensors are given on the
            device of the step, those of all others on the CPU.
        extra: a dict of other objects with ``load_state_dict`` by their keys in the checkpoint, for example one that
            sets the RNG states: ``extra={"rng": states}``.
    """

    model: torch.nn.Module | Mapping[str, torch.nn.Module]
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
    criterion: Callable[..., Any] | None = None
    batch: Any = None
    step: Callable[[Any], Any] | None = None
    part: str | None = None
    optimizer_part: str | None = None
    state: Mapping[str, Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    extra: Mapping[str, Any] | None = None
