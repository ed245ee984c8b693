"""A fuzzer for `amoeba.experts` and `amoeba.route`: random calls against a loop in fp64 that shares no code with them.

    python -m tests.fuzz --seconds 600                     # the CPU, one process
    python -m tests.fuzz --seconds 600 --device cuda --jobs 16
    python -m tests.fuzz --what router --seconds 60
    python -m tests.fuzz --what ranks --seconds 60         # ranks that were told different things
    python -m tests.fuzz --case 1234 --shrink              # one case again, made as simple as it still fails
    python -m tests.fuzz.attack --device cuda              # the list of attacks that are no call with other numbers

One integer, the seed, is one case (case.py); its tensors with their strides are made in tensors.py, the truth about it
in truth.py, the call in attempt.py, the verdict in compare.py. router.py is the same for the router,
ranks.py for ranks with differing settings.
"""
