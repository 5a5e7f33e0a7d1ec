"""The module against a `cox` that says what it is told to, and against the real one where there is one."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import coxswain
from coxswain import _cox, examples

GPU = {"index": 0, "name": "NVIDIA H200", "total": 100, "used": 10, "free": 90, "processes": []}


class Told(unittest.TestCase):
    """Each test writes its own `cox`, a shell script that notes what it was asked."""

    def setUp(self) -> None:
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = Path(kept.name)
        patch = mock.patch.dict(os.environ, COX_BINARY=str(self.dir / "cox"))
        patch.start()
        self.addCleanup(patch.stop)

    def cox(self, *printed: Any, message: str = "", code: int = 0) -> None:
        """A command that prints these values one a line, says this on standard error, and ends so."""
        lines = "".join(json.dumps(value) + "\n" for value in printed)
        (self.dir / "out").write_text(lines)
        (self.dir / "err").write_text(message)
        script = self.dir / "cox"
        asked = f'printf "%s\\n" "$@" > {self.dir}/asked'
        script.write_text(f"#!/bin/sh\n{asked}\ncat {self.dir}/out\ncat {self.dir}/err >&2\nexit {code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def asked(self) -> list[str]:
        words = (self.dir / "asked").read_text().splitlines()
        return [word for word in words if not word.startswith("--log")]

    def test_gpus_are_listed_as_the_driver_describes_them(self) -> None:
        self.cox([GPU])
        self.assertEqual(coxswain.gpu_info()[0]["free"], 90)
        self.assertEqual(self.asked(), ["gpu", "--json"])

    def test_a_refusal_is_one_exception_with_the_commands_words_and_exit_code(self) -> None:
        self.cox(message="error: no NVIDIA driver on this machine:\n  install one\n", code=3)
        with self.assertRaises(coxswain.CoxError) as caught:
            coxswain.gpu_info()
        self.assertEqual(str(caught.exception), "no NVIDIA driver on this machine:\n  install one")
        self.assertEqual(caught.exception.exit_code, 3)

    def test_a_command_that_cannot_be_run_is_the_same_exception(self) -> None:
        with self.assertRaisesRegex(coxswain.CoxError, "cannot be run"):
            coxswain.status()

    def test_a_plan_that_does_not_fit_is_returned(self) -> None:
        self.cox({"memories": []}, message="error: does not fit\n", code=5)
        self.assertEqual(coxswain.plan("a.yaml", "lora.rank=4", gpus=["24GiB"], world=2), {"memories": []})
        self.assertEqual(self.asked()[:3], ["plan", "a.yaml", "lora.rank=4"])
        self.assertIn("--world=2", self.asked())

    def test_the_gpu_that_holds_least_decides(self) -> None:
        def memory(name: str, maximum: int | None) -> dict[str, Any]:
            fit = {"maximum": maximum, "recommended": None, "safe": None}
            return {
                "memory": {"name": name},
                "fit": fit,
                "current": {"micro_batch": 4},
                "verdict": "too_large" if maximum is None else "tight",
            }

        self.cox({"memories": [memory("large", 8), memory("small", None), memory("other", 4)]})
        found = coxswain.recommend_batch_size("a.yaml")
        expected = coxswain.BatchSizes(
            maximum=None, recommended=None, safe=None, current=4, verdict="too_large", memory="small"
        )
        self.assertEqual(found, expected)

    def test_peaks_hold_until_they_are_reset(self) -> None:
        self.cox(*([{**GPU, "used": used}] for used in (10, 70, 20, 30)))
        peaks = []
        with coxswain.monitor(0.5) as readings:
            for gpus in readings:
                peaks.append(gpus[0]["peak"])
                if len(peaks) == 3:
                    readings.reset_peaks()
        self.assertEqual(peaks, [10, 70, 70, 30])
        self.assertIn("--interval=0.5", self.asked())

    def test_a_run_is_followed_to_its_end_and_its_failure_is_raised(self) -> None:
        self.cox({"step": {"step": 0}}, {"phase": {"phase": "failed"}}, code=5)
        events = []
        with self.assertRaises(coxswain.CoxError) as caught:
            for event in coxswain.watch("runs/a"):
                events.append(event)
        self.assertEqual((len(events), caught.exception.exit_code), (2, 5))
        self.assertEqual(self.asked(), ["watch", "--json", "--run=runs/a"])

    def test_closing_the_readings_ends_the_command(self) -> None:
        script = self.dir / "cox"
        script.write_text(f"#!/bin/sh\necho $$ > {self.dir}/pid\necho '[]'\nexec sleep 600\n")
        script.chmod(0o755)
        readings = coxswain.monitor()
        self.assertEqual(next(iter(readings)), [])
        readings.close()
        with self.assertRaises(ProcessLookupError):
            os.kill(int((self.dir / "pid").read_text()), 0)

    def test_examples_are_written_once(self) -> None:
        written = examples.write(self.dir)
        self.assertTrue((written / "quickstart.yaml").is_file())
        self.assertTrue((written / "assets/tiny-vla/config.json").is_file())
        with self.assertRaises(FileExistsError):
            examples.write(self.dir)


def real() -> bool:
    """Whether there is a command to ask."""
    try:
        return Path(_cox.binary()).is_file()
    except coxswain.CoxError:
        return False


@unittest.skipUnless(real(), "no `cox` command: install the wheel, or name the file in COX_BINARY")
class Real(unittest.TestCase):
    """The installed command, asked about the quickstart."""

    def setUp(self) -> None:
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        # Paths in a run file are taken from the working directory.
        os.chdir(kept.name)
        examples.write()

    def test_the_quickstart_is_planned_for_a_gpu_of_a_name(self) -> None:
        answer = coxswain.plan("configs/quickstart.yaml", "train.micro_batch=1", gpus=["24GiB", "A100-40"])
        self.assertEqual([memory["memory"]["total"] >> 30 for memory in answer["memories"]], [24, 40])
        self.assertEqual(answer["micro_batch"], 1)

    def test_batch_sizes_are_recommended_here_and_elsewhere(self) -> None:
        there = coxswain.recommend_batch_size("configs/quickstart.yaml", gpu="24GiB", world=1)
        self.assertEqual((there.maximum, there.current, there.verdict), (8, 2, "safe"))
        nowhere = coxswain.recommend_batch_size("configs/quickstart.yaml", gpu="1MiB")
        self.assertEqual((nowhere.maximum, nowhere.verdict), (None, "too_large"))

    def test_what_is_wrong_is_reported_in_the_commands_words(self) -> None:
        with self.assertRaisesRegex(coxswain.CoxError, "lora.rnk") as caught:
            coxswain.plan("configs/quickstart.yaml", "lora.rnk=4")
        self.assertEqual(caught.exception.exit_code, 2)
        with self.assertRaisesRegex(coxswain.CoxError, "no run is active"):
            coxswain.status()
        with self.assertRaisesRegex(coxswain.CoxError, "no run is active"):
            list(coxswain.watch())


if __name__ == "__main__":
    unittest.main()
