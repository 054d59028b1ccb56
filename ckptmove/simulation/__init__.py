"""A simulated device: CPU arithmetic with the rules of the target. A library of its own."""
