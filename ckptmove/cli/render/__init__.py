"""Reports: human, JSON, GitHub annotations, JUnit."""
