#!/usr/bin/env python3
"""Supervised fine-tuning next to PyTorch + PEFT on the same checkpoint and the same chats, in turns.

    cox data make-checkpoint --like CONFIG_DIR --tokenizer configs/assets/tiny-vla --out MODEL_DIR
    python sft_vs_torch.py COX MODEL_DIR [--tokens 256] [--batch 2] [--image 224] [--rank 16] [--threads 2] [--rounds 2]
        [--warmup 2] [--steps 6] [--recompute none]

Both sides: frozen vision tower, LoRA on all linears of the language model, the loss on the tokens of the answer (all but some
twenty of a chat without an image), clipping to norm 1 and AdamW (PyTorch's fused), float32 on the CPU. Ours is a whole `cox run`
with one worker; PyTorch, eager, reads the samples that `cox data sample` writes, so both see the same ids, labels and pixels.
Step times are medians after the first two. Memory is the peak resident set of the process less what it held before its first batch:
imports, runtime and weights are on neither side. Needs torch, transformers and peft.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

OPTIONS = dict(tokens=256, batch=2, image=224, rank=16, threads=2, rounds=2, warmup=2, steps=6)


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


def run_file(a, folder):
    path = folder / "run.yaml"
    path.write_text(json.dumps({
        "run": {"name": "bench", "output_dir": str(folder / "run")}, "task": {"type": "sft"}, "model": {"path": a.model},
        "lora": {"rank": a.rank, "alpha": a.rank},
        "data": {"path": str(folder / "chats.jsonl"), "max_tokens": a.tokens},
        "train": {"steps": a.warmup + a.steps, "global_batch": a.batch, "micro_batch": a.batch, "recompute": a.recompute},
        "optimizer": {"lr": {"lora": 1e-4}}, "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"},
    }))
    return path


def ours(a, folder):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    done = subprocess.run([a.cox, "run", str(run_file(a, folder)), "--log-format", "json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line["total_ms"] for line in lines if "total_ms" in line]
    summary = json.loads((folder / "run/summary.json").read_text())
    phases = summary["peak_memory"][0]["phases"]
    peak = max(phases[phase]["driver"] for phase in ("forward", "backward", "optimizer"))
    return dict(step_ms=steps[a.warmup:], mib=(peak - phases["connecting"]["driver"]) / 2**20,
                loss=summary["losses"][0])


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def torch_side(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import Qwen2_5_VLForConditionalGeneration
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa")
    config = model.config
    model.requires_grad_(False)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=targets))
    model.train()
    if a.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    samples = [load_file(path) for path in sorted(pathlib.Path(a.samples).glob("*.safetensors"))]
    batch = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    ids = batch["input_ids"]
    before = status_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    times, first = [], None
    for _ in range(a.warmup + a.steps):
        begin = time.perf_counter()
        loss = model(**batch, mm_token_type_ids=(ids == config.image_token_id).int(), use_cache=False).loss
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
        subprocess.run([a.cox, "data", "sample", str(run_file(a, folder)), "--index", str(number), "--out", out], check=True,
                       stdout=subprocess.DEVNULL)
    options = [x for name in OPTIONS for x in (f"--{name}", str(getattr(a, name)))]
    command = [sys.executable, os.path.abspath(__file__), a.cox, a.model, *options, "--recompute", a.recompute, "--samples", str(samples)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("cox")
    ap.add_argument("model")
    for name, value in OPTIONS.items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--recompute", default="none", choices=["none", "full"])
    ap.add_argument("--samples", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.samples:
        return torch_side(a)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        chats(a, folder)
        pairs = []
        for number in range(a.rounds):
            pair = [ours(a, folder), theirs(a, folder)]
            pairs.append(pair)
            for name, side in zip(("ours", "PyTorch"), pair):
                print(f"round {number}, {name:7s}: step {statistics.median(side['step_ms']):8.1f} ms, least {min(side['step_ms']):8.1f}, "
                      f"{side['mib']:8.1f} MiB, first loss {side['loss']:.5f}", flush=True)
        ratio = lambda of: statistics.median(of(ours) / of(theirs) for ours, theirs in pairs)
        print(f"ours / PyTorch: time {ratio(lambda side: statistics.median(side['step_ms'])):.2f} "
              f"(fastest steps {ratio(lambda side: min(side['step_ms'])):.2f}), memory {ratio(lambda side: side['mib']):.2f}")


if __name__ == "__main__":
    main()
