"""The 3B shape: one command line for what is counted, packed, expected and measured."""

# One image of 128 tokens a sample.
OVERRIDES = ["data.path=configs/assets/metaworld-mini", "data.min_pixels=100352", "data.max_pixels=100352"]
# A model of kilobytes, for rehearsals.
SMALL = ["data.min_pixels=3136", "data.max_pixels=3136", "expert.width=32", "expert.layers=2", "expert.heads=2", "lora.rank=8"]
# Losses of bfloat16 weights on a GPU beside those of a CPU, relative.
TOLERANCE = 2e-2


def worker(cox, model, out, batch, steps, more=(), device="cuda"):
    """A run of some steps, alone, with a command line of its own."""
    return [cox, "worker", "--config", "configs/qwen2.5-vl-3b.yaml", "--device", device, f"model.path={model}", f"run.output_dir={out}",
            "train.epochs=", f"train.steps={steps}", f"train.global_batch={batch}", f"train.micro_batch={batch}", *OVERRIDES, *more]
