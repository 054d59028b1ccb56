"""Whether training fits into the memory of N devices: by arithmetic, or measured with a case without values."""
