"""TRL's trainers with our experts, and GRPO whose rollouts come from the model that is trained.

B rows · S tokens of a row · K experts per token
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import amoeba
from amoeba import lora
from amoeba.cpu.core import why_no_core
from tiny_models import EXPERTS, VOCABULARY, build

pytest.importorskip("trl", reason="needs TRL: pip install 'amoeba-moe[trl]'")
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer

from amoeba.jobs.grpo import GRPOTrainer
from selection import quick

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, about what transformers will call otherwise
PROMPTS = ["AB", "C", "DEF0", "G"]
QUIET: dict[str, Any] = {
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "router_aux_loss_coef": 0.0,
    "max_steps": 2,
    "lr_scheduler_type": "constant",
}


def characters() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *map(chr, range(ord("!"), ord("!") + VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def tiny(factors: bool = True, quantised: str = "", **changes: Any) -> Any:
    model = copy.deepcopy(build("qwen3_moe", max_position_embeddings=128, **changes))
    model.set_experts_implementation("amoeba")
    if quantised:
        amoeba.place_experts(model, quantised)
    if factors:
        torch.manual_seed(0)
        lora.attach(model, r=4, alpha=8, targets=["experts"])
    return model


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(each.isdigit() for each in text) / 8 for text in completions]


def grpo(model: Any, folder: Path, kind: type = GRPOTrainer, reward: Any = digits, **options: Any) -> Any:
    """options: of GRPOConfig, and of the trainer."""
    of_trainer = {name: options.pop(name) for name in ("replay_routing", "peft_config") if name in options}
    given = {"max_completion_length": 6, "per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-2}
    settings = GRPOConfig(str(folder), **QUIET | given | options)
    rows = Dataset.from_dict({"prompt": PROMPTS * 4})
    return kind(model, reward, settings, rows, processing_class=characters(), **of_trainer)


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def of_peft(dropout: float = 0) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'amoeba-moe[lora]'")
    parameters = [] if dropout else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, lora_dropout=dropout)


class Chosen(GRPOTrainer):
    """Keeps the batches that it trains on, and which experts they got."""

    def watch(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.expert_TK: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(self._note)

    def _note(self, module: Any, args: tuple) -> None:
        if module.training:
            self.expert_TK.append(args[1])

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.batches.append(inputs)
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("kind", ["ours", "quantised", "peft"])
def test_rollouts_are_those_of_the_weights_that_train(tmp_path: Path, kind: str) -> None:
    model = tiny(kind != "peft", "mxfp4-weights" if kind == "quantised" else "")
    options = {"peft_config": of_peft(), "replay_routing": True} if kind == "peft" else {}
    trainer = grpo(model, tmp_path, learning_rate=0.05, **options)
    trainer.train()
    assert len(logged(trainer, "sampling/kl")) == 2
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    assert 0 < max(logged(trainer, "sampling/kl")) < 1e-10
    grown = [p.detach().abs().max() for name, p in trainer.model.named_parameters() if "lora_b" in name.lower()]
    assert min(grown) > 1e-3  # by the first step; the second rollout was made with them


@quick(lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_exact_mode_the_difference_is_nothing_at_all(tmp_path: Path, dtype: torch.dtype) -> None:
    if (reason := why_no_core()) is not None:
        pytest.skip(f"Skipped: exact mode needs the C++ core: {reason}")
    model = tiny(factors=False).to(dtype)
    lora.attach(model, r=4, alpha=8, targets=["experts"])
    amoeba.exact(model)
    trainer = grpo(model, tmp_path, learning_rate=0.05, temperature=0.7)
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/max") == [0, 0] == logged(trainer, "sampling/kl")
    assert max(logged(trainer, "grad_norm")) > 0 < min(logged(trainer, "entropy"))
    with pytest.raises(ValueError, match="router_aux_loss_coef: expected 0 in exact mode"):
        grpo(model, tmp_path, router_aux_loss_coef=0.1).train()


def test_the_old_logprobs_are_those_of_the_rollout(tmp_path: Path) -> None:
    trainer = grpo(tiny(), tmp_path, Chosen, num_iterations=2, max_steps=4, learning_rate=0.05)
    trainer.watch()
    trainer.train()
    assert len(logged(trainer, "sampling/kl")) == 2  # of four steps: the others follow an update
    for batch in trainer.batches:
        assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert max(clipped[1::2]) > 0 == max(clipped[::2])


@pytest.mark.parametrize("replay_routing", [True, False], ids=["replay", "live"])
def test_replayed_routing_is_that_of_the_rollout_after_routers_changed(tmp_path: Path, replay_routing: bool) -> None:
    trainer = grpo(
        tiny(factors=False),
        tmp_path,
        Chosen,
        replay_routing=replay_routing,
        num_iterations=2,
        learning_rate=0.1,
    )
    trainer.watch()
    trainer.train()
    before, after = trainer.expert_TK[:2], trainer.expert_TK[2:]
    batch = trainer.batches[0]
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    read_BS = mask.bool() & (mask.flip(1).cumsum(1).flip(1) > 1)  # the last token of a row was never read
    same = [(one == other)[read_BS.flatten()].all().item() for one, other in zip(before, after, strict=True)]
    assert len(after) == 2 and all(same) == replay_routing


def test_completions_that_were_cut_and_masked_need_no_record(tmp_path: Path) -> None:
    trainer = grpo(tiny(), tmp_path, replay_routing=True, mask_truncated_completions=True, max_steps=1)
    trainer.train()
    assert logged(trainer, "completions/clipped_ratio")[0] > 0


def test_an_interrupted_rollout_goes_on_from_the_checkpoint_as_if_nothing_was(tmp_path: Path) -> None:
    class Interrupted(GRPOTrainer):
        def _new_tokens(self, decoder: Any, prompts: Any, count: int) -> Any:
            if self.state.global_step == 2:
                next(decoder.generate(prompts, 3, 0))
                raise KeyboardInterrupt
            return super()._new_tokens(decoder, prompts, count)

    saved = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "replay_routing": True}
    whole = grpo(tiny(), tmp_path / "whole", **saved)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        grpo(tiny(), tmp_path / "cut", Interrupted, **saved).train()
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed = grpo(tiny(), tmp_path / "cut", **saved)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed, "reward") == logged(whole, "reward")
    for (name, found), (_, expected) in zip(
        resumed.model.named_parameters(), whole.model.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


def test_records_of_another_model_or_text_are_refused(tmp_path: Path) -> None:
    class Foreign(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            scored = super()._generate_and_score_completions(inputs)
            self._records = records(self._records)
            return scored

    def of_another_model(own: Any) -> Any:
        return dict.fromkeys(own, next(iter(other._records.values())))

    def of_other_texts(own: Any) -> Any:
        return {(9, *text): record for text, record in own.items()}

    other = grpo(tiny(num_experts=EXPERTS + 2), tmp_path, replay_routing=True, max_steps=1)
    other.train()
    records = of_another_model
    with pytest.raises(ValueError, match=f"MoE layers of {EXPERTS + 2} experts"):
        grpo(tiny(), tmp_path, Foreign, replay_routing=True).train()
    records = of_other_texts
    with pytest.raises(ValueError, match="expected texts of the last rollout"):
        grpo(tiny(), tmp_path, Foreign, replay_routing=True).train()


def test_what_would_make_rollouts_differ_from_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dropout: expected none"):
        grpo(tiny(attention_dropout=0.1), tmp_path)
    with pytest.raises(ValueError, match="dropout: expected none"):
        grpo(tiny(factors=False), tmp_path, peft_config=of_peft(dropout=0.1))
    with pytest.raises(ValueError, match="mixed precision: expected none"):
        grpo(tiny(), tmp_path, bf16=True)
    with pytest.raises(ValueError, match="got generation_kwargs"):
        grpo(tiny(), tmp_path, generation_kwargs={"num_beams": 2})


@pytest.mark.parametrize("factors", ["ours", "peft"])
def test_sft_trains_the_factors(tmp_path: Path, factors: str) -> None:
    ours = factors == "ours"
    rows = Dataset.from_dict({"prompt": PROMPTS * 2, "completion": ["0123", "45", "6789", "0"] * 2})
    settings = SFTConfig(str(tmp_path), **QUIET | {"max_steps": 6, "learning_rate": 0.05})
    peft_config = None if ours else of_peft()
    trainer = SFTTrainer(
        tiny(ours), settings, train_dataset=rows, processing_class=characters(), peft_config=peft_config
    )
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0] - 0.1
    if ours:
        lora.save(trainer.model, tmp_path / "adapter")
        lora.load(tiny(factors=False), tmp_path / "adapter")


@pytest.mark.parametrize("factors", ["ours", "peft"])
def test_dpo_compares_with_the_model_before_its_factors(tmp_path: Path, factors: str) -> None:
    ours = factors == "ours"
    rows = Dataset.from_dict({"prompt": PROMPTS, "chosen": ["0", "1", "2", "3"], "rejected": ["a", "b", "c", "d"]})
    settings = DPOConfig(
        str(tmp_path),
        precompute_ref_log_probs=ours,
        disable_dropout=False,
        **QUIET | {"max_steps": 6, "learning_rate": 0.05},
    )
    peft_config = None if ours else of_peft()
    trainer = DPOTrainer(
        tiny(ours), args=settings, train_dataset=rows, processing_class=characters(), peft_config=peft_config
    )
    assert trainer.ref_model is None  # the frozen experts are in memory once
    trainer.train()
    margins = logged(trainer, "rewards/margins")
    assert abs(margins[0]) < 1e-5 and margins[-1] > 0.05
