#!/usr/bin/env python3
"""Does PEFT load an adapter that we wrote, and do Transformers + PEFT then compute what we compute?

    cox model forward --model MODEL --adapter ADAPTER --inputs inputs.safetensors --out ours.safetensors
    python check_peft.py --model MODEL --adapter ADAPTER --inputs inputs.safetensors --ours ours.safetensors

Python packages: ../fixtures/requirements.txt. Fails (exit 1) if PEFT misses a tensor, finds one it does not know, or if any hidden
state, image feature, logit or LoRA gradient differs by more than --tolerance (ten times that for gradients), as norm of the difference
over norm. Without inputs at hand, take those of ../fixtures/golden. Both sides run in float32 on the CPU.
"""
import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText


def load(model_dir, adapter_dir):
    base = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    config = peft.PeftConfig.from_pretrained(adapter_dir)
    config.inference_mode = False  # gradients are compared, too
    model = peft.PeftModel(base, config)
    result = model.load_adapter(adapter_dir, adapter_name="default", is_trainable=True)
    missing = [key for key in result.missing_keys if "lora_" in key]
    if missing or result.unexpected_keys:
        sys.exit(f"PEFT misses {missing[:5]} and does not know {result.unexpected_keys[:5]}")
    return base.eval(), model.eval()


def run(base, model, inputs):
    out, hooks = {}, []

    def keep(name, pick=lambda o: o):
        return lambda _m, _i, o: out.__setitem__(name, pick(o[0] if isinstance(o, tuple) else o))

    language = base.model.language_model
    for i, layer in enumerate(language.layers):
        hooks.append(layer.register_forward_hook(keep(f"lm.layer{i}")))
    hooks.append(language.norm.register_forward_hook(keep("last_hidden_state")))
    hooks.append(base.model.visual.register_forward_hook(keep("image_features", lambda o: o.pooler_output)))
    for i, merger in enumerate(getattr(base.model.visual, "deepstack_merger_list", [])):
        hooks.append(merger.register_forward_hook(keep(f"deepstack.{i}")))
    token_types = (inputs["input_ids"] == base.config.image_token_id).int()
    position_ids, _ = base.model.get_rope_index(
        inputs["input_ids"], mm_token_type_ids=token_types, image_grid_thw=inputs.get("image_grid_thw"),
        attention_mask=inputs["attention_mask"],
    )
    result = model(**inputs, mm_token_type_ids=token_types, position_ids=position_ids, use_cache=False)
    out.update(position_ids=position_ids, logits=result.logits)
    if result.loss is not None:
        out["loss"] = result.loss
        result.loss.backward()
        for key, p in model.named_parameters():
            if p.requires_grad:
                out["grad." + key.replace(".default", "")] = torch.zeros_like(p) if p.grad is None else p.grad
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ["--model", "--adapter", "--inputs", "--ours"]:
        parser.add_argument(flag, required=True)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()

    base, model = load(args.model, args.adapter)
    theirs, ours = run(base, model, load_file(args.inputs)), load_file(args.ours)
    if set(theirs) != set(ours):
        sys.exit(f"only PEFT: {sorted(set(theirs) - set(ours))[:5]}; only ours: {sorted(set(ours) - set(theirs))[:5]}")
    worst = {"value": (0.0, "-"), "gradient": (0.0, "-")}
    for name, reference in theirs.items():
        reference = reference.detach().double()
        norm = reference.norm().item()
        error = (ours[name].double() - reference).norm().item() / (norm or 1.0)
        kind = "gradient" if name.startswith("grad.") else "value"
        worst[kind] = max(worst[kind], (error, name))
    for kind, (error, name) in worst.items():
        print(f"largest relative error of a {kind}: {error:.1e} ({name})")
    if worst["value"][0] > args.tolerance or worst["gradient"][0] > 10 * args.tolerance:
        sys.exit("PEFT computes something else")
    print(f"PEFT {peft.__version__} loads {args.adapter} and agrees")


if __name__ == "__main__":
    main()
