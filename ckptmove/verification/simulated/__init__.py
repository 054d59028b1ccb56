"""A simulated device: CPU arithmetic with the target's rules."""
