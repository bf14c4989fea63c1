"""Correctness sweep over PyTorch's own operator samples.

Every operator of ``op_db`` is run eagerly and through a ``torch.compile`` backend, for several
dtypes, with static and dynamic shapes, forward and backward. The rule: whatever passes with the
backend ``aot_eager`` passes with ``tilewright``.

One sample of every group, on 16 cores in two minutes, results in a folder:

    python -m tests.sweep --all --samples 0 --jobs 16 --timeout 60 --budget 480 --out results

``--samples 1,2`` runs the second and third samples of each group, ``--shard 3/10`` a tenth of the
groups, and ``--resume`` goes on where a run with the same ``--out`` was stopped or ran out of its
budget.

Layer map, each module importing only from those above it:

    cases        what is run: ``Case``, enumeration, selection
    samples      the inputs of a case: generation, cloning, conversion to float64
    compare      is a result the same as eager's
    execute      run one case on one backend and classify the outcome
    pool         worker processes that survive crashes and hangs
    differences  the checked-in list of known differences and the page made from it
    report       summary of a run
    __main__     the command line: ``python -m tests.sweep --help``
"""
