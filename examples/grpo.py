"""Reinforcement learning on the demo's model: GRPO on questions, rewarded for answers that are right.

    make demo
    python examples/grpo.py runs/demo/model --data runs/demo-data/questions.jsonl --out runs/grpo

It trains LoRA factors on the experts and attention. The rollouts come from the same model in the same process, so the
KL divergence between rollout and trainer is rounding alone. It prints reward and KL divergence of each step and writes
them to OUT/curve.json, with the adapter in OUT. Minutes on two cores.

    --exact                   rollout and training have the same numbers, to the last bit
    --replay                  training passes use the experts that the rollout chose
    --quantised FORMAT        over frozen experts in this format, such as mxfp4-weights
    --experts grouped_mm      another experts implementation of transformers, with PEFT's LoRA, to compare
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

import amoeba
from amoeba import lora
from amoeba.jobs.grpo import GRPOTrainer

RANK, ALPHA, ATTENTION = 8, 16, ["q_proj", "k_proj", "v_proj", "o_proj"]
KEPT = {
    "reward": "reward",
    "sampling/kl": "kl",
    "sampling/sampling_logp_difference/mean": "mean_logprob_difference",
    "sampling/sampling_logp_difference/max": "max_logprob_difference",
}


def questions(path: Path) -> Dataset:
    rows = [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [f"user: {asked['content']}\nassistant:" for asked, _ in rows]
    return Dataset.from_dict({"prompt": prompts, "answer": [answered["content"] for _, answered in rows]})


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right sentence; for another one half of the share of its words that it has at their places."""
    return [_score(given.strip(), expected) for given, expected in zip(completions, answer, strict=True)]


def _score(given: str, expected: str) -> float:
    if given == expected:
        return 1.0
    words, wanted = given.split(), expected.split()
    same = sum(one == other for one, other in zip(words, wanted, strict=False))
    return 0.5 * same / max(len(words), len(wanted))


class Curve(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            self.rows.append({"step": state.global_step} | {ours: logs[name] for name, ours in KEPT.items()})
            row = self.rows[-1]
            print(f"step {row['step']:3}  reward {row['reward']:.3f}  KL {row['kl']:.2e}", flush=True)


def policy(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and PEFT's settings where its LoRA is used."""
    dtype = getattr(torch, options.dtype)
    amoeba.register()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, experts_implementation=options.experts)
    if options.experts == "amoeba":
        if options.quantised:
            amoeba.place_experts(model, options.quantised)
        lora.attach(model, r=RANK, alpha=ALPHA, targets=["experts", *ATTENTION])
        if options.exact:
            amoeba.exact(model)
        return model, None
    from peft import LoraConfig

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=ATTENTION, target_parameters=parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with GRPO to answer questions.")
    parser.add_argument("model", type=Path, help="The model's folder.")
    parser.add_argument("--data", type=Path, required=True, help="Questions with answers: questions.jsonl of the demo.")
    parser.add_argument("--out", type=Path, required=True, help="The folder for the adapter and curve.json.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--exact", action="store_true", help="Compute in exact mode.")
    parser.add_argument("--replay", action="store_true", help="Replay the rollout's experts in training.")
    parser.add_argument("--quantised", metavar="FORMAT", help="Quantise the frozen experts, for example mxfp4-weights.")
    parser.add_argument("--experts", default="amoeba", help="The experts implementation.")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, peft_config = policy(options)
    settings = GRPOConfig(
        str(options.out),
        bf16=False,
        gradient_checkpointing=False,
        router_aux_loss_coef=0.0,  # the routers are frozen
        max_steps=options.steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=24,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    curve, began = Curve(), time.perf_counter()
    trainer = GRPOTrainer(
        model,
        right,
        settings,
        questions(options.data),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[curve],
        peft_config=peft_config,
        replay_routing=options.replay,
    )
    trainer.remove_callback(
        next(each for each in trainer.callback_handler.callbacks if "Printer" in type(each).__name__)
    )
    trainer.train()
    trainer.save_model()
    given = {name: value for name, value in vars(options).items() if name not in ("data", "out", "model")}
    found = {"options": given, "seconds": round(time.perf_counter() - began), "steps": curve.rows}
    (options.out / "curve.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"reward {curve.rows[0]['reward']:.3f} -> {curve.rows[-1]['reward']:.3f}; {options.out / 'curve.json'}")


if __name__ == "__main__":
    main()
