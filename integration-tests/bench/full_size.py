#!/usr/bin/env python3
"""A published shape on a CPU, rehearsed before there is a GPU: values of full-size layers beside Transformers and PEFT, and what whole
steps take beside what is predicted.

    full_size.py values COX FOLDER [--shape NAME] two layers of the language model and two of the vision tower, of full width: every
                                                  hidden state, the logits, the loss and all LoRA gradients (../peer/check_peft.py)
    full_size.py steps COX FOLDER [MODE ...]      all layers: a step and its memory in each mode, or in those named

NAME, qwen2.5-vl-3b unless given, is a folder of configs/assets and, for `steps`, a run file of configs (qwen3-vl-4b).
FOLDER keeps the checkpoints of random weights (2 GB for `values`, 8 GB for `steps`). A step has one sample of 256 image tokens, LoRA 32 and
the expert of configs/qwen2.5-vl-3b.yaml. PyTorch's step beside ours: vla_step_vs_torch.py on FOLDER/qwen2.5-vl-3b with --batch 1 --images 1
--size 448 --rank 32 --expert-layers 8 --recompute full. `values` needs torch, transformers and peft.
"""
import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODES = {
    "full": ["train.recompute=full"],
    "selective": ["train.recompute=selective"],
    "none": ["train.recompute=none"],
    "streamed": ["train.recompute=full", "memory.offload=layers"],
    "int8": ["train.recompute=full", "model.weights_dtype=int8"],
    "nf4": ["train.recompute=full", "model.weights_dtype=nf4"],
}


def checkpoint(cox, folder, shape, name, layers=None):
    """Random weights of the shape; of so many layers of each kind, if it is said."""
    out, assets = folder / name, ROOT / "configs/assets" / shape
    if not out.exists():
        config = json.loads((assets / "config.json").read_text())
        if layers:
            vision = config["vision_config"]
            config.get("text_config", config)["num_hidden_layers"] = layers
            vision["depth"] = layers
            if "deepstack_visual_indexes" in vision:
                vision["deepstack_visual_indexes"] = list(range(layers))
            else:
                vision["fullatt_block_indexes"] = [layers - 1]
        like = folder / f"{name}-shape"
        like.mkdir(parents=True, exist_ok=True)
        (like / "config.json").write_text(json.dumps(config))
        (like / "preprocessor_config.json").write_text((assets / "preprocessor_config.json").read_text())
        tokenizer = ROOT / "configs/assets/tiny-vla"
        subprocess.run([cox, "data", "make-checkpoint", "--like", like, "--tokenizer", tokenizer, "--out", out], check=True)
    return out


def inputs(model, adapter, file):
    """Two samples of two pictures of different sizes, the second padded; and an adapter of which nothing is zero."""
    import peft
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model)
    grids = torch.tensor([[1, 16, 24], [1, 8, 8]])
    picture = lambda grid: [config.vision_start_token_id, *[config.image_token_id] * (int(grid.prod()) // 4), config.vision_end_token_id]
    text = lambda count: torch.randint(0, 900, (count,)).tolist()
    rows = [text(5) + picture(grid) + text(20) for grid in grids]
    longest = max(map(len, rows))
    padded = lambda values, by: torch.tensor([row + [by] * (longest - len(row)) for row in values])
    ids, mask = padded(rows, 0), padded([[1] * len(row) for row in rows], 0)
    labels = padded([[-100] * (len(row) - 20) + row[-20:] for row in rows], -100)
    vision = config.vision_config
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2)
    save_file({"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels, "image_grid_thw": grids}, file)
    base = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    linears = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    made = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=64, target_modules=linears))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    made.save_pretrained(adapter)


def values(cox, folder, shape):
    model = checkpoint(cox, folder, shape, f"{shape}-two-layers", 2)
    adapter, given, ours = folder / "adapter", folder / "inputs.safetensors", folder / "ours.safetensors"
    inputs(model, adapter, given)
    both = ["--model", model, "--adapter", adapter, "--inputs", given]
    subprocess.run([cox, "model", "forward", *both, "--out", ours], check=True)
    subprocess.run([sys.executable, ROOT / "integration-tests/peer/check_peft.py", *both, "--ours", ours], check=True)


def steps(cox, folder, shape, names):
    model = checkpoint(cox, folder, shape, shape)
    for name in names or MODES:
        out = folder / f"run-{name}"
        subprocess.run(["rm", "-rf", out], check=True)
        command = [cox, "worker", "--config", ROOT / f"configs/{shape}.yaml", "--device", "cpu", f"model.path={model}",
                   f"run.output_dir={out}", "train.epochs=", "train.steps=3", "train.global_batch=1", "train.micro_batch=1",
                   "train.checkpoint_every=0", "eval.samples=0", *MODES[name]]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(done.stdout[-3000:])
        said = json.loads((out / "summary.json").read_text())
        step, memory, [peak] = said["train_seconds"] / said["steps"], said["memory"], said["peak_memory"]
        gib = lambda amount: f"{amount / 2**30:.2f}"
        print(f"{name:10} {step:.1f} s a step; GiB in use {gib(memory['measured'])}, predicted {gib(memory['predicted'])} "
              f"({100 * memory['error']:+.1f} %); resident {gib(peak['driver'])}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["values", "steps"])
    parser.add_argument("cox", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--shape", default="qwen2.5-vl-3b", metavar="NAME")
    a = parser.parse_intermixed_args()
    cox, folder = a.cox.resolve(), a.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    {"values": lambda: values(cox, folder, a.shape), "steps": lambda: steps(cox, folder, a.shape, a.modes)}[a.what]()


if __name__ == "__main__":
    main()
