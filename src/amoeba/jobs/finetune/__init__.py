"""Fine-tuning: LoRA on a frozen model, trained by the loop of `amoeba.jobs.train`."""
