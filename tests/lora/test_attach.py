"""LoRA on whole models: attached, saved, loaded, merged, taken off; the truth is the peft package and the base."""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import logits_of, tiny
from torch import Tensor, nn

from amoeba import lora
from amoeba.integrations.experts_module import LORA
from amoeba.integrations.place_experts import place_experts
from amoeba.lora.factors import ExpertsLora
from amoeba.lora.targets import in_one_line
from selection import quick
from tiny_models import EXPERTS, HIDDEN, TOLERANCE, build, experts_classes, needs, relative, token_ids

peft = pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")

pytestmark = pytest.mark.filterwarnings("ignore")

SOURCE = Path(__file__).resolve().parents[2] / "src"
RANK, ALPHA = 3, 5
MODELS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h")
ATTENTION = {"deepseek_v3": ["experts", "o_proj", "shared_experts.up_proj"]}


def shake(model: nn.Module) -> None:
    """Trainable parameters as if they had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                size = 0.3 if "lora_" in name else 0.05
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def attached(model_type: str, targets: Any = "experts", **options: Any) -> Any:
    model = tiny(model_type)
    lora.attach(model, RANK, ALPHA, targets, **options)
    shake(model)
    return model


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def peft_logits(model_type: str, folder: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits_of(peft.PeftModel.from_pretrained(tiny(model_type), folder).eval())


# --- the numbers


# Every model with all its projections, which are those of the other kinds together; each kind with two layouts.
# Mixtral's and OLMoE's experts lie as those of Qwen3.
@quick(lambda model_type, kind: (kind == "all-linear" and model_type not in MODELS[1:3]) or model_type == "gpt_oss")
@pytest.mark.parametrize("kind", ["experts", "attention and router", "all-linear", "gate"])
@pytest.mark.parametrize("model_type", MODELS)
def test_peft_computes_what_we_do_and_the_base_comes_back(model_type: str, kind: str, tmp_path: Path) -> None:
    targets: Any = kind
    if kind == "attention and router":
        targets = ATTENTION.get(model_type, ["experts", "q_proj"])
    if kind == "gate" and model_type == "nemotron_h":
        targets = "up"  # experts without a gate
    model = tiny(model_type)
    base, before = snapshot(model), logits_of(model)
    lora.attach(model, RANK, ALPHA, targets, train_router=kind == "attention and router")
    assert relative(logits_of(model), before) < TOLERANCE  # B is zero
    shake(model)
    adapted = logits_of(model)
    assert relative(adapted, before) > 0.1
    lora.save(model, tmp_path)
    assert relative(peft_logits(model_type, tmp_path), adapted) < TOLERANCE
    again = tiny(model_type)
    lora.load(again, tmp_path)
    assert torch.equal(logits_of(again), adapted)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    lora.detach(model)
    assert_same(model, base)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert relative(logits_of(model), before) < TOLERANCE


@pytest.mark.parametrize("model_type", MODELS)
def test_merged_and_unmerged(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = attached(model_type, ATTENTION.get(model_type, ["experts", "q_proj"]))
    adapted, with_factors, plain = logits_of(model), snapshot(model), snapshot(tiny(model_type))
    lora.merge(model)
    assert model.state_dict().keys() == plain.keys()
    assert relative(logits_of(model), adapted) < TOLERANCE
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert relative(logits_of(stock), adapted) < TOLERANCE
    with pytest.raises(ValueError, match="factors are not merged"):
        lora.merge(model)
    lora.unmerge(model)
    assert_same(model, with_factors)
    assert torch.equal(logits_of(model), adapted)
    with pytest.raises(ValueError, match="nothing to undo"):
        lora.unmerge(model)


def test_a_merge_in_bf16_is_undone_bit_for_bit() -> None:
    model = tiny("qwen3_moe").bfloat16()
    base = snapshot(model)
    lora.attach(model, RANK, ALPHA, ["experts", "q_proj"])
    shake(model)
    lora.merge(model)
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(model.state_dict()[name], base[name])
    lora.unmerge(model)
    lora.detach(model)
    assert_same(model, base)


def test_a_merge_in_bf16_adds_in_fp32_and_rounds_once() -> None:
    model = tiny("qwen3_moe").bfloat16()
    lora.attach(model, RANK, ALPHA, ["experts"])
    shake(model)
    module = model.model.layers[0].mlp.experts
    factors = getattr(module, LORA).factors()
    expected = module.down_proj.float() + factors.scaling * (factors.down_lora_b.float() @ factors.down_lora_a.float())
    lora.merge(model)
    others = module.down_proj != expected.bfloat16()
    assert others.float().mean() < 1e-3, "a sum in another order may round to the other neighbour, but seldom does"


def test_a_final_merge_keeps_nothing_and_says_so() -> None:
    model = attached("qwen3_moe")
    adapted = logits_of(model)
    lora.merge(model, keep_base=False)
    with pytest.raises(ValueError, match="keep_base=True"):
        lora.unmerge(model)
    lora.detach(model)
    assert relative(logits_of(model), adapted) < TOLERANCE


def test_factors_next_to_bf16_weights_are_fp32_and_get_gradients() -> None:
    model = tiny("qwen3_moe").bfloat16()
    lora.attach(model, RANK, ALPHA, ["experts", "q_proj"])
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all(parameter.grad is not None for parameter in trained.values())
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(("experts", "moved"), [("mxfp4-weights", True), ("cpu-bf16", False)])
def test_factors_move_with_the_model_if_their_experts_do(experts: str, moved: bool) -> None:
    """Else each pass would copy them to the GPU, and no CUDA graph could capture it."""
    model = tiny("qwen3_moe")
    place_experts(model, experts)
    lora.attach(model, r=2, targets=["experts"])
    model.to("meta")
    assert {p.is_meta for name, p in model.named_parameters() if "lora" in name} == {moved}


def test_a_is_drawn_as_peft_draws_it_and_b_is_zero() -> None:
    torch.manual_seed(4)
    model = tiny("qwen3_moe")
    state = lora.attach(model, 64, 64)
    ours = state.experts["model.layers.0.mlp.experts"].factors()
    config = peft.LoraConfig(r=64, lora_alpha=64, target_parameters=["mlp.experts.gate_up_proj"])
    theirs = peft.get_peft_model(tiny("qwen3_moe"), config).base_model.model.model.layers[0].mlp.experts
    drawn = theirs.lora_A["default"].weight
    assert ours.gate_lora_a is ours.up_lora_a
    assert ours.gate_lora_a.numel() == drawn.numel()
    for statistic in (torch.std, torch.amax, torch.amin):
        assert statistic(ours.gate_lora_a.flatten(), 0).item() == pytest.approx(
            statistic(drawn.flatten(), 0).item(), rel=0.02
        )
    assert not ours.gate_lora_b.any()
    torch.manual_seed(4)
    again = tiny("qwen3_moe")
    other = lora.attach(again, 64, 64).experts["model.layers.0.mlp.experts"].factors()
    assert torch.equal(ours.down_lora_a, other.down_lora_a)


def test_gate_and_up_apart_have_an_a_each_and_survive_a_file(tmp_path: Path) -> None:
    model = attached("gpt_oss", share_a=False)
    factors = model._amoeba_lora.experts["model.layers.1.mlp.experts"].factors()
    assert factors.gate_lora_a is not factors.up_lora_a
    lora.save(model, tmp_path)
    assert relative(peft_logits("gpt_oss", tmp_path), logits_of(model)) < TOLERANCE
    again = tiny("gpt_oss")
    lora.load(again, tmp_path)
    assert torch.equal(logits_of(again), logits_of(model))


def test_an_activation_that_is_called_as_it_is_gets_factors_too() -> None:
    model = tiny("qwen3_moe")
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            module._apply_gate = lambda h: torch.sin(h[..., :24]) * h[..., 24:]
    lora.attach(model, RANK, ALPHA)
    shake(model)
    adapted = logits_of(model)
    lora.merge(model)
    assert relative(logits_of(model), adapted) < TOLERANCE


# --- a model in use


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = attached("qwen3_moe", ["experts", "v_proj"]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(input_ids=token_ids(), labels=token_ids(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    # the first forward of the reentrant way is one without gradients, which few tokens go through by another sum
    largest = 1e-5 if reentrant else 1e-7
    for name, gradient in gradients[0].items():
        assert relative(gradients[1][name], gradient) <= largest, name


def test_generate_and_modes_work() -> None:
    model = attached("qwen3_moe")
    ids = token_ids(1)
    answers = [model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))]
    model.train().eval()
    lora.merge(model)
    answers.append(model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids)))
    assert torch.equal(*answers)


def test_a_copy_has_factors_of_its_own() -> None:
    model = attached("qwen3_moe")
    copied = copy.deepcopy(model)
    adapted = logits_of(model)
    shake(copied)
    assert torch.equal(logits_of(model), adapted)
    lora.detach(copied)
    assert torch.equal(logits_of(model), adapted)


@pytest.mark.thorough  # of experts without factors: tests/integrations/test_compiled_experts.py
def test_compiled_as_a_whole() -> None:
    model = attached("qwen3_moe")
    adapted = logits_of(model)
    experts: Any = model.model.layers[0].mlp.experts
    inputs = (torch.randn(7, HIDDEN), torch.randint(0, EXPERTS, (7, 2)), torch.rand(7, 2))
    expected = experts(*inputs)
    torch.testing.assert_close(torch.compile(experts, fullgraph=True, backend="eager")(*inputs), expected)
    assert torch.equal(logits_of(model), adapted)


def test_the_trainer_of_transformers_trains_factors_alone(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    ids = token_ids(8)
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def trainer_of(model: Any, folder: Path, steps: int) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.02, save_steps=6,
            logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant",
        )  # fmt: skip
        return Trainer(model=model, args=arguments, train_dataset=rows)

    def loss_of(model: Any) -> float:
        with torch.no_grad():
            return model.eval()(input_ids=ids, labels=ids).loss.item()

    model = tiny("qwen3_moe")
    base = snapshot(model)
    torch.manual_seed(1)
    lora.attach(model, RANK, ALPHA, ["experts", "q_proj"])
    start = loss_of(model)
    trainer_of(model, tmp_path, 12).train()
    assert loss_of(model) < start - 0.2
    resumed = tiny("qwen3_moe")
    torch.manual_seed(1)
    lora.attach(resumed, RANK, ALPHA, ["experts", "q_proj"])
    trainer_of(resumed, tmp_path, 12).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert loss_of(resumed) == loss_of(model)
    lora.detach(model)
    assert_same(model, base)


# --- targets


@pytest.mark.parametrize(
    ("targets", "experts", "linears"),
    [
        ("experts", {"gate", "up", "down"}, set()),
        ("down", {"down"}, set()),
        (["gate_up_proj"], {"gate", "up"}, set()),
        (["experts.up_proj"], {"up"}, set()),
        ("down_proj", {"down"}, {"down_proj"}),
        (["q_b_proj", "o_proj"], set(), {"q_b_proj", "o_proj"}),
        ("layers.1.self_attn.o_proj", set(), {"o_proj"}),
    ],
)
def test_targets_match_by_their_ends(targets: Any, experts: set[str], linears: set[str]) -> None:
    model = tiny("deepseek_v3")
    state = lora.attach(model, RANK, ALPHA, targets)
    found = {name.partition("_lora")[0] for layer in state.experts.values() for name in layer.factors().tensors()}
    assert found == experts
    assert {name.rpartition(".")[2] for name in state.linears} == linears
    assert isinstance(state.linears, dict)
    if targets == "layers.1.self_attn.o_proj":
        assert list(state.linears) == ["model.layers.1.self_attn.o_proj"]


# Two of the kinds of layers that cannot train: an indexer, and weights that Mamba reads itself.
GRADIENTS_QUICK = ("deepseek_v32", "jamba")
# So that rows of a few tokens are compressed at all.
SHORT_WINDOWS = {
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
}


@quick(lambda model_type: model_type in GRADIENTS_QUICK)
@pytest.mark.parametrize("model_type", experts_classes())
@pytest.mark.filterwarnings("ignore")
def test_every_factor_of_all_linear_gets_a_gradient(model_type: str) -> None:
    model = build(model_type, **SHORT_WINDOWS.get(model_type, {})).train()
    state = lora.attach(model, RANK, ALPHA, "all-linear")
    answer = model(input_ids=token_ids(2, 17), use_cache=False)
    output = answer.logits if "logits" in answer else answer.last_hidden_state
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert not without
    assert bool(state.left_out) or model_type not in GRADIENTS_QUICK


def test_what_all_linear_leaves_out_is_said_in_one_line() -> None:
    model = build(needs("deepseek_v32"))
    line = in_one_line(lora.attach(model, RANK, ALPHA, "all-linear").left_out)
    assert line.startswith("self_attn.indexer.wq_b (2), self_attn.indexer.wk (2), self_attn.indexer.weights_proj (2): ")
    assert line.endswith("an indexer's top-k choice passes no gradient back")


def test_a_target_that_cannot_train_is_refused_a_partial_one_warned_of(caplog) -> None:
    with pytest.raises(ValueError, match=r"'wk': self_attn.indexer.wk \(2\): an indexer's top-k .*Leave it out"):
        lora.attach(build(needs("deepseek_v32")), RANK, ALPHA, ["experts", "wk"])
    with pytest.raises(ValueError, match=r"targets: .*'dt_proj': .*Mamba reads its weight"):
        lora.attach(build("jamba"), RANK, ALPHA, "dt_proj")
    model = build("qwen3_moe")
    model.model.layers[1].self_attn.indexer = type("SomeIndexer", (torch.nn.Module,), {})()
    model.model.layers[1].self_attn.indexer.q_proj = torch.nn.Linear(32, 32)
    with caplog.at_level("WARNING", logger="amoeba"):
        state = lora.attach(model, RANK, ALPHA, "q_proj")
    assert list(state.linears) == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    assert "'q_proj' leaves out self_attn.indexer.q_proj: an indexer's top-k choice" in caplog.text


def test_all_linear_leaves_out_the_head_and_the_routers() -> None:
    state = lora.attach(tiny("qwen3_moe"), RANK, ALPHA, "all-linear")
    assert len(state.experts) == 2
    assert {name.rpartition(".")[2] for name in state.linears} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r: expected a whole number of at least 1; got 0"),
        ({"r": True}, "r: expected a whole number"),
        ({"alpha": float("nan")}, "alpha: expected a finite number, not 0; got nan"),
        ({"alpha": float("inf")}, "alpha: expected a finite number"),
        ({"targets": []}, "targets: expected one name or several"),
        ({"targets": ["experts", "w_qkv"]}, r"targets: .*gate_up_proj.*q_proj, k_proj.*'w_qkv', which matches nothing"),
    ],
)
def test_bad_arguments_are_named_and_leave_the_model_alone(options: dict[str, Any], message: str) -> None:
    model = tiny("qwen3_moe")
    with pytest.raises(ValueError, match=message):
        lora.attach(model, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())
    lora.attach(model)
    with pytest.raises(ValueError, match="one without LoRA factors"):
        lora.attach(model)


def test_models_that_cannot_have_factors_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ValueError, match=r"got llama, which has no experts"):
        lora.attach(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)))
    with pytest.raises(ValueError, match=r"without PEFT's layers; got a PeftModel"):
        lora.attach(peft.get_peft_model(tiny("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"])))
    for function in (lora.detach, lora.merge, lora.unmerge):
        with pytest.raises(ValueError, match=r"expected one with LoRA factors"):
            function(tiny("qwen3_moe"))


# --- files


def test_loading_into_factors_keeps_the_parameters_and_checks_the_structure(tmp_path: Path) -> None:
    model = attached("qwen3_moe", ["experts", "q_proj"])
    lora.save(model, tmp_path)
    other = tiny("qwen3_moe")
    state = lora.attach(other, RANK, ALPHA, ["experts", "q_proj"])
    parameters = next(iter(state.experts.values())).gate_up_lora_a
    lora.load(other, tmp_path)
    assert next(iter(state.experts.values())).gate_up_lora_a is parameters
    assert parameters.requires_grad
    assert torch.equal(logits_of(other), logits_of(model))
    wrong_rank = tiny("qwen3_moe")
    lora.attach(wrong_rank, RANK + 1, ALPHA, ["experts", "q_proj"])
    with pytest.raises(ValueError, match=r"alpha / r: expected 1.25; got 1.66667"):
        lora.load(wrong_rank, tmp_path)
    fewer = tiny("qwen3_moe")
    lora.attach(fewer, RANK, ALPHA)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight: expected shape none.*\(3, 32\) in"):
        lora.load(fewer, tmp_path)


def test_an_adapter_of_another_model_names_the_parameter_and_the_shapes(tmp_path: Path) -> None:
    lora.save(attached("qwen3_moe", ["experts", "q_proj"]), tmp_path / "experts")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: .*6 experts of hidden 32 and intermediate 48"):
        lora.load(tiny("mixtral"), tmp_path / "experts")
    lora.save(attached("qwen3_moe", ["q_proj"]), tmp_path / "linear")
    narrow = build("qwen3_moe", hidden_size=24, head_dim=6)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight: expected shape \(R, 24\); got \(3, 32\)"):
        lora.load(narrow, tmp_path / "linear")
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight: expected factors of a linear layer.*no such module"):
        lora.load(tiny("deepseek_v3"), tmp_path / "linear")
    assert "_amoeba_lora" not in narrow.__dict__
    assert not any(isinstance(module, ExpertsLora) for module in narrow.modules())


def test_experts_alone_need_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = build("qwen3_moe")
    lora.attach(model, 2, 4)
    lora.detach(model)
    with pytest.raises(ValueError, match=r"targets: expected the package peft.*[Pp]ip install 'amoeba-moe\[lora\]'"):
        lora.attach(model, 2, 4, "q_proj")
    lora.attach(model, 2, 4)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_layers_compile_to_one_code_and_another_for_the_first() -> None:
    """However many layers there are: a code for each would take minutes before the first step."""
    import torch._dynamo.utils

    model = build("qwen3_moe", num_hidden_layers=4).train().to(torch.bfloat16)
    lora.attach(model, r=2)
    ids = token_ids()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}

    expected = gradients()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    found = gradients()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(found) == len(expected) > 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)
