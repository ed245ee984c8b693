"""transformers.Trainer whose steps leave the host little to do: our optimizer, documents by ends, captured passes.

`fast_paths` switches on what a model and a machine allow; until then it is Trainer as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.torch_internals import capture, end_failed_capture
from amoeba.data.token_rows import NO_LABEL, document_arguments
from amoeba.integrations.compiled_layers import CompiledLayers, decoder_layers
from amoeba.integrations.experts_module import ATTRIBUTE
from amoeba.integrations.own_tensors import own_tensors, sharded_modules
from amoeba.jobs.model_cost import training_flops_per_token
from amoeba.observe.router_watch import RouterWatch
from amoeba.optim import AdamW
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.parallel.shards import add_up_gradients, clip_gradients, hand_over_gradients, is_shard, local_parameter


class Rows(NamedTuple):
    train: Any  # datasets of {input_ids, labels}
    held_out: Any
    collate: Callable[..., dict[str, Tensor]]  # of a list of rows
    tokens_per_row: float
    documents_per_row: int  # at most; padding is one
    longest: int  # tokens of a row at most
    has_images: bool = False


CAPTURES = 2  # tries at most: a pass may do for the first time what a second one finds done
IDLE = "amoeba_idle"  # in a batch: its row is there for the others' sake


class FastTrainer(Trainer):
    optimizer: Any
    rank_zero: RankZero = ALONE
    mesh: RankMesh | None = None  # how the ranks share the model; None: each has all of it
    rows: Rows
    watch: RouterWatch
    optimizer_states: Literal["float32", "bfloat16"] = "float32"
    by_documents = False  # whether attention wants to be told where documents end
    compiled = False  # whether the layers are
    compiles_evaluation = False  # a pass without gradients is other code, which takes as long to compile again
    captures = False  # whether passes are captured, once one has run
    while_it_runs: ExitStack  # what is to be undone afterwards
    _tries = 0  # to capture a pass
    _stream: torch.cuda.Stream | None = None  # of the captured pass and those before it
    _captured: CapturedStep | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.while_it_runs = ExitStack()

    def note_pass(self, inputs: Any, loss: Tensor) -> None:
        """Is told of each pass that trains."""

    def as_compiled(self, inputs: Any) -> AbstractContextManager:
        """Where a batch is not as large as those in training, or evaluations are short, the layers run as they are."""
        model: Any = self.model
        whole = inputs["input_ids"].shape[0] == self.args.per_device_train_batch_size
        serves = whole and (model.training or self.compiles_evaluation)
        return CompiledLayers.paused() if self.compiled and not serves else nullcontext()

    def flops(self) -> float:
        rows = self.args.max_steps * self.args.gradient_accumulation_steps * self.args.per_device_train_batch_size
        return rows * self._flops_per_row()

    def evaluation_flops(self) -> float:
        """Of all its evaluations: of the three products with a weight in training, they have the first."""
        evaluations = 1 + self.args.max_steps / (self.args.eval_steps or math.inf)
        return evaluations * len(self.rows.held_out) * self._flops_per_row() / 3

    def _flops_per_row(self) -> float:
        return self.rows.tokens_per_row * training_flops_per_token(self.model, self.rows.tokens_per_row)

    def collate(self, rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        """This rank's part of a batch that is laid out as one process would have it."""
        batch: dict[str, Any] = self.rows.collate(rows)
        if self.rank_zero.count > 1:
            mine = self.rank_zero.part(len(rows))
            idle = mine.start == mine.stop
            # a rank without rows still has to call the experts of others, with a row that is not learnt from
            batch = {name: tensor[slice(0, 1) if idle else mine] for name, tensor in batch.items()}
            if idle:
                batch |= {"labels": torch.full_like(batch["labels"], NO_LABEL), IDLE: True}
        if not self.by_documents:
            return batch
        return batch | document_arguments(batch, self.rows.documents_per_row, self.rows.longest)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = dict(inputs)
        self.watch.ledger.idle = inputs.pop(IDLE, False)
        return super()._prepare_inputs(inputs)

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """The loss is divided by the number of tokens that all ranks predict."""
        batches, predicted = super().get_batch_samples(*arguments, **options)
        if self.rank_zero.count > 1:
            if not isinstance(predicted, Tensor):
                remedy = "train it in one process, without torchrun"
                raise bad_value("ranks", "a model whose loss accepts the number of tokens", "one without", remedy)
            predicted = self.rank_zero.add_up(predicted, "numbers of tokens to predict")
        return batches, predicted

    def as_it_trains(self) -> Any:
        """Autocast where a step has it, for what runs the model before `train` has prepared it."""
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16)

    def try_batch(self, rows: int, gradients: bool) -> None:
        """Runs the first rows once; nothing of it stays but what was compiled."""
        model: Any = self.model
        watch = self.watch
        count = min(rows, len(self.rows.train))
        batch = self.collate([self.rows.train[row % count] for row in range(rows)])
        batch = self._prepare_inputs(batch)
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        training = model.training
        model.train()
        try:
            with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(gradients), self.as_it_trains():
                predicted = (batch["labels"] != NO_LABEL).sum()
                loss: Any = super().compute_loss(model, batch, num_items_in_batch=predicted)
                if gradients:
                    loss.backward()
        finally:
            model.zero_grad(set_to_none=True)
            model.train(training)
            watch.forget()

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Ours on a GPU, where parameters in bf16 need fp32 masters; else transformers' own, which a CPU computes
        faster (the factors of experts that are packed there). Of sharded parameters it steps what is here."""
        model: Any = self.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sharded = any(is_shard(p) for p in trained.values())
        ours = all(p.device.type == "cuda" for p in trained.values())
        if self.optimizer is None and (ours or sharded):
            decayed = set(self.get_decay_parameter_names(model))
            stepped = {name: local_parameter(p) for name, p in trained.items()}
            groups: list[dict[str, Any]] = [{"weight_decay": self.args.weight_decay}, {"weight_decay": 0.0}]
            for group, decays in zip(groups, (True, False), strict=True):
                group["params"] = [p for name, p in stepped.items() if (name in decayed) is decays]
            if ours:
                self.optimizer = self._our_optimizer(groups)
            else:  # of a sharded model Trainer makes more groups than two
                kind, told = self.get_optimizer_cls_and_kwargs(self.args, self.model)
                self.optimizer = kind(groups, **told)
            hand_over_gradients(self.optimizer, trained.values())
        return super().create_optimizer(*arguments, **options)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """As in a process with all experts; a share's biases have names that do not say so."""
        own = own_tensors(model)
        found = super().get_decay_parameter_names(model)
        return [name for name in found if name not in own or "bias" not in own[name].name]

    def _our_optimizer(self, groups: list[dict[str, Any]]) -> AdamW:
        args, filled = self.args, [group for group in groups if group["params"]]
        told: dict[str, Any] = {"states": self.optimizer_states, "seed": args.seed}
        return AdamW(filled, args.learning_rate, (args.adam_beta1, args.adam_beta2), args.adam_epsilon, **told)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """Never so that Trainer clips by itself: `clipping` knows of meshes, and of what ranks have alone."""
        return False

    def shard(self) -> None:
        """By FSDP2, where it is asked for; once all that looks at whole parameters has done so."""
        if self.mesh is not None:
            shard_fully(self.model, self.mesh)

    def lost_ranks_told(self) -> AbstractContextManager:
        if self.mesh is None or not self.mesh.shards:
            return nullcontext()
        return self.mesh.every.told_of("parameters or gradients that FSDP2 shards")

    def clipping(self) -> Callable[..., Any]:
        own = self.accelerator.clip_grad_norm_

        def clip(parameters: Any, most: float, *others: Any, **options: Any) -> Any:
            if self.rank_zero.ranks is not None:
                found = list(parameters)
                add_up_gradients(found, self.rank_zero.ranks)
                return clip_gradients(found, most, self.rank_zero.ranks)
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            if isinstance(optimizer, AdamW):  # clips in its step
                return optimizer.note_clipping(most)
            return own(parameters, most, *others, **options)

        return clip

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self.captures or not isinstance(num_items_in_batch, Tensor):
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        whole = inputs["input_ids"].shape[0] == self.args.per_device_train_batch_size  # not the rest of an epoch
        if self._captured is None and whole:
            if self._stream is not None and all(p.grad is None for p in model.parameters()):
                self._capture(model, inputs, num_items_in_batch)
            if self._captured is None and self.captures:
                self._stream = self._stream or torch.cuda.Stream()
                with on_stream(self._stream):
                    return super().training_step(model, inputs, num_items_in_batch)
        if self._captured is None or not self._captured.fits(inputs):
            return super().training_step(model, inputs, num_items_in_batch)
        loss = self._captured(inputs, num_items_in_batch)
        self.note_pass(inputs, loss)
        return loss

    def release(self) -> None:
        self.captures, self._captured, self._stream, self._tries = False, None, None, 0

    def _capture(self, model: Any, inputs: Any, predicted: Tensor) -> None:
        assert self._stream is not None

        def run(inputs: dict[str, Any], predicted: Tensor) -> Tensor:
            loss: Any = Trainer.compute_loss(self, model, inputs, num_items_in_batch=predicted)
            self.accelerator.backward(loss)
            return loss.detach()

        try:
            self._captured = CapturedStep(run, inputs, predicted, model.parameters(), self._stream)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model does that a graph cannot hold
            logger.info("capture", exc_info=error)
            self._tries += 1
            self.captures = self._tries < CAPTURES
            if not self.captures:
                reason = "the passes cannot be captured in a CUDA graph (-v shows why)"
                logger.warning("launching kernels one by one, which is slower: %s", reason)
        finally:
            for parameter in model.parameters():
                parameter.grad = None


def shard_fully(model: Any, mesh: RankMesh) -> None:
    """In place. The model is where it trains, and has no gradients yet."""
    if not mesh.shards:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    options = {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    layers = sharded_modules(model)
    apart: set[nn.Parameter] = set()
    for module, placed in layers.values():
        if mesh.of_shares is None:
            apart |= set(module.parameters())
            continue
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # a share of experts that were stored as (E, in, out) is not
        fully_shard(module, mesh=mesh.of_shares, **options)
        # what was placed would keep the whole share in memory
        shards = [module._parameters.get(f"placed_{place}") for place in range(len(placed.tensors()))]
        module.__dict__[ATTRIBUTE] = replace(module.__dict__[ATTRIBUTE], placed=placed.with_tensors(shards))
    if mesh.of_dense is not None:
        for module in (*decoder_layers(model), model):
            fully_shard(module, mesh=mesh.of_dense, ignored_params=apart, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


_SPOILED = "previous error during capture"  # all that the end of a capture tells of an error inside


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Runs what is inside there, behind what was before and ahead of what follows."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class CapturedStep:
    """Forward and backward of one batch as a CUDA graph: the host starts a step with one call instead of thousands.

    A capture holds the work of one stream. Gradients are added up on the stream on which a parameter was first used,
    for as long as anything keeps the graph of that pass: hence the same stream for the pass before it (`on_stream`),
    and a collection of what only circles of references keep. Everything has the address it had in the capture: a batch
    is copied to where the graph reads it, and gradients are where it writes them.
    """

    def __init__(
        self,
        run: Callable[[dict[str, Any], Tensor], Tensor],
        inputs: dict[str, Any],
        predicted: Tensor,
        parameters: Iterable[nn.Parameter],
        stream: torch.cuda.Stream,
    ) -> None:
        """Parameters have no gradients now. What `run` compiles or allocates once, it did in a call before.
        What it raises is raised here, and torch is as it was before."""
        self._inputs = {name: _copy(value) for name, value in inputs.items()}
        self._predicted = predicted.clone()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self._graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            # the outer one stays the current stream also where a capture fails to end
            with torch.cuda.stream(torch.cuda.current_stream()), capture(self._graph, pool=pool, stream=stream):
                self._loss = run(self._inputs, self._predicted)
        except Exception as error:
            end_failed_capture(pool)
            if _SPOILED in str(error) and error.__context__ is not None:
                raise error.__context__ from None
            raise
        self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def fits(self, inputs: dict[str, Any]) -> bool:
        kinds, own = ({name: _kind(value) for name, value in each.items()} for each in (inputs, self._inputs))
        return kinds == own

    def __call__(self, inputs: dict[str, Any], predicted: Tensor) -> Tensor:
        """The loss. Gradients are added to those that parameters have."""
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self._inputs[name].copy_(value, non_blocking=True)
        self._predicted.copy_(predicted, non_blocking=True)
        # in a step of several passes: the gradients of the first are where those of the second will be
        sums = [_copy(each.grad) if each.grad is own else each.grad for each, own in self._gradients]
        self._graph.replay()
        for (parameter, gradient), earlier in zip(self._gradients, sums, strict=True):
            parameter.grad = gradient if earlier is None else earlier.add_(gradient)
        return self._loss.clone()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
