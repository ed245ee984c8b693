"""Training: `amoeba train`, and the run folder, loop, checkpoints and metrics that `amoeba finetune` shares with it."""
