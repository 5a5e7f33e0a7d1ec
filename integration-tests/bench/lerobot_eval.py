#!/usr/bin/env python3
"""Does LeRobot's own `lerobot-eval` run a policy that `cox run` has left, in a simulator?

    apt-get install libosmesa6        # or MUJOCO_GL=egl PYOPENGL_PLATFORM=egl
    pip install "lerobot[metaworld]==0.6.1" "transformers>=5.4,<5.6" num2words "mujoco==3.3.0"
    lerobot_eval.py RUN_DIR/policy [--backbone DIR] [--camera observation.images.camera1] [--task button-press-v3] [--steps N] [--out DIR] ...

What follows those flags goes to `lerobot-eval` as it is (`--eval.n_episodes=4`). A policy of published sizes whose vision-language model is
in Hugging Face's cache needs no more than the command that this prints; a small one, made for tests, needs what it says here: where the
model is that it names (`--backbone`), and an expert whose MLP is as wide as in its file, not as LeRobot's rule has it. `--steps` ends
episodes before Meta-World's 500 steps, of which each draws a picture.
"""
import argparse
import json
import os
import shlex
import sys

os.environ.setdefault("MUJOCO_GL", "osmesa")
flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("policy")
flags.add_argument("--backbone", help="directory of the vision-language model that the policy names")
flags.add_argument("--camera", default="observation.images.camera1", help="the policy's camera that the simulator's one is")
flags.add_argument("--task", default="button-press-v3")
flags.add_argument("--steps", type=int, help="of an episode, in the place of 500")
flags.add_argument("--out", default="runs/lerobot-eval")
args, rest = flags.parse_known_args()
sys.argv = ["lerobot-eval", f"--policy.path={args.policy}", "--policy.device=cpu", "--env.type=metaworld", f"--env.task={args.task}",
            f'--rename_map={json.dumps({"observation.image": args.camera})}', f"--output_dir={args.out}",
            "--eval.batch_size=1", "--eval.n_episodes=1", *rest]
print(shlex.join(sys.argv))

if args.backbone:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import transformers
    from lerobot.policies.smolvla import smolvlm_with_expert
    from safetensors import safe_open

    named = json.load(open(os.path.join(args.policy, "config.json")))["vlm_model_name"]
    for auto in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoProcessor):
        real = auto.from_pretrained
        auto.from_pretrained = staticmethod(
            lambda name, *more, _real=real, **keys: _real(args.backbone if name == named else name, *more, **keys))
    with safe_open(os.path.join(args.policy, "model.safetensors"), "pt") as weights:
        inner = weights.get_slice("model.vlm_with_expert.lm_expert.layers.0.mlp.gate_proj.weight").get_shape()[0]
    smolvlm_with_expert.get_intermediate_size = lambda width: inner

from lerobot.envs.metaworld import MetaworldEnv  # noqa: E402
from lerobot.scripts.lerobot_eval import main  # noqa: E402

if args.steps:
    # `lerobot-eval` asks the simulator how long an episode is.
    MetaworldEnv._max_episode_steps = property(lambda env: args.steps, lambda env, most: None)

main()
told = json.load(open(os.path.join(args.out, "eval_info.json")))
print(json.dumps(told["overall"] if "overall" in told else told, indent=1))
