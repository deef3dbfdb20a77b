"""Train the small target/draft pair in `examples/models` on a CPU, from Python's own sources.

The text is the standard library with its tests. Some modules are held out for prompts and
evaluation. The pair trains in about an hour on two cores and is shaped for hierarchical
speculation at long context. The target's attention is wider than its hidden size, so its KV cache
dominates from a few thousand tokens on, and it has 65,536 positions. The draft has 2,048 positions
and sees a short window only.

Large models put most of their attention on few tokens at long context, so a sparse KV cache
hardly changes their outputs. The heads of a model trained on a few million tokens average over
everything. Therefore the target is also run with sparse attention on sequences of 2,048 tokens and
more: the first block, recent blocks and blocks of the best mean keys, as at level 2, with budgets
of a sixteenth to an eighth of the length. The divergence of both outputs is part of the loss.

    python examples/train_pair --work build/pair target --minutes 60    # tokenizer, then the target
    python examples/train_pair --work build/pair draft --minutes 10    # then the target's outputs
    python examples/train_pair --work build/pair export --out examples/models    # checkpoints
    python examples/train_pair --work build/pair eval    # held-out loss by context depth
    python examples/train_pair --work build/pair prompts --out examples/prompts    # held-out text

On a GPU, `--device cuda --size medium --rows-factor 16 --micro-tokens 32768 --more-text FOLDER`
trains a pair of tens of millions of parameters in minutes, in bfloat16, on more sources. Batches
are split into micro-batches, since activations take over a MB a token.

Training is paced by the clock: the learning rate and the length of the sequences follow the share
of `--minutes` that has passed. The state is saved every minute. `--resume` continues, and with more
`--minutes` the schedule continues from the share now reached.
"""
