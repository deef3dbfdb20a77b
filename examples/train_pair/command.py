"""Command line of the training script."""

import argparse
from pathlib import Path

import train_pair

from .export import export
from .model import SIZES
from .text import write_prompts
from .training import evaluate, train


def main():
    parser = argparse.ArgumentParser(description=train_pair.__doc__.split("\n")[0])
    parser.add_argument("what", choices=["target", "draft", "export", "eval", "prompts"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--rows-factor", type=int, default=1, help="multiplies the rows of a batch, for a GPU"
    )
    parser.add_argument(
        "--micro-tokens", type=int, help="tokens of a micro-batch; default: whole batches"
    )
    parser.add_argument("--more-text", type=Path, help="folder with further Python sources")
    parser.add_argument("--work", type=Path, default=Path("build"), help="state between runs")
    parser.add_argument("--out", type=Path, help="where export and prompts write")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--resume", action="store_true", help="continue from the saved state")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate of matrices; others have a fifth"
    )
    parser.add_argument(
        "--decay-from",
        type=float,
        default=0.4,
        help="share of the time after which the learning rate falls",
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what in SIZES["small"]:
        train(args.what, args)
    elif args.what == "export":
        export(args.work, args.out or Path("models"))
    elif args.what == "eval":
        evaluate(args.work)
    else:
        write_prompts(args.out or Path("prompts"))
