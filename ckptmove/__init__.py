"""ckptmove: inspect, convert and verify PyTorch checkpoints that have to move to another device."""

__version__ = "0.1.0"
