"""The formats, one file each; siblings that know only the contract."""
