#!/usr/bin/env python3
"""PyTorch's live and cached steps for `cargo bench --bench cached_step -- --torch PYTHON`, which starts this and asks for one step at a time.

    python cached_step_torch.py MODEL_DIR [--batch 2] [--repeats 1] [--threads 2] ...        reads `live` or `cached`, answers milliseconds

live: vision tower and language model with LoRA on all its linears, expert, clipping, AdamW. cached: hidden states from memory, expert, clipping, AdamW; the
adapters have no gradient and rest. With several draws a sample, its hidden states are repeated for the expert. Needs torch, transformers and peft.
"""
import argparse
import os
import sys
import time


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    for name, value in dict(batch=2, images=2, size=224, text=60, rank=16, expert_layers=4, expert_width=384, repeats=1, threads=2).items():
        ap.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    a = ap.parse_args()
    # A thread that waits for the next step must not spin: the other side runs meanwhile.
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads), OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2_5_VLForConditionalGeneration
    from vla_step_vs_torch import make_expert
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    vlm = Qwen2_5_VLForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa")
    config = vlm.config
    vlm.requires_grad_(False)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    vlm = get_peft_model(vlm, LoraConfig(r=a.rank, lora_alpha=a.rank, target_modules=targets))
    expert = make_expert(torch, config.text_config.hidden_size, a.expert_width, a.expert_layers, max(1, a.expert_width // 64))
    params = [p for p in [*vlm.parameters(), *expert.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    side = a.size // config.vision_config.patch_size
    image = [config.vision_start_token_id, *[config.image_token_id] * (side * side // 4), config.vision_end_token_id]
    row = image * a.images + torch.randint(0, config.text_config.vocab_size - 16, (a.text,)).tolist()
    ids = torch.tensor([row] * a.batch)
    pixels = torch.randn(a.batch * a.images * side * side, 1176)
    grid = torch.tensor([[1, side, side]] * (a.batch * a.images))
    kept = torch.randn(a.batch, len(row), config.text_config.hidden_size)
    draws = a.batch * a.repeats

    def live():
        return vlm.base_model.model.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grid,
            mm_token_type_ids=(ids == config.image_token_id).int(), use_cache=False).last_hidden_state

    def step(hidden):
        hidden = hidden.repeat_interleave(a.repeats, 0) if a.repeats > 1 else hidden
        actions, noise = torch.randn(draws, 16, 7), torch.randn(draws, 16, 7)
        t = torch.rand(draws) ** (2 / 3)
        x = (1 - t)[:, None, None] * noise + t[:, None, None] * actions
        velocity = expert(x, t, torch.randn(draws, 8), hidden)
        torch.nn.functional.mse_loss(velocity, actions - noise).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for line in sys.stdin:
        begin = time.perf_counter()
        step(live() if line.strip() == "live" else kept)
        print((time.perf_counter() - begin) * 1e3, flush=True)


main()
