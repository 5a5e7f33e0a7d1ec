"""Published benchmarks of other trainers, as run files beside this one: what they said of one H100, and data of their shape."""
import dataclasses
import json
import pathlib
import random

WORDS = "red blue green square circle triangle above below left right of the a picture shows".split()


@dataclasses.dataclass
class Target:
    """Tokens a second of somebody else's, and the peak of memory where that is published, too."""
    name: str
    like: str
    model_bytes: int
    tokens: int
    sequences: int
    published: float
    published_gib: float | None = None
    steps: int = 10

    @property
    def config(self):
        return f"worker/cuda/gpu/targets/{self.name}.yaml"

    def small(self):
        """For rehearsals."""
        return dataclasses.replace(self, tokens=64, sequences=min(2, self.sequences), steps=3)

    def keys(self, model, data):
        return [f"model.path={model}", f"data.path={data}", f"data.max_tokens={self.tokens}", f"train.global_batch={self.sequences}",
                f"train.steps={self.steps}"]

    def write_chats(self, path):
        """Chats without pictures, each longer than a sequence, which loses its end: all tokens count."""
        draws = random.Random(0)
        with open(path, "w") as file:
            for _ in range(2 * self.sequences):
                answer = " ".join(draws.choice(WORDS) for _ in range(self.tokens))
                turns = [dict(role="user", content="Write."), dict(role="assistant", content=answer)]
                print(json.dumps(dict(messages=turns)), file=file)

    def in_words(self, ms, peak):
        speed = self.tokens * self.sequences / ms * 1e3
        gib = f"{peak / 2**30:.1f} GiB by the driver" + (f", {self.published_gib} published" if self.published_gib else "")
        return f"{speed:.0f} tokens/s, {speed / self.published:.2f} of the published {self.published:.0f}; {ms:.0f} ms a step; {gib}"


TARGETS = [
    Target("nemo", "configs/assets/qwen2.5-vl-7b", 18 << 30, 4096, 32, 14110),
    Target("prime-rl", "configs/assets/qwen3-vl-4b", 10 << 30, 16384, 1, 6230, 23.3),
]
