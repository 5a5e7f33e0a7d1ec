"""The loader in PyTorch against fixtures that know nothing of it, where PyTorch is."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

try:
    import coxswain_policy
    import numpy as np
    import torch
    from safetensors import safe_open
except ImportError as missing:
    raise unittest.SkipTest(f"skipped: coxswain_policy: {missing}") from None

FIXTURES = Path(__file__).parents[3] / "integration-tests/fixtures"


def fixture(name: str) -> tuple[dict[str, int], dict[str, torch.Tensor], coxswain_policy.Weights]:
    with safe_open(FIXTURES / f"expert/{name}.safetensors", "pt") as file:
        sizes = {key: int(value) for key, value in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    weights = coxswain_policy.Weights.__new__(coxswain_policy.Weights)
    weights.tensors = {key.removeprefix("param."): value for key, value in tensors.items() if key.startswith("param.")}
    return sizes, tensors, weights


class Definition(unittest.TestCase):
    def test_expert_and_sensor_are_those_of_the_definition(self) -> None:
        for name in ("plain", "repeated-sensor-padded", "of-the-field"):
            sizes, tensors, weights = fixture(name)
            expert = coxswain_policy.Expert(weights, sizes["heads"], sizes["horizon"])
            self.assertEqual(expert.layers, sizes["layers"])
            sensor = None
            if sizes["window"]:
                sensor = coxswain_policy.Sensor(weights)(tensors["in.window"])
                torch.testing.assert_close(sensor, tensors["out.sensor"], rtol=1e-5, atol=1e-5)
            begin, end = tensors["in.valid"].T
            at = torch.arange(sizes["seq"])
            attended = (at >= begin[:, None]) & (at < end[:, None])
            for draw, time in enumerate(tensors["in.times"]):
                row = slice(draw // sizes["repeats"], draw // sizes["repeats"] + 1)
                own = sensor[row] if sensor is not None else None
                seen = coxswain_policy.Seen(tensors["in.hidden"][row], attended[row], tensors["in.state"][row], own)
                velocity = expert.velocity(tensors["in.noisy"][draw : draw + 1], float(time), seen)
                torch.testing.assert_close(velocity[0], tensors["out.velocity"][draw], rtol=1e-4, atol=1e-4)

    def test_normalisation_is_undone(self) -> None:
        stats = {"mean": [1.0, -2.0], "std": [2.0, 0.5], "min": [-1.0, 3.0], "max": [4.0, 3.0], "q01": [0.0, 0.0], "q99": [1.0, 2.0]}
        stats |= {"q10": [0.5, 0.0], "q90": [0.75, 1.0]}
        values = np.array([[0.5, 3.0], [2.0, 3.0]], np.float32)
        for mode in ("identity", "mean_std", "min_max", "min_max_clamped", "quantiles", "quantile10"):
            normalizer = coxswain_policy.Normalizer(mode, stats)
            np.testing.assert_allclose(normalizer.invert(normalizer.apply(values)), values, rtol=1e-5)
        window = np.zeros((1, 3, 2), np.float32)
        self.assertEqual(coxswain_policy.Normalizer("mean_std", stats).apply(window).shape, window.shape)

    def test_values_are_found_under_the_names_that_the_policy_tells(self) -> None:
        state = {"name": "observation.state", "shape": [3], "normalization": "identity"}
        about = {"cameras": [{"name": "front"}], "state": state, "sensor": None}
        own = {"cameras": ["front"], "state": ["observation.state"], "sensor": None, "prompt": "prompt"}
        self.assertEqual(coxswain_policy.names(about), own)
        told = {**own, "state": ["joints", "gripper"]}
        policy = coxswain_policy.Policy.__new__(coxswain_policy.Policy)
        policy.about, policy.names = about, coxswain_policy.names({**about, "observation": told})
        policy.normalizers, policy.device = {"observation.state": coxswain_policy.Normalizer("identity", {})}, torch.device("cpu")
        seen = policy.numbers("state", [{"joints": np.array([1.0, 2.0]), "gripper": 3.0}])
        self.assertEqual(seen.tolist(), [[[1.0, 2.0, 3.0]]])

    def test_features_side_by_side_and_past_frames_are_one_state(self) -> None:
        parts = [{"name": "arm", "shape": [2]}, {"name": "gripper", "shape": [1]}]
        state = {"name": "arm + gripper", "shape": [3], "normalization": "mean_std", "parts": parts}
        about = {"cameras": [], "state": state, "sensor": None, "action": {"shape": [2]}, "history": [-2], "delta_actions": [False, True]}
        policy = coxswain_policy.Policy.__new__(coxswain_policy.Policy)
        policy.about, policy.names, policy.device = about, coxswain_policy.names(about), torch.device("cpu")
        stats = {"mean": [0.0, 1.0, 2.0], "std": [1.0, 1.0, 2.0]}
        policy.normalizers = {"arm + gripper": coxswain_policy.Normalizer("mean_std", stats)}
        seen = [{"arm": np.array([[1.0, 2.0], [3.0, 4.0]]), "gripper": np.array([[4.0], [6.0]])}]
        self.assertEqual(policy.names["state"], ["arm", "gripper"])
        self.assertEqual(policy.numbers("state", seen).tolist(), [[[1.0, 1.0, 1.0], [3.0, 3.0, 2.0]]])
        self.assertEqual(policy.offsets(seen).tolist(), [[[0.0, 4.0]]])
        self.assertEqual(coxswain_policy.names({**about, "state": None})["state"], [])

    def test_differences_are_added_to_the_state(self) -> None:
        state = {"name": "observation.state", "shape": [3], "normalization": "identity"}
        about = {"cameras": [], "state": state, "sensor": None, "action": {"shape": [4]}, "delta_actions": [True, False, True]}
        policy = coxswain_policy.Policy.__new__(coxswain_policy.Policy)
        policy.about, policy.names = about, coxswain_policy.names(about)
        seen = [{"observation.state": np.array([1.0, 2.0, 3.0])}, {"observation.state": np.array([4.0, 5.0, 6.0])}]
        self.assertEqual(policy.offsets(seen).tolist(), [[[1.0, 0.0, 3.0, 0.0]], [[4.0, 0.0, 6.0, 0.0]]])
        policy.about = {**about, "delta_actions": []}
        self.assertEqual(policy.offsets(seen), 0.0)

    def test_images_are_fitted_as_the_rule_says(self) -> None:
        image = np.arange(9 * 12 * 3, dtype=np.uint8).reshape(9, 12, 3)
        self.assertIs(coxswain_policy.fitted(image, "smart_resize"), image)
        np.testing.assert_array_equal(coxswain_policy.fitted(image, "crop 2/3"), image[1:7, 2:10])
        boxed = coxswain_policy.fitted(np.full((30, 40, 3), 200, np.uint8), "letterbox 20")
        self.assertEqual(boxed.shape, (20, 20, 3))
        self.assertEqual(np.flatnonzero(boxed[:, 0, 0]).tolist(), list(range(2, 17)))

    def test_a_policy_of_several_data_sets_is_that_of_the_one_that_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as there:
            run = Path(there)
            self.assertEqual(coxswain_policy.described(run, None), run)
            with self.assertRaisesRegex(ValueError, "is of one data set"):
                coxswain_policy.described(run, "lab")
            for name in ("lab", "field"):
                (run / "sets" / name).mkdir(parents=True)
                (run / "sets" / name / "policy.json").write_text(json.dumps({"format": 1, "base_model": name}))
            self.assertEqual(coxswain_policy.read_about(run, "field")["base_model"], "field")
            for missing in (None, "attic"):
                with self.assertRaisesRegex(ValueError, "has field, lab"):
                    coxswain_policy.read_about(run, missing)

    def test_noise_is_normal_and_keyed(self) -> None:
        drawn = coxswain_policy.noise(7, 3, 10_001)
        self.assertEqual(drawn.shape, (10_001,))
        self.assertLess(abs(drawn.mean()), 0.05)
        self.assertLess(abs(drawn.std() - 1), 0.05)
        np.testing.assert_array_equal(drawn[:64], coxswain_policy.noise(7, 3, 64))
        self.assertFalse(np.array_equal(drawn[:8], coxswain_policy.noise(7, 4, 8)))
        self.assertFalse(np.array_equal(drawn[:8], coxswain_policy.noise(8, 3, 8)))


if __name__ == "__main__":
    unittest.main()
