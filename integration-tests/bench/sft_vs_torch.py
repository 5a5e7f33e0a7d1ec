#!/usr/bin/env python3
"""Supervised fine-tuning next to PyTorch + PEFT on the same checkpoint and the same chats, in turns.

    cox data make-checkpoint --like CONFIG_DIR --tokenizer configs/assets/tiny-vla --out MODEL_DIR
    python sft_vs_torch.py COX MODEL_DIR [--tokens 256] [--batch 2] [--image 224] [--rank 16] [--threads 2] [--rounds 2]
        [--warmup 2] [--steps 6] [--recompute none] [--compile 0] [--bf16 0]

Both sides: frozen vision tower, LoRA on all linears of the language model, the loss on the tokens of the answer (all but some
twenty of a chat without an image), clipping to norm 1 and AdamW (PyTorch's fused), float32 on the CPU (--bf16 1: frozen
weights in bfloat16, PyTorch under autocast). Ours is a whole `cox run`
with one worker; PyTorch, eager (--compile 1: torch.compile), reads the samples that `cox data sample` writes, so both see the same ids, labels and pixels.
Step times and memory: beside_torch.py. Needs torch, transformers and peft.
"""
import json
import random
import struct
import zlib

import beside_torch as bench

OPTIONS = dict(tokens=256, batch=2, image=224, rank=16, threads=2, rounds=2, warmup=2, steps=6, compile=0, bf16=0)


def png(side, draw):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    raw = b"".join(b"\0" + draw.randbytes(3 * side) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def chats(a, folder):
    """Chats longer than asked for: both sides see them cut to the same length."""
    draw = random.Random(1)
    with open(folder / "chats.jsonl", "w") as out:
        for number in range(a.batch):
            words = " ".join(draw.choice(["reach", "push", "the", "goal", "block", "and", "move"]) for _ in range(2 * a.tokens))
            question = "<image>Say it." if a.image else "Say it."
            chat = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": words}]}
            if a.image:
                (folder / f"{number}.png").write_bytes(png(a.image, draw))
                chat["images"] = [f"{number}.png"]
            out.write(json.dumps(chat) + "\n")


def prepare(a, folder):
    chats(a, folder)
    config = {"model": {"path": a.model, "weights_dtype": "bfloat16" if a.bf16 else "float32"}, "lora": {"rank": a.rank, "alpha": a.rank},
              "data": {"path": str(folder / "chats.jsonl"), "max_tokens": a.tokens}}
    return bench.cox_run(a, folder, config, "sft"), []


def torch_side(a):
    bench.torch_threads(a)
    import torch
    from transformers import AutoModelForImageTextToText
    model = AutoModelForImageTextToText.from_pretrained(a.model, dtype=torch.bfloat16 if a.bf16 else torch.float32, attn_implementation="sdpa")
    images = model.config.image_token_id
    model = bench.adapted(a, model, target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj")
    batch = bench.batch_of(a)
    run = torch.compile(model) if a.compile else model

    def loss_of():
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(a.bf16)):
            return run(**batch, mm_token_type_ids=(batch["input_ids"] == images).int(), use_cache=False).loss

    bench.train(a, model, loss_of)


if __name__ == "__main__":
    options = bench.arguments(OPTIONS, "model")
    torch_side(options) if options.samples else bench.compare(options, prepare)
