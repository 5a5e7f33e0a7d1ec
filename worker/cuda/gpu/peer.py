#!/usr/bin/env python3
"""PyTorch's step on the shapes of call.py's own: the denominator.

    python3 peer.py [--batch 8] [--variants eager-full eager-none compiled-full compiled-none] [--hooks] [--out FILE]

Qwen2.5-VL with random weights in bfloat16 on the first GPU, LoRA by PEFT on all linears of the language model in float32, an action
expert trained in full in float32, autocast to bfloat16, SDPA, fused AdamW, clipping to norm 1, checkpointing of every layer (`full`) or
of none. One image of 128 tokens a sample, as the run beside it has, or `--images 2 --grid 16x16`. `--hooks` adds
`enable_input_require_grads`, which PEFT's guides ask for and which makes the frozen vision tower keep and pull gradients; checkpointing
that is not reentrant does without. `compiled` compiles the layers and the expert. `--small` has the shape of a toy, on a CPU if there is
no GPU: a rehearsal.

All variants run in one process, one after another; after each there is a line, and the same in FILE: step times (medians after the
warm-up) and memory by three measures: what the driver says the GPU holds, what PyTorch has reserved, what it has allocated. Ends with a
line that says what is missing where something is. Needs torch, transformers and peft.
"""
import argparse
import gc
import inspect
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "integration-tests/bench"))


def arguments():
    parser = argparse.ArgumentParser()
    numbers = dict(batch=8, images=1, text=24, rank=32, expert_layers=8, expert_width=768, repeats=4, warmup=5, steps=20)
    for name, value in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--grid", default="16x32", help="patches of an image; four are a token")
    variants = ["eager-full", "eager-none", "compiled-full", "compiled-none"]
    parser.add_argument("--variants", nargs="+", default=variants, choices=variants)
    parser.add_argument("--hooks", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args()


def needed():
    """The three libraries and a device, or a sentence."""
    try:
        import torch
        import transformers
        import peft
    except ImportError as missing:
        sys.exit(f"no peer here: {missing}; it needs torch, transformers and peft")
    return torch, transformers, peft


def model_of(a, torch, transformers, device):
    here = pathlib.Path(__file__).resolve().parents[3]
    settings = json.loads((here / "configs/assets/qwen2.5-vl-3b/config.json").read_text())
    if a.small:
        settings.update(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        settings["rope_scaling"]["mrope_section"] = [2, 3, 3]
        settings["vision_config"].update(hidden_size=32, intermediate_size=64, depth=2, num_heads=2, out_hidden_size=64,
                                         fullatt_block_indexes=[1])
    config = transformers.Qwen2_5_VLConfig(**settings)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def adapted(a, recompute, model, peft):
    linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = peft.get_peft_model(model, peft.LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=linears))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.train()
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        if a.hooks:
            model.enable_input_require_grads()
    return model


def batch_of(a, torch, config):
    rows, columns = map(int, a.grid.split("x"))
    image = [config.vision_start_token_id, *[config.image_token_id] * (rows * columns // 4), config.vision_end_token_id]
    row = image * a.images + torch.randint(0, 150000, (a.text,), device="cpu").tolist()
    ids = torch.tensor([row] * a.batch)
    vision = config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids),
                pixel_values=torch.randn(a.batch * a.images * rows * columns, width, dtype=torch.bfloat16),
                image_grid_thw=torch.tensor([[1, rows, columns]] * (a.batch * a.images)),
                mm_token_type_ids=(ids == config.image_token_id).int())


def memory(torch, device):
    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return dict(driver_mib=(total - free) / 2**20, reserved_mib=torch.cuda.max_memory_reserved() / 2**20,
                allocated_mib=torch.cuda.max_memory_allocated() / 2**20)


def measured(a, variant, libraries, device):
    """A fresh model, its steps, and what they took."""
    torch, transformers, peft = libraries
    from vla_step_vs_torch import make_expert
    how, recompute = variant.split("-")
    torch.manual_seed(0)
    model = adapted(a, recompute, model_of(a, torch, transformers, device), peft)
    with torch.device(device):
        hidden_size = model.base_model.model.config.text_config.hidden_size
        expert = make_expert(torch, hidden_size, a.expert_width, a.expert_layers, max(1, a.expert_width // 64))
        batch = batch_of(a, torch, model.base_model.model.config)
    inner = model.base_model.model.model
    known = inspect.signature(inner.forward).parameters
    batch = {name: value for name, value in batch.items() if name in known}
    params = [p for p in [*model.parameters(), *expert.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=device == "cuda")
    if how == "compiled":
        for part in (*inner.language_model.layers, *inner.visual.blocks):
            part.compile()
        expert.compile()

    # Drawn once: `torch.device` around a step would put a Python call before each of its operations.
    with torch.device(device):
        count = a.batch * a.repeats
        actions, noise, state = torch.randn(count, 16, 7), torch.randn(count, 16, 7), torch.randn(count, 8)
        t = torch.rand(count) ** (2 / 3)

    def step():
        with torch.autocast(device, torch.bfloat16):
            hidden = inner(**batch, use_cache=False).last_hidden_state
            x = (1 - t)[:, None, None] * noise + t[:, None, None] * actions
            velocity = expert(x, t, state, hidden.repeat_interleave(a.repeats, 0))
            loss = torch.nn.functional.mse_loss(velocity.float(), actions - noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    times = []
    for _ in range(a.warmup + a.steps):
        begin = time.perf_counter()
        loss = step()
        times.append((time.perf_counter() - begin) * 1e3)
    times = times[a.warmup:]
    return dict(variant=variant, step_ms=statistics.median(times), least_ms=min(times), tokens=batch["input_ids"].shape[1], loss=loss,
                 trainable=sum(p.numel() for p in params), **memory(torch, device), torch=torch.__version__,
                 transformers=transformers.__version__, peft=peft.__version__)


def main():
    a = arguments()
    libraries = needed()
    torch = libraries[0]
    if not torch.cuda.is_available() and not a.small:
        sys.exit("no peer here: PyTorch finds no GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if a.small:
        a.batch, a.grid, a.expert_layers, a.expert_width, a.warmup, a.steps = 2, "4x4", 2, 64, 1, 2
    torch.set_float32_matmul_precision("high")
    for variant in a.variants:
        try:
            line = json.dumps(measured(a, variant, libraries, device))
        except RuntimeError as why:  # memory that is refused, a graph that is: the others still have their turn
            line = json.dumps(dict(variant=variant, failed=str(why)[:300]))
        print(line, flush=True)
        if a.out:
            with open(a.out, "a") as out:
                print(line, file=out)
        # The next one begins with an empty GPU and nothing compiled.
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
