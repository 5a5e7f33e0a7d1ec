"""The 3B shape: one command line for what is counted, packed, expected and measured, and one reading of what it says."""
import re


# One image of 128 tokens a sample.
OVERRIDES = ["data.path=configs/assets/metaworld-mini", "data.min_pixels=100352", "data.max_pixels=100352"]
# A model of kilobytes, for rehearsals.
SMALL = ["data.min_pixels=3136", "data.max_pixels=3136", "expert.width=32", "expert.layers=2", "expert.heads=2", "lora.rank=8"]
# Of a 3B step's run.
STEPS = 12
# Losses of bfloat16 weights on a GPU beside those of a CPU, relative.
TOLERANCE = 2e-2


def keys(model, batch, steps, more=()):
    return [f"model.path={model}", "train.epochs=", f"train.steps={steps}", f"train.global_batch={batch}", f"train.micro_batch={batch}",
            *OVERRIDES, *more]


def worker(cox, model, out, batch, steps, more=(), device="cuda"):
    """A run of some steps, alone, with a command line of its own."""
    return [cox, "worker", "--config", "configs/qwen2.5-vl-3b.yaml", "--device", device, f"run.output_dir={out}",
            *keys(model, batch, steps, more)]


def plan(cox, model, batch, more=()):
    """What `cox plan` says of it, as JSON."""
    return [cox, "plan", "configs/qwen2.5-vl-3b.yaml", "--gpu", "H200", "--json", *keys(model, batch, STEPS, more)]


def steps(log):
    """Gradients' norms and milliseconds, step by step, of what a worker has printed."""
    return [(float(norm), float(ms)) for norm, ms in re.findall(r" step=\d+ of=.* grad_norm=(\S+).* ms=(\d+)", log)]
