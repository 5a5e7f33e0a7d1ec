"""A policy that Coxswain has trained, in PyTorch: all of it in this file, to be read, changed and taken along.

    policy = coxswain_policy.Policy.load("runs/my", base_model="/models/Qwen2.5-VL-3B-Instruct")
    policy.infer({"observation.images.front": image, "observation.state": state, "prompt": "open the drawer"})["actions"]

It samples what ``cox serve`` answers, to 1e-4 in normalised units, from the same noise. It needs PyTorch, Transformers 5, PEFT,
safetensors and Pillow (``pip install "coxswain[policy]"``); nothing of Coxswain is imported.

The files of a run's directory, which are the whole policy beside the pretrained model:

=======================  ==================================================================================================
``policy.json``          what is taken and given: cameras with their sizes, state, sensor, action, prompt, how to sample
``stats.json``           statistics of state, sensor and action, as LeRobot writes them
``adapter/``             the vision-language model's LoRA adapter, as PEFT writes it; absent if it was frozen
``expert.safetensors``   the action expert: :class:`Expert` says what each tensor does
``sensor.safetensors``   the sensor encoder: :class:`Sensor`; absent without a sensor
``base.safetensors``     modules of the vision-language model that trained in full, under Transformers' names; absent without any
``sets/NAME/``           of a policy that was trained on several data sets: ``policy.json`` and ``stats.json`` of each
=======================  ==================================================================================================

Shapes: ``b`` samples, ``s`` tokens of the prompt, ``t`` tokens of the expert, ``h`` actions of a chunk, ``a`` values of an action,
``d`` the expert's width.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

# The second has actions that are differences from the state, or a rule for images; the third a history, no state, features side by side,
# or a limit of the text.
FORMATS = (1, 2, 3)


class Weights:
    """Named tensors of one file, all in float32, and the two operations that are made of them."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.tensors = {name: tensor.float() for name, tensor in load_file(path, device=str(device)).items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """``x W^T + b``; keys of attention have no ``b``."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def mlp(self, first: str, second: str, x: Tensor) -> Tensor:
        return self.linear(second, F.gelu(self.linear(first, x), approximate="tanh"))


class Sensor:
    """A window of readings to tokens of the expert's width: equal parts of the window, each through one small MLP.

    ``sensor.in``, ``sensor.out``: the MLP; ``sensor.positions [tokens, d]``. A window that does not divide is extended at its old
    end by its oldest reading.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __call__(self, window: Tensor) -> Tensor:
        """``[b, window, channels]`` to ``[b, tokens, d]``."""
        positions = self.weights["sensor.positions"]
        missing = -window.shape[1] % positions.shape[0]
        window = torch.cat([window[:, :1].expand(-1, missing, -1), window], 1)
        parts = window.reshape(window.shape[0], positions.shape[0], -1)
        return self.weights.mlp("sensor.in", "sensor.out", parts) + positions


class Expert:
    """The action expert: a diffusion transformer that predicts the velocity of noisy actions.

    ======================================  ===================================================================================
    ``expert.time.{in,out}``                sinusoids of the flow time -> condition ``[b, d]``
    ``expert.{state,action}``               state and each noisy action to a token
    ``expert.positions [t, d]``             added to the tokens ``[state | sensor | actions]``
    ``expert.blocks.N.ada``                 condition to (scale, shift) of the norm before attention
    ``expert.blocks.N.attn.{q,k,v,o}``      attention: even blocks to the hidden states, odd ones among the tokens
    ``expert.blocks.N.mlp.{in,out}``        the MLP, 4 d wide
    ``expert.final.ada``                    condition to (shift, scale): the other order than in blocks
    ``expert.final.out``                    the last h tokens to velocities
    ======================================  ===================================================================================

    What a run may have had beside, by the tensors that are there:

    ======================================  ===================================================================================
    ``expert.state.{in,out}``               instead of ``expert.state``: two layers with a ReLU
    ``expert.action_time.{in,out}``         each action token with sinusoids of the flow time, two layers with a SiLU
    ``expert.future [n, d]``                learned tokens between the state's and the actions', without positions
    ``expert.features.{weight,bias}``       gain and bias of a layer norm on the hidden states
    ``expert.decoder.{in,out}``             behind ``expert.final.out``: two layers with a ReLU
    ======================================  ===================================================================================
    """

    def __init__(self, weights: Weights, heads: int, horizon: int) -> None:
        self.weights, self.heads, self.horizon = weights, heads, horizon
        self.layers = 1 + max(int(name.split(".")[2]) for name in weights.tensors if ".blocks." in name)

    def velocity(self, noisy: Tensor, time: float, seen: Seen) -> Tensor:
        """``noisy [b, h, a]`` to velocities of the same shape."""
        w = self.weights
        condition = F.silu(w.linear("expert.time.out", F.silu(w.linear("expert.time.in", sinusoids(time, noisy.device)))))
        tokens = [] if seen.state is None else [self.state(seen.state)[:, None]]
        if seen.sensor is not None:
            tokens.append(seen.sensor)
        x = torch.cat([*tokens, self.actions(noisy, time)], 1) + w["expert.positions"]
        if "expert.future" in w.tensors:
            future = w["expert.future"].expand(len(x), -1, -1)
            x = torch.cat([x[:, : -self.horizon], future, x[:, -self.horizon :]], 1)
        hidden = seen.hidden
        if "expert.features.weight" in w.tensors:
            hidden = F.layer_norm(hidden, hidden.shape[-1:], w["expert.features.weight"], w["expert.features.bias"], 1e-5)
        for index in range(self.layers):
            x = self.block(index, x, condition, hidden, seen.mask)
        shift, scale = w.linear("expert.final.ada", condition).chunk(2, -1)
        x = F.layer_norm(x[:, -self.horizon :], x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        velocity = w.linear("expert.final.out", x)
        if "expert.decoder.in.weight" in w.tensors:
            velocity = w.linear("expert.decoder.out", F.relu(w.linear("expert.decoder.in", velocity)))
        return velocity

    def state(self, state: Tensor) -> Tensor:
        if "expert.state.weight" in self.weights.tensors:
            return self.weights.linear("expert.state", state)
        return self.weights.linear("expert.state.out", F.relu(self.weights.linear("expert.state.in", state)))

    def actions(self, noisy: Tensor, time: float) -> Tensor:
        tokens = self.weights.linear("expert.action", noisy)
        if "expert.action_time.in.weight" not in self.weights.tensors:
            return tokens
        half = tokens.shape[-1] // 2
        angle = 1000 * time * torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float64) / half)
        mixed = torch.cat([angle.sin(), angle.cos()]).float().to(tokens.device).expand_as(tokens)
        mixed = F.silu(self.weights.linear("expert.action_time.in", torch.cat([tokens, mixed], -1)))
        return self.weights.linear("expert.action_time.out", mixed)

    def block(self, index: int, x: Tensor, condition: Tensor, hidden: Tensor, attended: Tensor) -> Tensor:
        w, at, cross = self.weights, f"expert.blocks.{index}", index % 2 == 0
        scale, shift = w.linear(f"{at}.ada", condition).chunk(2, -1)
        y = F.layer_norm(x, x.shape[-1:], eps=1e-5) * (1 + scale) + shift
        source = hidden if cross else y

        def by_head(name: str, x: Tensor) -> Tensor:
            return w.linear(f"{at}.attn.{name}", x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mask = attended if cross else None
        mixed = F.scaled_dot_product_attention(by_head("q", y), by_head("k", source), by_head("v", source), attn_mask=mask)
        x = x + w.linear(f"{at}.attn.o", mixed.transpose(1, 2).flatten(2))
        return x + w.mlp(f"{at}.mlp.in", f"{at}.mlp.out", F.layer_norm(x, x.shape[-1:], eps=1e-5))


class Seen:
    """What the expert attends to: ``hidden [b, s, c]`` after the final norm, which of it counts, state and sensor tokens."""

    def __init__(self, hidden: Tensor, attended: Tensor, state: Tensor | None, sensor: Tensor | None) -> None:
        self.hidden, self.state, self.sensor = hidden, state, sensor
        self.mask = attended.bool()[:, None, None]


def described(directory: Path, data_set: str | None) -> Path:
    """Where ``policy.json`` and ``stats.json`` are: in ``directory``, or of a policy of several data sets in that of one of them."""
    there = sorted(path.name for path in (directory / "sets").glob("*") if path.is_dir())
    if data_set is None and len(there) == 1:
        data_set = there[0]
    if data_set is None and not there:
        return directory
    if data_set not in there:
        known = f"has {', '.join(there)}" if there else "is of one data set, which has no name"
        raise ValueError(f"{directory}: data_set={data_set!r}: the policy {known}")
    return directory / "sets" / data_set


def read_about(directory: Path, data_set: str | None = None) -> dict[str, Any]:
    """What ``policy.json`` says, of a policy of several data sets for the robot of one of them."""
    directory = described(directory, data_set)
    about = json.loads((directory / "policy.json").read_text())
    if about["format"] not in FORMATS:
        raise ValueError(f"{directory / 'policy.json'}: format {about['format']}, this file reads {FORMATS}")
    return about


def names(about: dict[str, Any]) -> dict[str, Any]:
    """Under which names an observation has its values: those of the run file's section ``serve``, else those of the features."""
    own = {"cameras": [c["name"] for c in about["cameras"]], "prompt": "prompt"}
    own["state"] = [part["name"] for part in parts(about["state"])]
    own["sensor"] = about["sensor"]["name"] if about["sensor"] else None
    return about.get("observation") or own


def parts(feature: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The features that one is made of, side by side, each with ``name`` and ``shape``: itself, if it is one."""
    return feature.get("parts") or [feature] if feature else []


def sinusoids(time: float, device: torch.device) -> Tensor:
    """``[1, 256]``: cosines, then sines, of ``1000 time`` at 128 frequencies from 1 to 1e-4."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float64) / 127)
    angle = 1000 * time * frequencies
    return torch.cat([angle.cos(), angle.sin()]).float()[None].to(device)


class Normalizer:
    """Recorded values to the model's, and back, by one feature's statistics; as LeRobot computes them, in float32."""

    def __init__(self, mode: str, stats: dict[str, list[float]]) -> None:
        ends = {"min_max": ("min", "max"), "min_max_clamped": ("min", "max"), "quantiles": ("q01", "q99"), "quantile10": ("q10", "q90")}
        names = {"identity": None, "mean_std": ("mean", "std"), **ends}[mode]
        self.mode, (first, second) = mode, [np.array(stats[n], np.float32) for n in names] if names else (None, None)
        self.offset, self.scale = first, second
        if mode in ends:
            least = np.float32(0.0 if mode == "min_max_clamped" else 1e-8)
            self.scale = np.where(second == first, least, second - first)

    def apply(self, x: np.ndarray) -> np.ndarray:
        if self.mode == "identity":
            return x
        rows = x.reshape(-1, len(self.offset))  # statistics of channels serve every reading of a window
        if self.mode == "mean_std":
            return ((rows - self.offset) / (self.scale + np.float32(1e-8))).reshape(x.shape)
        if self.mode == "min_max_clamped":
            moves = self.scale != 0
            scaled = 2 * (rows - self.offset) / np.where(moves, self.scale, np.float32(1)) - 1
            return np.where(moves, scaled.clip(-1, 1), np.float32(0)).reshape(x.shape)
        return (2 * (rows - self.offset) / self.scale - 1).reshape(x.shape)

    def invert(self, y: np.ndarray) -> np.ndarray:
        if self.mode == "identity":
            return y
        if self.mode == "mean_std":
            return y * self.scale + self.offset
        if self.mode == "min_max_clamped":
            y = y.clip(-1, 1)
        return (y + 1) / 2 * self.scale + self.offset


def noise(seed: int, request: int, count: int) -> np.ndarray:
    """The standard normal values that sampling starts from, keyed by ``run.seed`` and the request's seed.

    ChaCha with 8 rounds makes 32-bit words; the upper 24 bits of two are a pair of uniform values, which Box and Muller turn into
    a pair of normal ones.
    """
    # seed, step 0, sample, repeat 0, purpose 4.
    key = np.frombuffer(np.array([seed, 0, request % 2**64, 4 << 32], "<u8").tobytes(), "<u4")
    start = np.concatenate([np.frombuffer(b"expand 32-byte k", "<u4"), key, np.zeros(4, "<u4")])
    rounds = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15), (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    words: list[int] = []
    for block in range(-(-2 * ((count + 1) // 2) // 16)):
        x = [int(word) for word in start]
        x[12] = block
        begun = list(x)
        for _ in range(4):
            for a, b, c, d in rounds:
                for to, by, turn, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    x[to] = (x[to] + x[by]) & 0xFFFFFFFF
                    x[turn] ^= x[to]
                    x[turn] = (x[turn] << left | x[turn] >> (32 - left)) & 0xFFFFFFFF
        words += [(now + then) & 0xFFFFFFFF for now, then in zip(x, begun)]
    uniform = (np.array(words[: 2 * ((count + 1) // 2)]) >> 8).astype(np.float64) / 2**24
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[0::2])), 2 * np.pi * uniform[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    return pairs.reshape(-1)[:count].astype(np.float32)


def fitted(image: np.ndarray, rule: str) -> np.ndarray:
    """uint8 ``[h, w, 3]`` as a rule says: ``smart_resize``, ``letterbox 224``, ``crop 2/3``."""
    name, _, rest = rule.partition(" ")
    h, w = image.shape[:2]
    if name == "crop":
        parts, of = map(int, rest.split("/"))
        part_h, part_w = max(1, h * parts // of), max(1, w * parts // of)
        top, left = (h - part_h) // 2, (w - part_w) // 2
        return image[top : top + part_h, left : left + part_w]
    if name == "letterbox":
        side = int(rest)
        ratio = max(w / side, h / side)
        part_h, part_w = (min(side, max(1, int(length / ratio))) for length in (h, w))
        top, left = (side - part_h) // 2, (side - part_w) // 2
        boxed = np.zeros((side, side, 3), np.uint8)
        part = Image.fromarray(image).resize((part_w, part_h), Image.Resampling.BICUBIC)
        boxed[top : top + part_h, left : left + part_w] = np.asarray(part)
        return boxed
    return image


class Images:
    """Camera images to the patches of a Qwen vision tower, as Transformers' slow image processor does it."""

    def __init__(self, base: Path, pixels: tuple[int, int], rule: str = "smart_resize") -> None:
        self.rule = rule
        vision = json.loads((base / "config.json").read_text())["vision_config"]
        self.patch, self.merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
        self.frames, self.pixels = vision.get("temporal_patch_size", 2), pixels
        shared = base / "processor_config.json"
        settings = json.loads(shared.read_text()).get("image_processor") if shared.exists() else None
        settings = settings or json.loads((base / "preprocessor_config.json").read_text())
        self.mean = np.array(settings.get("image_mean") or [0.48145466, 0.4578275, 0.40821073], np.float32)
        self.std = np.array(settings.get("image_std") or [0.26862954, 0.26130258, 0.27577711], np.float32)
        self.factor = settings.get("rescale_factor") or 1 / 255

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size of whole cells within the bounds of pixels, keeping the aspect: ``smart_resize``."""
        cell, (least, most) = self.patch * self.merge, self.pixels
        h, w = round(height / cell) * cell, round(width / cell) * cell
        if h * w > most:
            beta = math.sqrt(height * width / most)
            h, w = (max(cell, math.floor(side / beta / cell) * cell) for side in (height, width))
        elif h * w < least:
            beta = math.sqrt(least / (height * width))
            h, w = (math.ceil(side * beta / cell) * cell for side in (height, width))
        return h, w

    def __call__(self, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """uint8 ``[height, width, 3]`` to ``[patches, channels * frames * patch * patch]`` and the grid ``(1, h, w)``."""
        image = fitted(image, self.rule)
        h, w = self.size(*image.shape[:2])
        resized = np.asarray(Image.fromarray(image).resize((w, h), Image.Resampling.BICUBIC))
        x = ((resized * self.factor).astype(np.float32) - self.mean) / self.std
        p, m, rows, columns = self.patch, self.merge, h // self.patch, w // self.patch
        # (row cell, row in it, y, column cell, column in it, x, channel): patches of one merged cell are neighbours.
        x = x.reshape(rows // m, m, p, columns // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        x = np.repeat(x[:, :, :, :, :, None], self.frames, 5)
        return x.reshape(rows * columns, -1), (1, rows, columns)


class Policy:
    """A trained policy. Made by :meth:`load`."""

    def __init__(
        self, directory: Path, base: Path, device: torch.device, dtype: torch.dtype, data_set: str | None = None
    ) -> None:
        import tokenizers
        import transformers

        self.about = read_about(directory, data_set)
        self.names = names(self.about)
        stats = json.loads((described(directory, data_set) / "stats.json").read_text())
        features = [self.about[kind] for kind in ("state", "sensor", "action") if self.about[kind]]
        self.normalizers = {f["name"]: Normalizer(f["normalization"], stats.get(f["name"], {})) for f in features}
        self.device, self.count = device, 0
        self.images = Images(base, self.about["pixels"], self.about.get("resize", "smart_resize"))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        model = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=dtype, attn_implementation="sdpa")
        if (directory / "base.safetensors").exists():
            unknown = model.load_state_dict(load_file(directory / "base.safetensors"), strict=False).unexpected_keys
            if unknown:
                raise ValueError(f"{directory / 'base.safetensors'}: {unknown[0]} is not part of {base}; name the model that was trained")
        if (directory / "adapter").exists():
            import peft

            model = peft.PeftModel.from_pretrained(model, directory / "adapter").base_model.model
        self.model, self.config = model.model.to(device).eval(), model.config
        expert = Weights(directory / "expert.safetensors", device)
        self.expert = Expert(expert, self.about["flow"]["heads"], self.about["horizon"])
        self.sensor = Sensor(Weights(directory / "sensor.safetensors", device)) if self.about["sensor"] else None

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        base_model: str | os.PathLike[str] | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        data_set: str | None = None,
    ) -> Policy:
        """Loads what a run, or ``cox export``, has left in ``directory``.

        ``base_model`` is the pretrained model's directory; by default where the run had it. ``dtype`` is that of the pretrained
        weights; the expert is float32. ``data_set`` names the one whose robot it acts on, if it was trained on several.
        """
        directory = Path(directory)
        base = base_model or read_about(directory, data_set)["base_model"]
        if "://" in str(base):
            raise ValueError(f"base_model: {base} is an address, and weights are read from a directory: name one that has the model")
        return cls(directory, Path(base), torch.device(device), dtype, data_set)

    def infer(self, observation: dict[str, Any]) -> dict[str, np.ndarray]:
        """One observation to ``{"actions": [h, a]}``; the method of openpi's policies."""
        return {"actions": self.sample([observation])[0]}

    def reset(self) -> None:
        """Draws for what comes as for a new client of ``cox serve``."""
        self.count = 0

    @torch.inference_mode()
    def sample(self, observations: list[dict[str, Any]]) -> np.ndarray:
        """Actions ``[b, h, a]`` in the data set's units. Observations have the keys that ``cox serve`` wants."""
        chunk = (self.about["horizon"], *self.about["action"]["shape"])
        flow, begun = self.about["flow"], []
        for observation in observations:
            seed = int(observation.get("seed", self.count))
            drawn = observation.get("noise")
            wide = (chunk[0], self.padded("action"))
            drawn = noise(flow["seed"], seed, math.prod(wide)).reshape(wide)[:, : chunk[-1]] if drawn is None else drawn
            begun.append(np.asarray(drawn).reshape(chunk))
            self.count += 1
        seen = self.see(observations)
        x = torch.tensor(np.stack(begun), dtype=torch.float32, device=self.device)
        own = chunk[-1]  # what follows is padding to the widest action of several data sets, and stays 0
        x = F.pad(x, (0, self.padded("action") - own))
        steps, from_noise_at_zero = flow["sampling_steps"], flow["convention"] == "noise_at_zero"
        for step in range(steps):
            time = step / steps if from_noise_at_zero else 1 - step / steps
            velocity = self.expert.velocity(x, time, seen)
            velocity[..., own:] = 0
            x = x + velocity / steps if from_noise_at_zero else x - velocity / steps
        return self.normalizers[self.about["action"]["name"]].invert(x[..., :own].cpu().numpy()) + self.offsets(observations)

    def offsets(self, observations: list[dict[str, Any]]) -> np.ndarray | float:
        """What is added to every action of a chunk, ``[b, 1, a]``: the state where an action is its difference from it."""
        mask = self.about.get("delta_actions", [])
        if not mask:
            return 0.0
        state = self.recorded("state", observations)[:, -1]
        offsets = np.zeros((len(observations), 1, *self.about["action"]["shape"]), np.float32)
        for dimension in np.flatnonzero(mask):
            offsets[:, 0, dimension] = state[:, dimension]
        return offsets

    @property
    def frames(self) -> int:
        """Frames of an observation: images and state have an axis of them in front, if there are several."""
        return len(self.about.get("history", [])) + 1

    def padded(self, kind: str) -> int:
        """How many values the model has for ``state`` of a frame, or ``action``."""
        own = math.prod(self.about[kind]["shape"]) if self.about[kind] else 0
        return self.about["padded"][kind] if self.about.get("padded") else own

    def see(self, observations: list[dict[str, Any]]) -> Seen:
        """What the expert attends to for these observations: one pass of the vision-language model."""
        pixels, grids, prompts = [], [], []
        for observation in observations:
            cells = []
            for frame in range(self.frames):
                for camera, name in zip(self.about["cameras"], self.names["cameras"]):
                    image = np.asarray(observation[name], np.uint8).reshape(self.frames, -1, *np.shape(observation[name])[-2:])[frame]
                    # Channels may come first, as PyTorch has them.
                    channels_first = image.shape == (3, camera["height"], camera["width"])
                    patches, grid = self.images(image.transpose(1, 2, 0) if channels_first else image)
                    pixels.append(patches)
                    grids.append(grid)
                    cells.append(math.prod(grid) // self.images.merge**2)
            prompts.append(self.tokens(observation[self.names["prompt"]], cells))
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attended[row, longest - len(prompt) :] = 1
        ids, attended = ids.to(self.device), attended.to(self.device)
        images = {}
        if pixels:
            values = torch.from_numpy(np.concatenate(pixels)).to(self.device, self.model.dtype)
            images = {"pixel_values": values, "image_grid_thw": torch.tensor(grids, device=self.device)}
        # Transformers 5 tells images from text by the types of tokens; without them positions would be those of text.
        types = (ids == self.config.image_token_id).int()
        hidden = self.model(input_ids=ids, attention_mask=attended, mm_token_type_ids=types, use_cache=False, **images)
        sensor = self.sensor(self.numbers("sensor", observations)) if self.sensor else None
        state = None
        if self.about["state"]:
            state = self.numbers("state", observations)  # [b, frames, size]
            state = F.pad(state, (0, self.padded("state") - state.shape[-1])).flatten(1)
        elif self.about.get("padded"):
            state = torch.zeros(len(observations), self.frames * self.padded("state"), device=self.device)
        return Seen(hidden.last_hidden_state.float(), attended, state, sensor)

    def tokens(self, instruction: str, cells: list[int]) -> list[int]:
        """The prompt's token ids, with each image's placeholder once for every token of the image."""
        text = self.about["prompt"].replace("{task}", instruction)
        image, left = self.config.image_token_id, iter(cells)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if most := self.about.get("max_text_tokens"):
            # The text lies between the last image and the turn's end, special tokens across which no token reaches.
            before, behind = text.rindex("<|vision_end|>") + len("<|vision_end|>"), text.rindex("<|im_end|>")
            first = len(self.tokenizer.encode(text[:before], add_special_tokens=False).ids)
            last = len(ids) - len(self.tokenizer.encode(text[behind:], add_special_tokens=False).ids)
            ids = ids[: min(first + most, last)] + ids[last:]
        return [token for token in ids for _ in range(next(left) if token == image else 1)]

    def recorded(self, kind: str, observations: list[dict[str, Any]]) -> np.ndarray:
        """A feature of all observations, as they have it: of the state ``[b, frames, *shape]``, of the sensor ``[b, *shape]``."""
        feature, given = self.about[kind], self.names[kind]
        given = [given] if isinstance(given, str) else given
        frames = [self.frames] if kind == "state" else []

        def side_by_side(observation: dict[str, Any]) -> np.ndarray:
            values = [np.asarray(observation[name], np.float32).reshape(*frames, -1) for name in given]
            return np.concatenate(values, -1).reshape(*frames, *feature["shape"])

        return np.stack([side_by_side(o) for o in observations])

    def numbers(self, kind: str, observations: list[dict[str, Any]]) -> Tensor:
        """A feature of all observations, normalised: of the state ``[b, frames, size]``, of the sensor ``[b, window, channels]``."""
        values = self.normalizers[self.about[kind]["name"]].apply(self.recorded(kind, observations))
        if kind == "sensor" and values.ndim == 2:
            values = values[:, None]
        return torch.from_numpy(values).float().to(self.device)
