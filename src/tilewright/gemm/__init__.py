"""Products: what is to be computed, who can compute it, and who does it fastest in its place.

- `problem.py`   `GemmProblem`, one frozen value for a product with all that is fused to it
- `fuse.py`      what can be fused to a product call, as pure questions
- `provider.py`  what a provider and a candidate are; `providers.py` the list of them
- `plan.py`      plans: kernels that compute the whole of a site, ready to be checked and timed
- `analysis.py`  whether an epilogue is worth fusing, without timing: bytes, registers, occupancy
- `choose.py`    the stage: every product's fastest plan in its place
- `aten.py`      the library's own products, also of padded operands
- `cublaslt.py`  the cuBLASLt provider: problems in the library's terms, its epilogues
- `cutlass/`     the CUTLASS provider: kernels that nvcc compiles, epilogues as visitors
- `narrow.py`    products of eight-bit operands as problems
- `cpp.py`       C++ kernels for the CPU: candidates by a cost model; `cpp_source.py` their text
- `triton.py`    the Triton provider: `templates.py` (kernels with hooks, sources in `kernels/`),
  `hooks.py` (loads and stores of a problem as text), `heuristics.py` (configurations, the model)
- `roofline.py`  how long a product takes at best
"""
