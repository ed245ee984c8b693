"""Whose word counts on how to sample: what was asked for, then the model's own, then nothing cut off."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from amoeba.jobs.generate.options import GenerationOptions, sampling_of

WHOLE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
OWN = {"do_sample": True, "top_k": 7}


@pytest.mark.parametrize(
    ("asked", "own", "found"),
    [
        ({}, {}, {"do_sample": False, "repetition_penalty": 1.0}),
        ({"temperature": 0.5}, {}, WHOLE | {"temperature": 0.5}),
        ({"top_p": 0.9}, {}, WHOLE | {"top_p": 0.9}),
        ({}, OWN | {"repetition_penalty": 1.2}, WHOLE | {"top_k": 7, "repetition_penalty": 1.2}),
        ({"top_k": 3}, OWN | {"top_p": 0.8}, WHOLE | {"top_k": 3, "top_p": 0.8}),
        ({"temperature": 0, "repetition_penalty": 1.5}, OWN, {"do_sample": False, "repetition_penalty": 1.5}),
    ],
)
def test_what_is_not_said_keeps_every_token(asked, own, found):
    assert sampling_of(GenerationOptions(**asked), GenerationConfig(**own)) == found
