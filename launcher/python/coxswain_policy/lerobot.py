"""The same policy in LeRobot's programs: a policy plugin of type ``coxswain`` (LeRobot 0.6).

    coxswain_policy.lerobot.add_files("runs/my")                  # in Python: the JSON files by which LeRobot knows it
    lerobot-eval --plugin.discover_packages_path=coxswain_policy --policy.path=runs/my --env.type=...

It acts, and does not train: that is what ``cox run`` is for. Observations come as LeRobot's programs make them, images as floats
``[b, 3, h, w]`` from 0 to 1, under the names of the features that the policy was trained on; ``rename_map`` is LeRobot's way to map
others. Statistics are applied by the policy itself, so that LeRobot's normalisation leaves all values as they are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import make_default_pre_post_processors
from torch import Tensor

import coxswain_policy

# As LeRobot names an action, whatever the data set's feature was called.
ACTION = "action"


@PreTrainedConfig.register_subclass("coxswain")
@dataclass
class CoxswainConfig(PreTrainedConfig):
    """What LeRobot asks of a policy's configuration; what the policy is stands in ``policy.json``."""

    # The pretrained model's directory; where the run had it if absent.
    base_model: str | None = None
    # The data set whose robot it acts on, of a policy that was trained on several.
    data_set: str | None = None
    # Actions of a chunk that are carried out before the policy looks again; all of them if absent.
    n_action_steps: int | None = None
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {kind: NormalizationMode.IDENTITY for kind in ("VISUAL", "STATE", "ACTION")}
    )

    @classmethod
    def of(cls, about: dict[str, Any], **others: Any) -> CoxswainConfig:
        """The configuration for what ``policy.json`` says."""
        features = {c["name"]: PolicyFeature(FeatureType.VISUAL, (3, c["height"], c["width"])) for c in about["cameras"]}
        for feature in [*coxswain_policy.parts(about["state"]), *coxswain_policy.parts(about["sensor"])]:
            features[feature["name"]] = PolicyFeature(FeatureType.STATE, tuple(feature["shape"]))
        actions = {ACTION: PolicyFeature(FeatureType.ACTION, tuple(about["action"]["shape"]))}
        return cls(input_features=features, output_features=actions, push_to_hub=False, **others)

    observation_delta_indices = None
    action_delta_indices = None
    reward_delta_indices = None

    def validate_features(self) -> None:
        pass

    def get_optimizer_preset(self) -> Any:
        raise NotImplementedError("policies of Coxswain are trained with `cox run`")

    def get_scheduler_preset(self) -> None:
        return None


class CoxswainPolicy(PreTrainedPolicy):
    """:class:`coxswain_policy.Policy` with LeRobot's methods. Made by :meth:`from_pretrained`."""

    config_class = CoxswainConfig
    name = "coxswain"

    def __init__(self, config: CoxswainConfig, **_: Any) -> None:
        super().__init__(config)
        if config.pretrained_path is None:
            raise ValueError("--policy.path: name the directory of a run, or what `cox export` has written")
        self.policy = coxswain_policy.Policy.load(
            config.pretrained_path, config.base_model, device=config.device, data_set=config.data_set
        )
        if self.policy.frames > 1:
            raise ValueError("policies with `observation.history` are served by `cox serve`; LeRobot's programs give them one frame")
        sensor = self.policy.about["sensor"] or {}
        if sensor.get("rows"):
            window = f"a window of {sensor['rows']} rows of `{sensor['name']}` (`data.sensor: {{key, window}}`)"
            raise ValueError(f"policies with {window} are served by `cox serve`; LeRobot's programs give them one row")
        # LeRobot's programs know the names of features, whatever those on the wire are.
        self.policy.names = coxswain_policy.names({**self.policy.about, "observation": None})
        self.reset()

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, *, config: CoxswainConfig | None = None, **others: Any) -> CoxswainPolicy:
        config = config or PreTrainedConfig.from_pretrained(pretrained_name_or_path)
        config.pretrained_path = Path(pretrained_name_or_path)
        return cls(config, **others).eval()

    def reset(self) -> None:
        self.policy.reset()
        self.ahead: deque[Tensor] = deque()

    def select_action(self, batch: dict[str, Any], **others: Any) -> Tensor:
        """The next action of each observation, ``[b, a]``; looks when those of the last chunk are used up."""
        if not self.ahead:
            chunk = self.predict_action_chunk(batch, **others)
            self.ahead.extend(chunk[:, : self.config.n_action_steps].unbind(1))
        return self.ahead.popleft()

    def predict_action_chunk(self, batch: dict[str, Any], noise: Tensor | None = None) -> Tensor:
        """A chunk for each observation, ``[b, h, a]``, in the data set's units."""
        about, task = self.policy.about, batch["task"]
        numbers = [part["name"] for kind in ("state", "sensor") for part in coxswain_policy.parts(about[kind])]
        missing = [name for name in [*numbers, *(camera["name"] for camera in about["cameras"])] if name not in batch]
        if missing:
            raise KeyError(f"{missing[0]}: not in the observation, which has {sorted(batch)}; LeRobot's rename_map maps names")
        first, observations = batch[about["cameras"][0]["name"]], []
        for at in range(len(first)):
            seen: dict[str, Any] = {"prompt": task if isinstance(task, str) else task[at]}
            seen |= {camera["name"]: pixels(batch[camera["name"]][at]) for camera in about["cameras"]}
            seen |= {name: batch[name][at].float().cpu().numpy() for name in numbers}
            if noise is not None:
                seen["noise"] = noise[at].float().cpu().numpy()
            observations.append(seen)
        return torch.from_numpy(self.policy.sample(observations)).to(first.device)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any] | None]:
        raise NotImplementedError("policies of Coxswain are trained with `cox run`")

    def get_optim_params(self) -> dict[str, Any]:
        raise NotImplementedError("policies of Coxswain are trained with `cox run`")


def pixels(image: Tensor) -> np.ndarray:
    """A float image ``[3, h, w]`` from 0 to 1, or one of bytes, as uint8 ``[h, w, 3]``."""
    if image.dtype != torch.uint8:
        image = (image * 255).round().clamp(0, 255).to(torch.uint8)
    return image.permute(1, 2, 0).cpu().numpy()


def make_coxswain_pre_post_processors(config: CoxswainConfig, dataset_stats: Any = None) -> Any:
    """LeRobot's own steps: names, batches, devices."""
    return make_default_pre_post_processors(config, dataset_stats)


def add_files(directory: str | Path, data_set: str | None = None) -> None:
    """Writes ``config.json`` and LeRobot's two pipelines beside what a run has left; of several data sets, for ``data_set``."""
    config = CoxswainConfig.of(coxswain_policy.read_about(Path(directory), data_set), data_set=data_set)
    config.save_pretrained(directory)
    for pipeline in make_coxswain_pre_post_processors(config):
        pipeline.save_pretrained(directory)
