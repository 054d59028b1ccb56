"""The zip archives that torch.save writes: directory, layout, appending."""
