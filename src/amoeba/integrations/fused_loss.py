"""The loss of a Hugging Face causal language model straight from its last hidden states: no logits of all tokens.

    with fused_loss(model) as reason:       # None, or why the model keeps its own loss
        loss = model(input_ids=ids, labels=ids).loss

That is the same loss only where nothing stands between head and loss (no cap, no scale): a small batch shows whether.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.ops.language_loss import linear_cross_entropy

IGNORED = -100  # the label that transformers does not count
TRIED_TOKENS = 16  # of a size for which Triton compiles what it compiles for a batch


@contextmanager
def fused_loss(model: Any) -> Iterator[str | None]:
    reason = why_not(model)
    if reason is not None:
        yield reason
        return
    head = model.get_output_embeddings()
    own = model.loss_function
    head.forward, model.loss_function = lambda hidden_states: hidden_states, _Loss(head)
    try:
        yield None
    finally:
        del head.forward
        model.loss_function = own


def why_not(model: Any) -> str | None:
    """Why this model keeps its own loss, or None. Runs a few tokens through it."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        return f"its output head is {'not there' if head is None else f'a {type(head).__name__}'}, not a plain Linear"
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return "it has a loss of its own"
    seen: list[Tensor] = []

    def note(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(logits)
        return logits.sum() * 0.0

    handed: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, output: handed.append(output))
    own, training = model.loss_function, model.training
    model.loss_function = note
    ids = torch.zeros(1, TRIED_TOKENS, dtype=torch.int64, device=head.weight.device)
    try:
        model.eval()
        with torch.enable_grad():  # without, so few tokens are decoded by kernels that training has no use for
            model(input_ids=ids, labels=ids)
    finally:
        model.loss_function = own
        model.train(training)
        handle.remove()
    if len(seen) != 1 or len(handed) != 1 or seen[0] is not handed[0]:
        return "something comes between its output head and its loss"
    return None


class _Loss:
    """What transformers calls in place of ForCausalLMLoss, with the head's input in place of logits."""

    def __init__(self, head: nn.Linear) -> None:
        self.head = head

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        label_T = shift_labels.reshape(-1).to(logits.device)
        hidden_TH = logits.reshape(-1, logits.shape[-1])
        loss = linear_cross_entropy(hidden_TH, self.head.weight, label_T, self.head.bias)
        if num_items_in_batch is None:
            return loss / (label_T != ignore_index).sum()
        return loss / num_items_in_batch
