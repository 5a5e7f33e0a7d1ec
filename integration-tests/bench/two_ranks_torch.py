#!/usr/bin/env python3
"""PyTorch's side of "two ranks with one thread each, relative to one rank with two": DistributedDataParallel over gloo, the policy of vla_step_vs_torch.py.

    python two_ranks_torch.py MODEL_DIR [--rounds 2] [--steps 5]

Four samples a step in micro-batches of two: one rank accumulates two of them, two ranks take one each. DDP's buckets overlap with the
backward pass, as by default. What is printed is the median time of a step after two that do not count, and the throughput of two ranks
over that of one; ours is `runs.py ranks` with the same model.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from vla_step_vs_torch import make_expert

WARMUP, GLOBAL, MICRO = 2, 4, 2


def rank_main(a):
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2_5_VLForConditionalGeneration
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(2 // world)
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            vlm = Qwen2_5_VLForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa")
            self.config = vlm.config
            vlm.requires_grad_(False)
            targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
            self.vlm = get_peft_model(vlm, LoraConfig(r=16, lora_alpha=16, target_modules=targets))
            self.expert = make_expert(torch, self.config.text_config.hidden_size, 768, 16, 12)

        def forward(self, ids, pixels, grid):
            hidden = self.vlm.base_model.model.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grid,
                mm_token_type_ids=(ids == self.config.image_token_id).int(), use_cache=False).last_hidden_state
            n = len(ids)
            actions, noise, t = torch.randn(n, 16, 7), torch.randn(n, 16, 7), torch.rand(n) ** (2 / 3)
            x = (1 - t)[:, None, None] * noise + t[:, None, None] * actions
            return torch.nn.functional.mse_loss(self.expert(x, t, torch.randn(n, 8), hidden), actions - noise)

    policy = Policy()
    config, params = policy.config, [p for p in policy.parameters() if p.requires_grad]
    model = torch.nn.parallel.DistributedDataParallel(policy) if world > 1 else policy
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    side = 224 // config.vision_config.patch_size
    image = [config.vision_start_token_id, *[config.image_token_id] * (side * side // 4), config.vision_end_token_id]
    row = image + torch.randint(0, config.text_config.vocab_size - 16, (a.text,)).tolist()
    ids = torch.tensor([row] * MICRO)
    pixels, grid = torch.randn(MICRO * side * side, 1176), torch.tensor([[1, side, side]] * MICRO)
    times = []
    for _ in range(WARMUP + a.steps):
        begin = time.perf_counter()
        for _ in range(GLOBAL // MICRO // world):
            model(ids, pixels, grid).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append((time.perf_counter() - begin) * 1e3)
    if dist.get_rank() == 0:
        print(json.dumps(statistics.median(times[WARMUP:])))
    dist.destroy_process_group()


def launch(a, world, port):
    def environment(rank):
        return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(2 // world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "RANK": str(rank), "WORLD_SIZE": str(world)}

    command = [sys.executable, os.path.abspath(__file__), a.model, "--rank", "--steps", str(a.steps), "--text", str(a.text)]
    ranks = [subprocess.Popen(command, env=environment(rank), stdout=subprocess.PIPE, text=True) for rank in range(world)]
    printed = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return json.loads(printed[0].splitlines()[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--rank", action="store_true")
    for name, value in dict(rounds=2, steps=5, text=30).items():
        ap.add_argument("--" + name, type=int, default=value)
    a = ap.parse_args()
    if a.rank:
        return rank_main(a)
    ratios = []
    for i in range(a.rounds):
        one, two = launch(a, 1, 29611 + 2 * i), launch(a, 2, 29612 + 2 * i)
        ratios.append(one / two)
        print(f"round {i}: 1 rank {one:.0f} ms a step, 2 ranks {two:.0f} ms: throughput of two over one {ratios[-1]:.2f}", flush=True)
    print(f"DDP, two ranks over one: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
