#!/usr/bin/env python3
"""Does LeRobot load a policy directory that a run has left, with the weights in it, and act by it?

    python check_smolvla.py RUN_DIR/policy BACKBONE_DIR       # lerobot==0.6.1, transformers>=5.4,<5.6, num2words

BACKBONE_DIR is the directory of the vision-language model that the policy names (`model.backbone`). Both processors are
read from the directory as well. Fails (exit 1) if a tensor is another than the file's, or an action is no number.
"""
import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import torch
import transformers
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla import smolvlm_with_expert
from safetensors.torch import load_file

policy_dir, backbone = sys.argv[1:3]
config = json.load(open(os.path.join(policy_dir, "config.json")))
for auto in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoProcessor):
    real = auto.from_pretrained
    auto.from_pretrained = staticmethod(
        lambda name, *rest, _real=real, **named: _real(backbone if name == config["vlm_model_name"] else name, *rest, **named))
weights = load_file(os.path.join(policy_dir, "model.safetensors"))
inner = weights["model.vlm_with_expert.lm_expert.layers.0.mlp.gate_proj.weight"].shape[0]
smolvlm_with_expert.get_intermediate_size = lambda width: inner  # of small policies, whose MLP is not as LeRobot's rule has it

policy = SmolVLAPolicy.from_pretrained(policy_dir)
before, after = make_pre_post_processors(policy.config, pretrained_path=policy_dir)
loaded = dict(policy.named_parameters())
other = [name for name, stored in weights.items() if name in loaded and not torch.equal(loaded[name].float(), stored.float())]
draws = torch.Generator().manual_seed(1)
sample = {name: torch.rand(1, *feature["shape"], generator=draws) for name, feature in config["input_features"].items()}
chunk = after(policy.predict_action_chunk(before({**sample, "task": ["open the drawer"]})))
print(f"{len(weights)} tensors, {len(other)} other than the file's; actions {tuple(chunk.shape)}, of spread {chunk.std():.3f}")
sys.exit(bool(other) or not torch.isfinite(chunk).all())
