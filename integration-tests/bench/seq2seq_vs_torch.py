#!/usr/bin/env python3
"""Sequence to sequence next to PyTorch + PEFT on the same checkpoint and the same pairs, in turns.

    python seq2seq_vs_torch.py COX [--width 256] [--layers 4] [--vocab 8192] [--source 128] [--target 64] [--batch 8] [--rank 16]
        [--threads 2] [--rounds 2] [--warmup 2] [--steps 6] [--recompute none] [--compile 0]

The checkpoint is an mT5 of these sizes with random weights, float32, and a tokenizer of one id a word; texts are as long as asked for.
Both sides: LoRA on every linear but the head, clipping to norm 1 and AdamW (PyTorch's fused), on the CPU. Ours is a whole `cox run`
with one worker; PyTorch reads the samples that `cox data sample` writes. Step times are medians after the first two. Memory is the
peak resident set of the process less what it held before its first batch. Needs torch, transformers, peft and tokenizers.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

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


def run_file(a, folder):
    path = folder / "run.yaml"
    path.write_text(json.dumps({
        "run": {"name": "bench", "output_dir": str(folder / "run")}, "task": {"type": "seq2seq"}, "model": {"path": str(folder / "model")},
        "lora": {"rank": a.rank, "alpha": a.rank, "targets": "all-linear"}, "data": {"path": str(folder / "pairs.jsonl")},
        "train": {"steps": a.warmup + a.steps, "global_batch": a.batch, "micro_batch": a.batch, "recompute": a.recompute},
        "optimizer": {"lr": {"lora": 1e-4}}, "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"},
    }))
    return path


def ours(a, folder):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    command = [a.cox, "run", str(run_file(a, folder)), "--log-format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line["total_ms"] for line in lines if "total_ms" in line]
    summary = json.loads((folder / "run/summary.json").read_text())
    phases = summary["peak_memory"][0]["phases"]
    peak = max(phases[phase]["driver"] for phase in ("forward", "backward", "optimizer"))
    return dict(step_ms=steps[a.warmup:], mib=(peak - phases["connecting"]["driver"]) / 2**20, loss=summary["losses"][0])


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def torch_side(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import MT5ForConditionalGeneration
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = MT5ForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules="all-linear", task_type="SEQ_2_SEQ_LM"))
    model.train()
    if a.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    samples = [load_file(path) for path in sorted(pathlib.Path(a.samples).glob("*.safetensors"))]
    batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    run = torch.compile(model) if a.compile else model
    before = status_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    times, first = [], None
    for _ in range(a.warmup + a.steps):
        begin = time.perf_counter()
        loss = run(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        first = loss.item() if first is None else first
        times.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps(dict(step_ms=times[a.warmup:], mib=status_mib("VmHWM") - before, loss=first)))


def theirs(a, folder):
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    for number in range(a.batch):
        out = str(samples / f"{number}.safetensors")
        command = [a.cox, "data", "sample", str(run_file(a, folder)), "--index", str(number), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    options = [x for name in OPTIONS for x in (f"--{name}", str(getattr(a, name)))]
    command = [sys.executable, os.path.abspath(__file__), a.cox, *options, "--recompute", a.recompute]
    command += ["--samples", str(samples), "--model", str(folder / "model")]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("cox")
    for name, value in OPTIONS.items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--recompute", default="none", choices=["none", "full"])
    ap.add_argument("--samples")
    ap.add_argument("--model")
    a = ap.parse_args()
    if a.samples:
        return torch_side(a)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint(a, folder)
        pairs(a, folder)
        rounds = [(ours(a, folder), theirs(a, folder)) for _ in range(a.rounds)]
    for name, of in zip(["cox", "PyTorch"], zip(*rounds)):
        step = statistics.median(ms for found in of for ms in found["step_ms"])
        print(f"{name:8} {step:8.1f} ms a step   {max(found['mib'] for found in of):7.1f} MiB   first loss {of[0]['loss']:.6f}")
    steps = [statistics.median(ms for found in of for ms in found["step_ms"]) for of in zip(*rounds)]
    memory = [max(found["mib"] for found in of) for of in zip(*rounds)]
    print(f"ratio: time {steps[0] / steps[1]:.2f}, memory {memory[0] / memory[1]:.2f}")


if __name__ == "__main__":
    main()
