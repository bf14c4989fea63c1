"""In which order groups run."""
