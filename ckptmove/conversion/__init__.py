"""Convert a checkpoint: turn a request into a policy, a plan and the output files."""
