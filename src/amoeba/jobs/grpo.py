"""GRPO with TRL where the model that is trained generates its own rollouts, in the same process, by our Decoder.

    lora.attach(model, r=16, targets=["experts", "q_proj"])  # over frozen experts in bf16 or quantised
    arguments = GRPOConfig("runs/mine", bf16=False, max_completion_length=64)
    GRPOTrainer(model, reward, arguments, prompts, processing_class=tokenizer, replay_routing=True).train()

No weights are synchronised. The loss takes the log-probabilities of the rollout as the old ones. Where a training pass
still has the weights of the rollout, its own are compared with them: `sampling/kl`, and
`sampling/sampling_logp_difference/mean` and `/max`, are logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from amoeba import lora, replay
from amoeba.core.errors import bad_value
from amoeba.decoding import Decoder, Sampling, why_not
from amoeba.decoding.decoder import NativeModel, cache_length, native_steps
from amoeba.decoding.sampling import logprobs_of
from amoeba.integrations.exact_mode import is_exact
from amoeba.integrations.text_model import draws_random_numbers
from amoeba.lora.attaching import STATE

try:
    import trl
except ImportError as error:
    remedy = "pip install 'amoeba-moe[trl]'"
    raise ImportError(f"amoeba.jobs.grpo: expected TRL 1.16 or newer; got: {error}. Install it: {remedy}.") from error

ROWS = 64  # that generate at once
Text = tuple[int, ...]


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's, with its arguments. replay_routing: training passes use the experts that the rollout chose."""

    def __init__(self, *args: Any, replay_routing: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replay_routing = replay_routing
        self._decoders: dict[tuple[int, int], Decoder] = {}
        self._records: dict[Text, replay.RoutingRecord] = {}  # by prompt and completion
        self._rollout_step: dict[str, int] = {}  # of the last rollout, in training and in evaluation
        self._logprob_BC: Tensor | None = None
        self._scoring = False
        self._during_step = ExitStack()
        for name, expected, got, remedy in self._checks():
            if got:
                raise bad_value(name, expected, got, remedy)

    def _checks(self) -> Iterator[tuple[str, str, Any, str]]:
        """name, expected, got (false where it is as expected), remedy"""
        args, options = self.args, ("use_vllm", "use_transformers_continuous_batching", "generation_kwargs")
        other = next((name for name in options if getattr(args, name)), "rollout_func" if self.rollout_func else "")
        yield "GRPOTrainer", "rollouts of our Decoder", other, f"leave {other} out, or use trl.GRPOTrainer"
        yield "model", "a text model", self._is_vlm and "one with images", "use trl.GRPOTrainer"
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        yield "model", "whole on each rank", sharded and "a sharded one", "use data parallelism or expert parallelism"
        mixed = self.accelerator.mixed_precision
        remedy = f"load the model in the precision that you want and pass {mixed}=False"
        yield "mixed precision", "none, so that rollouts compute as training does", mixed != "no" and mixed, remedy
        random = draws_random_numbers(self._generating()) or draws_random_numbers(self.model)
        remedy = "set every dropout and jitter of the model's and the adapter's config to 0"
        yield "dropout", "none: a rollout has none, so training would score another model", random and "some", remedy
        tools = self.replay_routing and self.tools
        yield "replay_routing", "rollouts of one turn", tools and "tools", "leave replay_routing out"

    def _generating(self) -> Any:
        """The model of transformers, whatever is wrapped around it. PEFT's factors are in its layers."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    # --- rollouts

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list, list]:
        completions: list[list[int]] = []
        logprobs: list[list[float]] = []
        self._records = {}
        with _evaluating(self._generating()) as model:
            for first in range(0, len(prompt_ids), ROWS):
                self._roll_out(model, prompt_ids[first : first + ROWS], completions, logprobs)
        return completions, logprobs

    def _roll_out(self, model: Any, prompts: list[list[int]], completions: list, logprobs: list) -> None:
        rows = 1 << (len(prompts) - 1).bit_length()  # few sizes, since each has a cache and captured steps
        filled = [*prompts, *prompts[:1] * (rows - len(prompts))]
        decoder = self._decoder(model, rows, max(map(len, prompts)) + self.max_completion_length)
        recording = replay.recording(model, rows=rows, length=decoder.cache.length)
        with recording if self.replay_routing else nullcontext() as recorder:
            steps = self._new_tokens(decoder, filled, len(prompts))
        made = [_until_end(tokens, self.eos_token_ids) for tokens in zip(*steps, strict=True)][: len(prompts)]
        own = decoder.logprobs(len(steps))
        completions += made
        logprobs += [own[row, : len(tokens)].tolist() for row, tokens in enumerate(made)]
        if recorder is not None:
            texts = [prompt + tokens for prompt, tokens in zip(prompts, made, strict=True)]
            records = recorder.take([*texts, *filled[len(prompts) :]])
            self._records |= {tuple(text): record for text, record in zip(texts, records, strict=False)}

    def _new_tokens(self, decoder: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Of all rows, step by step, until the first `count` have ended. The seed is drawn from torch's generator,
        which a checkpoint keeps: a run that is resumed has the rollouts of an uninterrupted one."""
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        steps, unfinished = [], set(range(count))
        for tokens in decoder.generate(prompts, self.max_completion_length, seed):
            steps.append(tokens)
            unfinished -= {row for row in unfinished if tokens[row] in self.eos_token_ids}
            if not unfinished:
                break
        return steps

    def _decoder(self, model: Any, rows: int, tokens: int) -> Decoder:
        key, native = (rows, cache_length(tokens)), self._native(model)
        if key not in self._decoders or self._decoders[key].native is not native:
            own = {"temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p}
            own |= {"repetition_penalty": self.repetition_penalty, "min_p": self.min_p or 0.0}
            options = {"sampling": Sampling(do_sample=True, **own), "native": native, "return_logprobs": True}
            capture = model.device.type == "cuda" and why_not(model) is None
            self._decoders[key] = Decoder(model, batch=rows, length=tokens, capture=capture, **options)
        return self._decoders[key]

    def _native(self, model: Any) -> NativeModel | None:
        """The core's steps where they have the bits of training: in exact mode, with the factors as they are now."""
        if model.device.type != "cpu" or not is_exact(model) or self.replay_routing:
            return None
        found = native_steps(model)
        return None if isinstance(found, str) else found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rollout_step["train" if self.model.training else "eval"] = self.state.global_step
        self._scoring = True
        try:
            scored = super()._generate_and_score_completions(inputs)
        finally:
            self._scoring = False
        return scored | {"old_per_token_logps": scored["sampling_per_token_logps"]}

    # --- training passes

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        with ExitStack() as self._during_step:
            return super().training_step(*args, **options)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.replay_routing and self.model.training:
            pairs = ((inputs[f"prompt_{each}"], inputs[f"completion_{each}"]) for each in ("ids", "mask"))
            ids, mask = (torch.cat(pair, 1) for pair in pairs)
            records = [self._record(row[kept != 0].tolist()) for row, kept in zip(ids, mask, strict=True)]
            model = self.accelerator.unwrap_model(self.model)
            self._during_step.enter_context(replay.replaying(model, records, ids, mask))
        return inputs

    def _record(self, text: list[int]) -> replay.RoutingRecord:
        """mask_truncated_completions leaves a prompt alone, whose record is that of any text that begins with it."""
        if (found := self._records.get(tuple(text))) is not None:
            return found
        for known, record in self._records.items():
            if known[: len(text)] == tuple(text):
                return record[: len(text)]
        remedy = "do not change completions after the rollout, or leave replay_routing out"
        raise bad_value("replay_routing", "texts of the last rollout", "another one", remedy)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self._scoring and self.beta == 0:
            return None, None, None  # the old ones are those of the rollout

        exact = is_exact(self.model)
        if exact and self.aux_loss_enabled:
            expected, remedy = "0 in exact mode", "leave the balance of frozen routers alone, or leave exact mode off"
            raise bad_value("router_aux_loss_coef", expected, self.router_aux_loss_coef, remedy)

        def at_positions(labels: Tensor, fused_lm_head: bool, **given: Any) -> Any:
            """As in the rollout, where padding on the left counts for nothing."""
            given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
            if not exact:
                return model(**given, labels=labels, fused_lm_head=fused_lm_head)
            out = model(**given, use_cache=False, logits_to_keep=logits_to_keep + 1)
            logits_BCV, token_BC = out.logits[:, :-1], given["input_ids"][:, -logits_to_keep:]
            temperature = logits_BCV.new_full((1, 1, 1), self.temperature, dtype=torch.float32)
            logprob_BC = logprobs_of(logits_BCV, token_BC, temperature, exact)
            entropy_BC = torch.distributions.Categorical(logits=logits_BCV.float() / temperature).entropy()
            return SimpleNamespace(log_probs=logprob_BC, entropy=entropy_BC)

        given = input_ids, attention_mask, logits_to_keep
        found = super()._get_per_token_logps_and_entropies(at_positions, *given, *args, **options)
        self._logprob_BC = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        mode = "train" if self.model.training else "eval"
        if self._rollout_step.get(mode) == self.state.global_step and self._logprob_BC is not None:
            kept = (inputs["completion_mask"] * inputs.get("tool_mask", 1)) != 0
            apart = (self._logprob_BC - inputs["sampling_per_token_logps"])[kept].double()
            found = {
                "kl": (apart.expm1() - apart).mean(),  # from the rollout's distribution to the trainer's
                "sampling_logp_difference/mean": apart.abs().mean(),
                "sampling_logp_difference/max": apart.abs().max() if len(apart) else apart.sum(),
            }
            for name, value in found.items():
                everywhere = self.accelerator.gather(value.nan_to_num())
                value = everywhere.max() if name.endswith("max") else everywhere.mean()
                self._metrics[mode][f"sampling/{name}"].append(value.item())
        return loss

    # --- checkpoints of our LoRA: the adapter, not the frozen model

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if STATE not in model.__dict__:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        lora.save(model, folder)
        self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        policy = self.accelerator.unwrap_model(self.model)
        if STATE in policy.__dict__:
            lora.load(policy, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[Any]:
    was = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was)


def _until_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])
