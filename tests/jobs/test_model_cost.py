"""The peak that a run's share refers to: measured within a moment, once per machine, and never kept from a busy one."""

import json

import pytest
import torch

from amoeba import lora
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs import model_cost
from amoeba.jobs.model_cost import measured_ceiling, training_flops_per_token
from tiny_models import build

CPU = torch.device("cpu")
FLOPS = 2.0 * 1024**3


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cost, "load_average", lambda: 0.0)
    measured_ceiling.cache_clear()
    yield tmp_path / "cache"
    measured_ceiling.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """How often products were timed, and what they took."""
    calls: list[list[float]] = []

    def plant(*seconds: float) -> list[list[float]]:
        def time_products(size, dtype, device):
            calls.append(list(seconds))
            return list(seconds)

        monkeypatch.setattr(model_cost, "_seconds_of_products", time_products)
        measured_ceiling.cache_clear()  # as in another process
        return calls

    return plant


def test_it_is_the_best_product_and_the_next_run_finds_it(measured, folder):
    calls = measured(0.021, 0.020, 0.0205)
    assert measured_ceiling(CPU) == FLOPS / 0.020
    measured(1.0)
    assert measured_ceiling(CPU) == FLOPS / 0.020
    assert len(calls) == 1
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["of"]["dtype"] == "float32"


@pytest.mark.parametrize("changed", ["torch", "threads", "cpu"])
def test_another_machine_or_torch_is_measured_again(changed, measured, monkeypatch):
    calls = measured(0.02)
    measured_ceiling(CPU)
    if changed == "torch":
        monkeypatch.setattr(model_cost.torch, "__version__", "9.9.9")
    elif changed == "threads":
        monkeypatch.setattr(model_cost.torch, "get_num_threads", lambda: 77)
    else:
        monkeypatch.setattr(model_cost, "cpu_model", lambda: "another")
    measured(0.01)
    assert measured_ceiling(CPU) == FLOPS / 0.01
    assert len(calls) == 2


@pytest.mark.parametrize(("seconds", "load"), [((0.02, 0.05, 0.09), 0.0), ((0.02, 0.02, 0.02), 1000.0)])
def test_what_a_busy_machine_gave_is_used_and_not_kept(seconds, load, measured, monkeypatch, folder):
    monkeypatch.setattr(model_cost, "load_average", lambda: load)
    measured(*seconds)
    assert measured_ceiling(CPU) == FLOPS / 0.02
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"of": {}, "flops_per_second": 5}', '{"flops_per_second": "nan"}'])
def test_a_file_that_is_not_what_was_written_is_measured_over(text, measured, folder):
    measured(0.02)
    measured_ceiling(CPU)
    (file,) = folder.iterdir()
    file.write_text(text)
    measured(0.01)
    assert measured_ceiling(CPU) == FLOPS / 0.01


def test_an_unwritable_folder_costs_a_measurement_and_nothing_else(measured, folder):
    folder.write_text("a file")
    measured(0.02)
    assert measured_ceiling(CPU) == FLOPS / 0.02


@pytest.mark.parametrize(("tied", "frozen"), [(False, False), (True, False), (False, True)])
def test_a_token_costs_what_works_on_it(tied, frozen):
    """All experts but two of four, no embedding table unless it is the head, 6 a number that trains, 4 a frozen one."""
    model = build("qwen3_moe", tie_word_embeddings=tied, num_experts=4, num_experts_per_tok=2)
    config = model.config
    if frozen:
        model.requires_grad_(False)
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    table = config.vocab_size * config.hidden_size
    others = sum(p.numel() for p in model.parameters()) - experts - (0 if tied else table)
    attention = 6 * config.num_hidden_layers * config.hidden_size * 10  # all heads together are as wide
    expected = (4 if frozen else 6) * (experts / 2 + others) + attention
    assert training_flops_per_token(model, 10) == pytest.approx(expected)


@pytest.mark.parametrize("placement", ["fp8-weights", "nvfp4-weights"])
def test_quantised_experts_count_as_the_numbers_that_they_stand_for(placement):
    flops = []
    for each in ("resident", placement):
        model = build("qwen3_moe").requires_grad_(False)
        place_experts(model, each)
        lora.attach(model, 2, 4, ["experts"])
        flops.append(training_flops_per_token(model, 10))
    assert flops[0] == pytest.approx(flops[1])


def test_it_is_measured_on_this_machine():
    assert 1e7 < measured_ceiling(CPU) < 1e15


@pytest.mark.gpu
def test_on_a_gpu_products_are_timed_back_to_back_until_its_clocks_are_up():
    seconds = model_cost._seconds_of_products(1024, torch.bfloat16, torch.device("cuda"))
    assert len(seconds) % model_cost._GPU_PRODUCTS == 0
    assert sum(seconds) >= model_cost._GPU_SECONDS
