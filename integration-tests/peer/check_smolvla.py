#!/usr/bin/env python3
"""Does LeRobot load a policy directory that a run has left, with the weights in it, and act as `cox serve` does?

    cox serve RUN_DIR --listen 127.0.0.1:8000
    python check_smolvla.py RUN_DIR/policy BACKBONE_DIR 127.0.0.1:8000

Needs lerobot==0.6.1, transformers>=5.4,<5.6, num2words, openpi-client. BACKBONE_DIR is the directory of the vision-language model that
the policy names (`model.backbone`). Policy and both processors are read from the directory by LeRobot's own classes. Fails (exit 1) if a
tensor is another than the file's, or if from the same noise an action differs from the server's by more than 1e-4 of the largest.
"""
import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
import transformers
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla import smolvlm_with_expert
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from safetensors.torch import load_file

policy_dir, backbone, (host, port) = sys.argv[1], sys.argv[2], sys.argv[3].rsplit(":", 1)
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
other = [name for name, stored in weights.items() if name not in loaded or not torch.equal(loaded[name].float(), stored.float())]
assert not other, f"other than the file's: {other}"

client = WebsocketClientPolicy(host=host, port=int(port))
metadata = client.get_server_metadata()
draws, worst = np.random.default_rng(1), 0.0
for task in ("open the drawer", "put the red cube on the plate, then wait"):
    seen, batch = {"prompt": task}, {"task": [task]}
    for name, value in metadata["inputs"].items():
        feature = value.get("feature")
        if value["dtype"] == "uint8":
            seen[name] = draws.integers(0, 256, value["shape"], np.uint8)
            batch[feature] = torch.from_numpy(seen[name]).permute(2, 0, 1)[None].float() / 255
        elif value["dtype"] == "float32":
            seen[name] = draws.normal(size=value["shape"]).astype(np.float32)
            batch[feature] = torch.from_numpy(seen[name])[None]
    noise = draws.normal(size=metadata["optional"]["noise"]["shape"]).astype(np.float32)
    with torch.no_grad():
        chunk = after(policy.predict_action_chunk(before(batch), noise=torch.from_numpy(noise)[None]))[0].numpy()
    served = client.infer({**seen, "noise": noise})["actions"]
    assert served.shape == chunk.shape, (served.shape, chunk.shape)
    worst = max(worst, float(np.abs(served - chunk).max() / np.abs(chunk).max()))
print(f"{len(weights)} tensors as in the file; actions {chunk.shape} differ by {worst:.1e} of the largest")
sys.exit(worst > 1e-4)
