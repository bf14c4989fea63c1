"""Changes of a group's loops and expressions before its kernel is planned."""
