#!/usr/bin/env python3
"""Sequence to sequence next to PyTorch + PEFT on the same checkpoint and the same pairs, in turns.

    python seq2seq_vs_torch.py COX [--width 256] [--layers 4] [--vocab 8192] [--source 128] [--target 64] [--batch 8] [--rank 16]
        [--threads 2] [--rounds 2] [--warmup 2] [--steps 6] [--recompute none] [--compile 0]

The checkpoint is an mT5 of these sizes with random weights, float32, and a tokenizer of one id a word; texts are as long as asked for.
Both sides: LoRA on every linear but the head, clipping to norm 1 and AdamW (PyTorch's fused), on the CPU. Ours is a whole `cox run`
with one worker; PyTorch reads the samples that `cox data sample` writes. Step times and memory: beside_torch.py. Needs torch,
transformers, peft and tokenizers.
"""
import json
import random

import beside_torch as bench

OPTIONS = dict(
    width=256, layers=4, vocab=8192, source=128, target=64, batch=8, rank=16, threads=2, rounds=2, warmup=2, steps=6, compile=0
)


def checkpoint(a, folder):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MT5Config, MT5ForConditionalGeneration

    torch.manual_seed(0)
    model = MT5ForConditionalGeneration(MT5Config(
        vocab_size=a.vocab, d_model=a.width, d_kv=64, d_ff=3 * a.width, num_layers=a.layers, num_heads=a.width // 64, dropout_rate=0.0,
        decoder_start_token_id=0,
    ))
    path = folder / "model"
    model.save_pretrained(path)
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, a.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def pairs(a, folder):
    draw = random.Random(1)
    text = lambda words: " ".join(f"w{draw.randrange(3, a.vocab)}" for _ in range(words))
    with open(folder / "pairs.jsonl", "w") as out:
        for _ in range(a.batch):
            out.write(json.dumps({"source": text(a.source - 1), "target": text(a.target - 1)}) + "\n")


def prepare(a, folder):
    model = checkpoint(a, folder)
    pairs(a, folder)
    config = {"model": {"path": str(model)}, "lora": {"rank": a.rank, "alpha": a.rank, "targets": "all-linear"},
              "data": {"path": str(folder / "pairs.jsonl")}}
    return bench.cox_run(a, folder, config, "seq2seq"), ["--made", str(model)]


def torch_side(a):
    bench.torch_threads(a)
    import torch
    from transformers import MT5ForConditionalGeneration
    model = MT5ForConditionalGeneration.from_pretrained(a.made, dtype=torch.float32)
    model = bench.adapted(a, model, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
    run, batch = torch.compile(model) if a.compile else model, bench.batch_of(a)
    bench.train(a, model, lambda: run(**batch, use_cache=False).loss)


if __name__ == "__main__":
    options = bench.arguments(OPTIONS)
    torch_side(options) if options.samples else bench.compare(options, prepare)
