"""Read and edit pickles as data: opcodes, a symbolic machine, a tree, and the tensors of torch in it.

Never imports or calls anything that a pickle names.
"""
