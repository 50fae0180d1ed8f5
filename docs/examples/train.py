"""Train a small classifier that may be interrupted at any moment and always ends with the same weights.

    python train.py                          # here
    makeway submit --profile gpu1 train.py

Everything that the next step depends on is in the checkpoint: weights, momentum, and the random generator.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import pickle
import random
import time
from pathlib import Path

from makeway import checkpoint

SIZE = 16


class Training:
    """Logistic regression by gradient descent with momentum, on examples drawn as it goes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = [0.0] * SIZE
        self.momentum = [0.0] * SIZE

    def step(self, batch: int = 8) -> float:
        """Draw a batch, and go a little way down its gradient; return the mean loss."""
        loss = 0.0
        for _ in range(batch):
            x = [self.random.gauss(0.0, 1.0) for _ in range(SIZE)]
            wanted = 1.0 if sum(x[: SIZE // 2]) > 0 else 0.0
            guess = 1.0 / (1.0 + math.exp(-sum(w * v for w, v in zip(self.weights, x, strict=True))))
            for place, value in enumerate(x):
                self.momentum[place] = 0.9 * self.momentum[place] + (guess - wanted) * value
                self.weights[place] -= 0.01 * self.momentum[place]
            loss -= math.log(max(guess if wanted else 1.0 - guess, 1e-9)) / batch
        return loss

    def save(self, folder: Path) -> None:
        """Write the whole state."""
        state = (self.weights, self.momentum, self.random.getstate())
        (folder / "state.pkl").write_bytes(pickle.dumps(state))

    def load(self, folder: Path) -> None:
        """Read it back."""
        self.weights, self.momentum, generator = pickle.loads((folder / "state.pkl").read_bytes())
        self.random.setstate(generator)

    def fingerprint(self) -> str:
        """Return a digest of the weights: equal only if every bit is."""
        return hashlib.sha256(pickle.dumps(self.weights)).hexdigest()[:16]


def main() -> None:
    """Train for `--steps` steps, each at least `--seconds` long, with a checkpoint after every `--every`."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=0.02)
    options.add_argument("--every", type=int, default=50)
    options.add_argument("--seed", type=int, default=7)
    given = options.parse_args()
    training = Training(given.seed)
    newest = checkpoint.latest()
    print(f"going on at step {checkpoint.step_of(newest)} of {given.steps}" if newest else "starting from scratch")
    for step in checkpoint.loop(given.steps, save=training.save, load=training.load, every=given.every):
        checkpoint.report(loss=training.step())
        time.sleep(given.seconds)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}")
    print(f"weights {training.fingerprint()}")


if __name__ == "__main__":
    main()
