"""Code generation: fusion groups become kernel sources. `cpp/` for the CPU."""
