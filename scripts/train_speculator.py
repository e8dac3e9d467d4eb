"""Trains drafting heads for a target from text that the target writes itself.

    python -m scripts.train_speculator --method medusa --output speculators/medusa
    python -m scripts.train_speculator --method eagle3 --model path/to/model --output speculators/eagle3
    python -m serve --speculative-config '{"method": "medusa", "model": "speculators/medusa"}'

Three stages, each kept in the --work folder: the text and the features are made once for both methods, and whatever was
interrupted goes on where it was. At the end: how often drafts are accepted, on text that was not trained on.
"""

import argparse
import math
import sys
from pathlib import Path

from checkpoints.errors import CheckpointError
from serving.errors import PageloomError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_speculator", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", choices=("medusa", "eagle3"), required=True)
    add("--model", default="", help="the target, as for python -m serve; default: the default model")
    add("--output", type=Path, required=True, help="the folder to write; an older one of this program is replaced")
    add("--work", type=Path, help="text, features, checkpoints; default: the target's folder in ~/.cache/pageloom")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the target, and of products")
    add("--prompts", type=Path, help="what the target is asked, one prompt a line; default: built-in ones")
    add("--text-tokens", type=_positive, default=300_000, help="tokens that the target writes (default 300000)")
    add("--max-tokens", type=_positive, default=256, help="of an answer (default 256)")
    add("--num-speculative-tokens", type=_positive, default=4, help="drafts a step to train for (default 4)")
    add("--draft-vocab-size", type=_positive, default=4096,
        help="most frequent tokens: those that EAGLE-3 drafts, those that Medusa heads learn from (default 4096)")
    add("--intermediate-size", type=_positive, default=512, help="of EAGLE-3's MLP (default 512)")
    add("--epochs", type=_positive, default=6, help="passes over the text (default 6)")
    add("--batch-size", type=_positive, default=4, help="sequences a step (default 4)")
    add("--learning-rate", type=_rate, default=1e-3, help="the highest; it rises and falls (default 0.001)")
    add("--float8", action="store_true", help="store matrices in 8 bits where that changes them little: half the file")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number over 0")
    return value


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from scripts.speculator_training.run import Refused, run  # after --help: it loads jax
    from scripts.speculator_training.text import TextError

    try:
        run(options)
    except (PageloomError, CheckpointError, Refused, TextError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
