"""Changes of the program, weighed by the bytes they save, before groups are final."""
