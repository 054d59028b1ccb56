"""Pickles read as data: opcodes, a symbolic machine, an inert tree, and what torch means by it.

Never imports a name that a pickle holds, and never calls anything that it names.
"""
