"""The processes of a verification: start, answers, shares of the checkpoint, and limits."""
