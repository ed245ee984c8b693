"""AdamW in transformers.Trainer: schedules, clipping in the step, checkpoints, resumed runs."""

import pytest
import torch
from torch import Tensor, nn

from amoeba.optim import AdamW

transformers = pytest.importorskip("transformers")
STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 33), nn.Linear(33, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.down(self.up(x).relu().bfloat16()).float()
        return {"loss": (y - labels).square().mean()}


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": (x := torch.randn(8, generator=generator)), "labels": 5 * x.flip(0)} for _ in range(64)]


def make_trainer(folder, clipping_in_step: bool = True):
    model = Model()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, states="bfloat16")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        save_strategy="steps",
        save_steps=STEPS // 2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows(), optimizers=(optimizer, None))
    if clipping_in_step:
        trainer.accelerator.clip_grad_norm_ = lambda parameters, max_norm, *rest: optimizer.note_clipping(max_norm)
    return trainer, optimizer


def test_a_resumed_run_ends_bit_for_bit_where_the_whole_one_does(tmp_path):
    whole, optimizer = make_trainer(tmp_path)
    whole.train()
    resumed, again = make_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    before = Model().state_dict()
    for name, parameter in resumed.model.named_parameters():
        expected = whole.model.get_parameter(name)
        assert torch.equal(parameter, expected) and not torch.equal(parameter, before[name])
        state, wanted = again.state[parameter], optimizer.state[expected]
        assert state.keys() == wanted.keys() and state["step"] == wanted["step"] == STEPS
        assert all(torch.equal(state[key], wanted[key]) for key in state.keys() - {"step"})


def test_clipping_in_the_step_is_the_clipping_of_trainer(tmp_path):
    models = []
    for clipping_in_step in (True, False):
        trainer, optimizer = make_trainer(tmp_path / str(clipping_in_step), clipping_in_step)
        trainer.train()
        models.append([optimizer.master_of(parameter) for parameter in trainer.model.parameters()])
    for clipped, expected in zip(*models, strict=True):
        assert torch.allclose(clipped, expected, rtol=1e-3, atol=1e-3)  # Trainer's gradients are rounded to bf16 anew
