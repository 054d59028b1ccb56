"""Reports as one HTML file, which loads nothing and runs from a disk."""
