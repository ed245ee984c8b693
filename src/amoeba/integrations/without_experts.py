"""Hugging Face models made without memory for their experts: those stay where they are, in a store.

with experts_left_out():
    model = Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=rest)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amoeba.integrations.experts_module import experts_modules, leave_shapes


@contextmanager
def experts_left_out() -> Iterator[None]:
    """Models that this thread makes meanwhile have no expert parameters, only their shapes on the meta device.

    transformers makes a model on the meta device and gives memory to every parameter that it finds then.
    """
    from transformers import PreTrainedModel

    made, thread = PreTrainedModel.post_init, threading.get_ident()

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        if threading.get_ident() == thread:
            for module in experts_modules(self).values():
                leave_shapes(module)
        made(self)

    PreTrainedModel.post_init = post_init
    try:
        yield
    finally:
        PreTrainedModel.post_init = made
