"""Groups that share a launch, and the direction a kernel runs in."""
