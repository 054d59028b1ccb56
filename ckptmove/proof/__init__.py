"""Evidence that a checkpoint resumes: its tensors restored, and a step of its optimizer."""
