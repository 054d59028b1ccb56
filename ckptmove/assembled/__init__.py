"""Several files as one tree: distributed checkpoints, files of ranks, shards of tensors, and ZeRO partitions."""
