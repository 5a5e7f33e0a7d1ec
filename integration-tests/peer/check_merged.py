#!/usr/bin/env python3
"""Has a checkpoint of `cox export --merged` the logits of the model with its adapter, in Transformers?

    python check_merged.py MODEL ADAPTER MERGED           # torch, transformers 5, peft

Fails (exit 1) if the norm of the difference is more than TOLERANCE of the logits' norm. Merged weights are rounded to the type of
the checkpoint, so the tolerance of a bfloat16 checkpoint is that of bfloat16.
"""
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from transformers import AutoModelForImageTextToText

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def main():
    model, adapter, merged = sys.argv[1:]
    stored = AutoModelForImageTextToText.from_pretrained(model, dtype="auto").dtype
    ids = torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(1))
    plain, ours = load(model)(input_ids=ids).logits, load(merged)(input_ids=ids).logits
    adapted = peft.PeftModel.from_pretrained(load(model), adapter)(input_ids=ids).logits
    error, update = ((x - adapted).norm() / adapted.norm() for x in (ours, plain))
    print(f"merged against adapted: {error:.2e}; without the adapter {update:.2e}; checkpoint in {stored}")
    sys.exit(not (error <= TOLERANCE[stored] and error < update))


main()
