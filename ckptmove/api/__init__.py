"""The functions of the Python API, their results, JSON documents and hints."""
