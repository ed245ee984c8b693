"""LoRA on experts: low-rank factors on frozen expert weights; reads and writes PEFT folders.

    lora.attach(model, r=16, alpha=32, targets=["experts", "q_proj", "v_proj"])
    ...train it with transformers.Trainer or a loop of your own...
    lora.save(model, "adapter")        # peft.PeftModel.from_pretrained reads it
    lora.load(fresh_model, "adapter")  # so do we
    lora.merge(model)                  # W + scaling · B @ A in place of W; unmerge restores W, bit for bit

peft is only needed for targets outside the experts.
"""

from amoeba.lora.adapter_folder import load, save
from amoeba.lora.attaching import attach, detach, merge, unmerge

__all__ = ["attach", "detach", "load", "merge", "save", "unmerge"]
