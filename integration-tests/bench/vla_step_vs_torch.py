#!/usr/bin/env python3
"""One training step of the whole policy next to PyTorch + PEFT on the same checkpoint, in turns: A B A B.

    cargo bench --bench vla_step --no-run
    python vla_step_vs_torch.py BENCH_EXECUTABLE MODEL_DIR [--batch 2] [--images 2] [--size 224] [--text 60] [--rank 16]
        [--targets all|attn] [--expert-layers 16] [--expert-width 768] [--threads 2] [--rounds 2] [--steps 6] [--fused] [--compile] [--bf16]

Both sides: frozen vision tower, LoRA on the language model, a DiT flow-matching expert trained in full, one flow draw per sample,
gradient clipping to norm 1 and AdamW, float32 on the CPU. Each is run without and with recompute of the language model (the
expert is recomputed on neither side). A step is everything from the batch in memory to the updated weights. Launches alternate; the
first two steps of each are not counted. Memory is the peak resident set; PyTorch's imports are in it and are printed, too.
`--fused` gives PyTorch its fused AdamW, `--compile` torch.compile of model and expert. With `--bf16` frozen weights are bfloat16 on both sides, and PyTorch computes under autocast,
the expert included; ours are the frozen weights' products, where the processor has instructions for them. Needs torch, transformers and peft.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

WARMUP = 2


def numbers(a):
    return ["batch", "images", "size", "text", "rank", "expert_layers", "expert_width", "steps"]


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def make_expert(torch, context, width, layers, heads, horizon=16, action=7, state=8):
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self, cross):
            super().__init__()
            self.cross, source = cross, context if cross else width
            self.ada = nn.Linear(width, 2 * width)
            self.n1, self.n2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-5) for _ in range(2))
            self.q, self.k, self.v, self.o = nn.Linear(width, width), nn.Linear(source, width, bias=False), nn.Linear(source, width), nn.Linear(width, width)
            self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x, hidden, cond):
            scale, shift = self.ada(cond)[:, None].chunk(2, -1)
            y = self.n1(x) * (1 + scale) + shift
            source = hidden if self.cross else y
            split = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)
            a = F.scaled_dot_product_attention(split(self.q(y)), split(self.k(source)), split(self.v(source)))
            x = x + self.o(a.transpose(1, 2).flatten(2))
            return x + self.f2(F.gelu(self.f1(self.n2(x)), approximate="tanh"))

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.action = nn.Linear(state, width), nn.Linear(action, width)
            self.positions = nn.Parameter(torch.zeros(horizon + 1, width))
            self.t1, self.t2 = nn.Linear(256, width), nn.Linear(width, width)
            self.blocks = nn.ModuleList(Block(i % 2 == 0) for i in range(layers))
            self.ada, self.norm, self.out = nn.Linear(width, 2 * width), nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, action)

        def forward(self, x, t, s, hidden):
            angle = t[:, None] * 1000 * torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 127)
            cond = F.silu(self.t2(F.silu(self.t1(torch.cat([angle.cos(), angle.sin()], -1)))))
            x = torch.cat([self.state(s)[:, None], self.action(x)], 1) + self.positions
            for block in self.blocks:
                x = block(x, hidden, cond)
            shift, scale = self.ada(cond)[:, None].chunk(2, -1)
            return self.out(self.norm(x[:, 1:]) * (1 + scale) + shift)

    return Expert()


def torch_side(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    imports = status_mib("VmRSS")
    vlm = AutoModelForImageTextToText.from_pretrained(a.model, dtype=torch.bfloat16 if a.bf16 else torch.float32, attn_implementation="sdpa")
    config = vlm.config
    vlm.requires_grad_(False)
    linears = "(q|k|v|o|gate|up|down)_proj" if a.targets == "all" else "(q|k|v|o)_proj"
    vlm = get_peft_model(vlm, LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=rf".*language_model.*\.{linears}"))
    if a.recompute == "full":
        vlm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        vlm.enable_input_require_grads()
        vlm.train()
    expert = make_expert(torch, config.text_config.hidden_size, a.expert_width, a.expert_layers, max(1, a.expert_width // 64))
    params = [p for p in [*vlm.parameters(), *expert.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=a.fused or None)
    vision = config.vision_config
    side = a.size // vision.patch_size
    image = [config.vision_start_token_id, *[config.image_token_id] * (side * side // 4), config.vision_end_token_id]
    row = image * a.images + torch.randint(0, config.text_config.vocab_size - 16, (a.text,)).tolist()
    ids = torch.tensor([row] * a.batch)
    pixels = torch.randn(a.batch * a.images * side * side, 3 * vision.temporal_patch_size * vision.patch_size**2)
    grid = torch.tensor([[1, side, side]] * (a.batch * a.images))

    run, act = (torch.compile(vlm.base_model.model.model), torch.compile(expert)) if a.compile else (vlm.base_model.model.model, expert)

    def loss_of():
        hidden = run(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grid,
            mm_token_type_ids=(ids == config.image_token_id).int(), use_cache=False).last_hidden_state
        actions, noise = torch.randn(a.batch, 16, 7), torch.randn(a.batch, 16, 7)
        t = torch.rand(a.batch) ** (2 / 3)
        x = (1 - t)[:, None, None] * noise + t[:, None, None] * actions
        velocity = act(x, t, torch.randn(a.batch, 8), hidden)
        return torch.nn.functional.mse_loss(velocity, actions - noise)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    times = []
    for _ in range(WARMUP + a.steps):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps(dict(step_ms=times[WARMUP:], tokens=len(row), trainable=sum(p.numel() for p in params),
                          peak_rss_mib=status_mib("VmHWM"), imports_mib=imports)))


def launch(a, side, recompute):
    options = [x for n in numbers(a) for x in (f"--{n.replace('_', '-')}", getattr(a, n))] + ["--targets", a.targets, "--recompute", recompute]
    if side == "ours":
        command = [a.executable, "--model", a.model, "--warmup", WARMUP, *options] + ["--weights", "bfloat16"] * a.bf16
    else:
        command = [sys.executable, os.path.abspath(__file__), a.executable, a.model, "--torch-side", "--threads", a.threads, *options]
        command += ["--fused"] * a.fused + ["--compile"] * a.compile + ["--bf16"] * a.bf16
    # As the launcher starts a worker.
    env = {"MIMALLOC_PURGE_DELAY": "-1", **os.environ, "RAYON_NUM_THREADS": str(a.threads)}
    out = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("executable")
    ap.add_argument("model")
    for name, value in dict(batch=2, images=2, size=224, text=60, rank=16, expert_layers=16, expert_width=768, threads=2, rounds=2, steps=6).items():
        ap.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    ap.add_argument("--targets", default="all", choices=["all", "attn"])
    ap.add_argument("--recompute", default="both", choices=["both", "none", "full"])
    for flag in ["fused", "compile", "bf16", "torch-side"]:
        ap.add_argument(f"--{flag}", action="store_true")
    a = ap.parse_args()
    if a.torch_side:
        return torch_side(a)
    for recompute in ["none", "full"] if a.recompute == "both" else [a.recompute]:
        runs = {"ours": [], "torch": []}
        for i in range(a.rounds):
            for side in runs:
                d = launch(a, side, recompute)
                d["median"] = statistics.median(d["step_ms"])
                runs[side].append(d)
                extra = f"imports {d['imports_mib']:.0f} MiB" if side == "torch" else d["vision_language_expert_optimizer_ms"][-1]
                print(f"recompute {recompute}, round {i}, {side:5s}: step {d['median']:8.1f} ms (least {min(d['step_ms']):8.1f}), "
                      f"peak {d['peak_rss_mib']:7.1f} MiB, trainable {d['trainable']}, {extra}", flush=True)
        ratios = [o["median"] / t["median"] for o, t in zip(runs["ours"], runs["torch"])]
        least = min(min(d["step_ms"]) for d in runs["ours"]) / min(min(d["step_ms"]) for d in runs["torch"])
        memory = statistics.median(d["peak_rss_mib"] for d in runs["ours"]) / statistics.median(d["peak_rss_mib"] for d in runs["torch"])
        print(f"recompute {recompute}: ours / PyTorch: time {statistics.median(ratios):.2f} (medians of rounds {', '.join(f'{r:.2f}' for r in ratios)}; "
              f"fastest steps {least:.2f}), peak memory {memory:.2f}", flush=True)


if __name__ == "__main__":
    main()
