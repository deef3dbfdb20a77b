"""Command line of the training script."""

import argparse
from pathlib import Path

import torch

import train_head

from .corpus import write_answers, write_documents
from .states import write_states
from .training import Target, evaluate, export, train


def main() -> None:
    parser = argparse.ArgumentParser(description=train_head.__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="folder or name of the target")
    parser.add_argument("--work", type=Path, required=True, help="what the steps leave each other")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    steps = parser.add_subparsers(dest="step", required=True)

    step = steps.add_parser("corpus", help="cut documents into windows")
    step.add_argument(
        "--text", type=Path, nargs="+", action="append", required=True, help="a group of texts"
    )
    step.add_argument("--exclude", nargs="*", default=[], help="files and folders of these names")
    step.add_argument("--windows", type=int, default=192, help="of all groups together")
    step.add_argument("--context", type=int, default=2048, help="tokens of a window")

    step = steps.add_parser("answers", help="let the target continue texts and answer questions")
    step.add_argument("--answers", type=int, default=256)
    step.add_argument("--excerpt", type=int, default=640, help="at most so many tokens")
    step.add_argument("--tokens", type=int, default=640, help="of an answer")

    steps.add_parser("states", help="write the target's hidden states, if memory has no room")

    step = steps.add_parser("train", help="train the head")
    step.add_argument("--epochs", type=int, default=4)
    step.add_argument("--minutes", type=float, default=600.0, help="end then, if not earlier")
    step.add_argument("--rows", type=int, default=4, help="crops of a batch")
    step.add_argument("--lr", type=float, default=0.02, help="of matrices; others have a 20th")
    step.add_argument("--draft-vocab", type=int, default=8192)

    steps.add_parser("eval", help="print the acceptance of held-out tokens")
    step = steps.add_parser("export", help="write a checkpoint")
    step.add_argument("--out", type=Path, required=True)

    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.step == "corpus":
        write_documents(args.work, args.target, args.text, args.exclude, args.windows, args.context)
    elif args.step == "answers":
        write_answers(args.work, args.target, args.device, args.answers, args.excerpt, args.tokens)
    elif args.step == "states":
        write_states(args.work, args.target, args.device)
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
        target = Target(args.target, args.device)
        if args.step == "train":
            train(
                args.work,
                target,
                args.epochs,
                args.minutes,
                args.rows,
                args.lr,
                args.draft_vocab,
            )
        elif args.step == "eval":
            evaluate(args.work, target)
        else:
            export(args.work, target, args.out)
