"""What is known of a group before it is decided how its kernel will look."""
