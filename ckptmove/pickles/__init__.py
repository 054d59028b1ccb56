"""Read and edit pickles as data: opcodes, a symbolic machine, a tree, and the tensors of torch in it.

Nothing that a pickle names is imported or called.
"""
