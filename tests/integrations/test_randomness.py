"""Whether a model draws random numbers in training: by its modules, and by what its configuration says."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from amoeba.integrations.text_model import draws_random_numbers


def model_with(*modules: nn.Module, **config: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), *modules)
    model.config = SimpleNamespace(to_dict=lambda: config)
    return model


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_a_dropout_counts_where_it_drops_something(kind: type) -> None:
    assert draws_random_numbers(model_with(kind(0.1)))
    assert not draws_random_numbers(model_with(kind(0.0)))


@pytest.mark.parametrize(
    "name", ["attention_dropout", "resid_pdrop", "layerdrop", "router_jitter_noise", "hidden_dropout_prob"]
)
def test_so_does_a_number_of_the_configuration_or_of_one_inside_it(name: str) -> None:
    assert draws_random_numbers(model_with(**{name: 0.1}))
    assert draws_random_numbers(model_with(text_config={name: 0.1}))
    assert not draws_random_numbers(model_with(**{name: 0.0, "text_config": {name: 0}}))
    assert not draws_random_numbers(model_with(**{name: None, "hidden_size": 64}))


def test_a_module_without_a_configuration_is_looked_at_too() -> None:
    assert not draws_random_numbers(nn.Linear(2, 2))
