"""The checks `restore` and `numbers`: what torch restores, compared with the stored tensors."""
