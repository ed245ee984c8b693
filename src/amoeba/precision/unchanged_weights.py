"""`UnchangedWeights`: a promise that weights do not change, so that they are quantised only once.

    with UnchangedWeights():                # the micro-steps of one optimizer step, or an evaluation
        for batch in batches:
            loss(model, batch).backward()

Codes of weights that train in fp8 are then written by the first pass inside, and by no other. Without it every forward
pass on a GPU writes them anew: nothing signals that a weight was written through `.data` or by a fused optimizer. It
holds
for the whole process, other threads and backward passes included. Entered again, the same promise goes on.
"""

from __future__ import annotations

_promises: list[UnchangedWeights] = []


class UnchangedWeights:
    """Promises that weights that train in fp8 do not change within the context, so that they are quantised once."""

    def __enter__(self) -> UnchangedWeights:
        _promises.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _promises.remove(self)


def promise() -> UnchangedWeights | None:
    """The outermost that holds now."""
    return _promises[0] if _promises else None
