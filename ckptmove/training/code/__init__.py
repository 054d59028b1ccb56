"""The user's source, and the calls of torch that it makes: lines, names, frames, files with edits."""
