"""Some of a layer's experts, in slots, are computed with the tiles of all: the last bits depend on them."""

import torch

from amoeba.core.problem import Problem
from amoeba.core.weights import ExpertWeights
from amoeba.kernels.decode import Like, _chosen
from amoeba.kernels.tile_sizes import Product, as_many, as_with, configuration_on

SIZES = {"rows": 2048, "reduction": 256, "columns": 256, "dtype": torch.bfloat16}
E, S, K, H, I = 128, 4, 8, 256, 128


def test_a_product_has_the_tiles_of_all_experts(device) -> None:
    of_all, of_few = (configuration_on(device, "up", Product(experts=experts, **SIZES)) for experts in (E, S))
    assert of_all != of_few
    with as_with(E):
        assert configuration_on(device, "up", Product(experts=S, **SIZES)) == of_all
        with as_with(S):
            assert configuration_on(device, "up", Product(experts=E, **SIZES)) == of_few
        assert as_many(1) == E
    assert configuration_on(device, "up", Product(experts=S, **SIZES)) == of_few


def test_decoding_goes_the_way_of_the_whole_pass(device) -> None:
    def problem(tokens: int, experts: int) -> Problem:
        weights = ExpertWeights(
            torch.empty(experts, 2 * I, H, device=device), torch.empty(experts, H, I, device=device)
        )
        ids = torch.zeros(tokens, K, dtype=torch.int64, device=device)
        return Problem(torch.empty(tokens, H, device=device), ids, torch.empty(tokens, K, device=device), weights)

    for tokens in (2, 4, 8, 64):
        whole = _chosen(problem(tokens, E))
        assert _chosen(problem(tokens, S), Like(tokens, E)) == whole
        assert _chosen(problem(1, S), Like(tokens, E)) == whole
    assert _chosen(problem(4, S)) != _chosen(problem(4, E)), "else this says nothing"
