"""Captured decoding of every kind of model on a GPU, tiny, against transformers' own loop: served, refused or wrong.

python tests/support/captured_kinds.py --seconds 75        # the last line is JSON
"""

import argparse
import json
import time
import warnings

import torch
from transformers import GenerationConfig

import amoeba
from amoeba.core.errors import one_line
from amoeba.decoding import Decoder, why_not
from model_kinds import VOCABULARY, build_kind, kinds

TOKENS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--kinds", nargs="*", help="these alone")
    parser.add_argument("--part", default="0/1", help="one of several processes, such as 2/4")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    amoeba.register()
    part, parts = map(int, given.part.split("/"))
    started, found = time.perf_counter(), {}
    for kind in (given.kinds or kinds())[part::parts]:
        if time.perf_counter() - started > given.seconds:
            found[kind] = "not tried"
            continue
        before = time.perf_counter()
        try:
            found[kind] = tried(kind)
        except Exception as error:
            found[kind] = f"refused: {type(error).__name__}: {one_line(error)[:200]}"
        print(f"{kind}: {found[kind]} ({time.perf_counter() - before:.1f} s)", flush=True)
    counts = {word: sum(each.startswith(word) for each in found.values()) for word in WORDS}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), **counts, "kinds": found}))


WORDS = ("served", "wrong", "refused", "not tried")


def tried(kind: str) -> str:
    model = build_kind(kind).cuda()
    model.set_experts_implementation("amoeba")
    if (reason := why_not(model)) is not None:
        return f"refused: {reason}"
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (17, 5)]
    steps = Decoder(model, batch=len(rows), length=64).generate(rows, TOKENS)
    tokens = [list(row) for row in zip(*steps, strict=True)]
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    for row, ours in zip(rows, tokens, strict=True):
        ids = torch.tensor([row], device="cuda")
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        expected = out[0, len(row) :].tolist()
        if ours != expected:
            place = next(place for place, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1])
            return f"wrong: from token {place} of {TOKENS} after a prompt of {len(row)}"
    return "served"


if __name__ == "__main__":
    main()
