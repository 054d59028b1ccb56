"""Evidence that a checkpoint resumes; the only home of torch."""
