#!/usr/bin/env python3
"""What recompute saves and costs, next to PyTorch: the `recompute` benchmark and torch.utils.checkpoint, in turns, at the same sizes.

    cargo bench --bench recompute --no-run
    python recompute_vs_torch.py BENCH_EXECUTABLE [--layers 12] [--width 768] [--inner 2048] [--rows 2] [--tokens 192] [--rank 16]
        [--threads 2] [--rounds 5] [--turns 2]

PyTorch's side: Transformers' Qwen2.5-VL language model with random weights, PEFT's LoRA on all its linears, float32, forward and backward from
input embeddings, without and with gradient_checkpointing_enable (non-reentrant: one checkpoint a layer, with early stop); rows marked `bf16` under
torch.autocast with frozen weights in bfloat16, which computes linear layers and attention in it as well. Its
activation peak is the largest sum of bytes of live tensors during the pass less those before it, counted by a dispatch mode in
a pass of its own; scratch inside an operation is not in it, as it is in ours. Processor time is of all threads. Needs torch, transformers, peft.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import weakref


def torch_side(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    heads = a.width // 64
    config = Qwen2_5_VLTextConfig(
        vocab_size=256, hidden_size=a.width, intermediate_size=a.inner, num_hidden_layers=a.layers, num_attention_heads=heads,
        num_key_value_heads=heads // 3, rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[8, 12, 12]))
    config._attn_implementation = "sdpa"
    model = Qwen2_5_VLTextModel(config)
    model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=r".*(q|k|v|o|gate|up|down)_proj"))
    params = [p for p in model.parameters() if p.requires_grad]
    for p in params:
        p.grad = torch.zeros_like(p)
    dy = torch.randn(a.rows, a.tokens, a.width)
    ids = torch.randint(0, 256, (a.rows, a.tokens))

    class Live(TorchDispatchMode):
        """Bytes of storages that came to life under the mode and are still alive."""
        def __init__(self):
            super().__init__()
            self.now = self.peak = 0
            self.seen = weakref.WeakKeyDictionary()

        def gone(self, size):
            self.now -= size

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            known = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            inputs = {s.data_ptr() for s in known}
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    s = t.untyped_storage()
                    if s.data_ptr() not in inputs and s not in self.seen:
                        self.seen[s] = True
                        self.now += s.nbytes()
                        weakref.finalize(s, self.gone, s.nbytes())
            self.peak = max(self.peak, self.now)
            return out

    base = model.base_model.model

    def plain():
        base(inputs_embeds=base.embed_tokens(ids), use_cache=False).last_hidden_state.backward(dy)

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            hidden = base(inputs_embeds=base.embed_tokens(ids), use_cache=False).last_hidden_state
        hidden.backward(dy.to(hidden.dtype))

    for mode in ["none", "full", "none, bf16", "full, bf16"]:
        if mode == "none, bf16":
            # As it is usually done: what is frozen in bfloat16, so that autocast copies none of it, adapters in float32.
            for p in model.parameters():
                p.data = p.data if p.requires_grad else p.data.bfloat16()
            model.gradient_checkpointing_disable()
            model.disable_input_require_grads()
        if mode.startswith("full"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
            model.enable_input_require_grads()
            model.train()
        forward_backward = autocast if mode.endswith("bf16") else plain
        run = lambda: ([p.grad.zero_() for p in params], forward_backward())
        run()
        with Live() as live:
            run()
        wall, busy = [], []
        for _ in range(a.rounds):
            begin, begun = time.perf_counter(), time.process_time()
            run()
            wall.append((time.perf_counter() - begin) * 1e3)
            busy.append((time.process_time() - begun) * 1e3)
        print(json.dumps(dict(mode=mode, activation_peak_mib=live.peak / 2**20, wall=wall, busy=busy)), flush=True)


def lines(command, a):
    # As the launcher sets it for workers: freed memory is kept.
    env = dict(os.environ, RAYON_NUM_THREADS=str(a.threads), MIMALLOC_PURGE_DELAY="-1")
    out = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("executable")
    for name, default in dict(layers=12, width=768, inner=2048, rows=2, tokens=192, rank=16, threads=2, rounds=5, turns=2).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--torch-side", action="store_true")
    a = parser.parse_args()
    if a.torch_side:
        return torch_side(a)
    sizes = [x for n in ["layers", "width", "inner", "rows", "tokens", "rank", "rounds"] for x in (f"--{n}", getattr(a, n))]
    ours, torch = [], []
    for _ in range(a.turns):
        ours.append(lines([a.executable, *sizes], a))
        torch.append(lines([sys.executable, os.path.abspath(__file__), a.executable, "--torch-side", "--threads", a.threads, *sizes], a))
    print("                             peak MiB    cut   more time   more processor time     ms")
    for mode in [row["mode"] for row in ours[0]]:
        rows = [next(row for row in round if row["mode"] == mode) for round in ours]
        mid = lambda key: statistics.median(row[key] for row in rows)
        print(f"Coxswain  {mode:<16} {mid('activation_peak_mib'):>10.1f} {100 * mid('cut'):>5.1f}% {100 * mid('more_time'):>10.1f}% "
              f"{100 * mid('more_processor_time'):>20.1f}% {mid('median_ms'):>7.0f}")
    for mode in ["none", "none, bf16", "full", "full, bf16"]:
        pairs = [(round[0], next(row for row in round if row["mode"] == mode)) for round in torch]
        more = lambda key: 100 * (statistics.median(statistics.median(row[key]) / statistics.median(none[key]) for none, row in pairs) - 1)
        none, row = pairs[0]
        cut = 100 * (1 - row["activation_peak_mib"] / none["activation_peak_mib"])
        milliseconds = statistics.median(statistics.median(row["wall"]) for _, row in pairs)
        print(f"PyTorch   {mode:<16} {row['activation_peak_mib']:>10.1f} {cut:>5.1f}% {more('wall'):>10.1f}% {more('busy'):>20.1f}% {milliseconds:>7.0f}")


main()
