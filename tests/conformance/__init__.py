"""The reference's own tests on a CPU, run with tilewright in its place.

PyTorch's `test/inductor` is written for one backend. Here its entry (`compile_fx`) leads to
tilewright, and tests drawn at random are run with both: of those that pass with the reference, how
many pass with ours? Needs PyTorch's source tree, of the version that is installed, outside of this
repository:

    python -m tests.conformance --tree ../pytorch --seed 1 --sample 600 --out results

Each test has a process and a time limit of its own. Every result is a line of
`results/results.jsonl`; a run with the same folder goes on where the last one stopped.

    cases        which files, and which of their tests are drawn
    redirect     the reference's entry, options, counters and texts lead to ours
    worker       a process that has imported one file, and forks for each test
    judge        what a failure is: ours, or of what only the reference has
    report       the percentage, and what it is made of
    __main__     the command line
"""
