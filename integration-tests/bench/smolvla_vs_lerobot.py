#!/usr/bin/env python3
"""A training step of SmolVLA at its published size next to LeRobot 0.6.1's, on the CPU, in turns.

    pip install "lerobot[dataset]==0.6.1" "transformers>=5.4,<5.6" num2words
    python smolvla_vs_lerobot.py COX PLACE [--batch 2] [--threads 2] [--rounds 3] [--warmup 2] [--steps 4] [--kept 0] [--bf16 0]

PLACE gets a policy of 450,046,176 random parameters (1.8 GB) as LeRobot writes it, the configuration and tokenizer of its vision-language model, and a data
set with two cameras of 480 x 640; what is there is used again. Both sides train what LeRobot trains by default (99,880,992 parameters, the vision-language
model is frozen), in float32, a chunk of 50 actions, clipping and AdamW (PyTorch's fused). Ours is a whole `cox run` with one worker, which reads and decodes
its samples meanwhile. LeRobot's batch is prepared once. --kept 1: ours takes the tower's features from its cache, which an earlier run has filled; --kept 2: keys and values of every layer.
--bf16 1: the frozen model is bfloat16 on both sides, and in LeRobot most of the expert, too, as for those who start from the published policy. Step times and memory: beside_torch.py.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import beside_torch as bench

OPTIONS = dict(batch=2, threads=2, rounds=3, warmup=2, steps=4, kept=0, bf16=0, making=0)
HUB = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
TINY = pathlib.Path(__file__).resolve().parents[1] / "fixtures/golden/smolvla/vlm"
TEXT = dict(hidden_size=960, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5, head_dim=64, intermediate_size=2560, vocab_size=49280)
VISION = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, image_size=512, patch_size=16)
CAMERAS, STATE, ACTION, CHUNK = ["camera1", "camera2"], 6, 7, 50


def vlm(place):
    """The published sizes around the tiny model's tokenizer: ids below its vocabulary are as good as others."""
    shutil.copytree(TINY, place / "vlm")
    path = place / "vlm/config.json"
    config = json.loads(path.read_text()) | {"scale_factor": 4}
    config["text_config"] |= TEXT
    config["vision_config"] |= VISION
    path.write_text(json.dumps(config))


def backbone_from(place):
    """What LeRobot would fetch of the hub is in `place`."""
    import transformers
    for auto in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoProcessor):
        real = auto.from_pretrained
        auto.from_pretrained = staticmethod(lambda name, *rest, _real=real, **named: _real(place / "vlm" if name == HUB else name, *rest, **named))


def make(a, place):
    import numpy
    import torch
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    vlm(place)
    backbone_from(place)
    torch.manual_seed(0)
    images = {f"observation.images.{name}": PolicyFeature(type=FeatureType.VISUAL, shape=(3, 480, 640)) for name in CAMERAS}
    inputs = images | {"observation.state": PolicyFeature(type=FeatureType.STATE, shape=(STATE,))}
    outputs = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))}
    config = SmolVLAConfig(input_features=inputs, output_features=outputs, device="cpu", chunk_size=CHUNK, n_action_steps=CHUNK, push_to_hub=False,
                           load_vlm_weights=False)
    shape = lambda width: {"dtype": "float32", "shape": (width,), "names": [f"x{number}" for number in range(width)]}
    frames = {name: {"dtype": "image", "shape": (480, 640, 3), "names": ["height", "width", "channels"]} for name in images}
    data = LeRobotDataset.create("local/bench", fps=20, root=place / "data", use_videos=False,
                                 features=frames | {"observation.state": shape(STATE), "action": shape(ACTION)})
    draws = numpy.random.default_rng(0)
    y, x = numpy.mgrid[:480, :640]
    for frame in range(96):
        image = numpy.stack([(x + 3 * frame) % 256, (y + frame) % 256, (x + y) // 5 % 256], axis=-1).astype(numpy.uint8)
        values = {"observation.state": draws.normal(size=STATE), "action": draws.normal(size=ACTION)}
        data.add_frame({name: value.astype(numpy.float32) for name, value in values.items()} | {name: image for name in images} | {"task": "open the drawer"})
    data.save_episode()
    data.finalize()
    policy = SmolVLAPolicy(config)
    for part in (policy, *make_pre_post_processors(config, dataset_stats=data.meta.stats)):
        part.save_pretrained(place / "policy")


def prepare(a, folder):
    place = pathlib.Path(a.place).resolve()
    if not (place / "policy/policy_postprocessor.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--making", "1"], check=True)
    data = {"path": str(place / "data"), "cameras": [f"observation.images.{name}" for name in CAMERAS], "horizon": CHUNK}
    dtype = "bfloat16" if a.bf16 else "float32"
    config = {"model": {"path": str(place / "policy"), "backbone": str(place / "vlm"), "weights_dtype": dtype}, "data": data}
    tap = "final" if a.kept == 2 else "auto"
    cache = {"cache": {"mode": "exact", "tap": tap, "dir": str(folder / "features")}} if a.kept else {}
    path = bench.cox_run(a, folder, config | cache, "vla_flow")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer": {"lr": {"expert": 1e-4}}, "eval": {"samples": 0}}))
    if a.kept:
        bench.ours(a, folder, path)  # Steps of the same seed read the same samples: what this run has computed, those that are timed find.
    return path, []


def lerobot_side(a, place):
    bench.torch_threads(a)
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    backbone_from(place)
    policy = SmolVLAPolicy.from_pretrained(place / "policy")
    if a.bf16:
        both = policy.model.vlm_with_expert.to(torch.bfloat16)
        for number, layer in enumerate(both.lm_expert.layers):
            if number % 2:
                layer.self_attn.k_proj.float(), layer.self_attn.v_proj.float()
    policy.train()
    before, _ = make_pre_post_processors(policy.config, pretrained_path=str(place / "policy"))
    times = {"action": [number / 20 for number in range(CHUNK)]}
    data = LeRobotDataset("local/bench", root=place / "data", delta_timestamps=times)
    batch = before(torch.utils.data.default_collate([data[index] for index in range(a.batch)]))
    bench.train(a, policy, lambda: policy.forward(dict(batch))[0])


if __name__ == "__main__":
    options = bench.arguments(OPTIONS, "place")
    at = pathlib.Path(options.place).resolve()
    if options.making:
        make(options, at)
    else:
        lerobot_side(options, at) if options.samples else bench.compare(options, prepare)
