"""Long reductions in chunks: the policy, and the nests that come of it."""
