"""Train the small target/draft pair in `examples/models` on a CPU, from text every Python has.

The text is the standard library's own source, tests included. Some modules are held out: they
are the prompts and the measure. The pair is small enough to train in about an hour on two
cores, and shaped for hierarchical speculation at long context: the target's attention is wider
than its hidden size, so its KV cache dominates from a few thousand tokens on, and its positions
reach 65,536; the draft knows 2,048 positions and is only ever shown a short window.

Large models put most of their attention on few tokens at long context, so a sparse KV cache
hardly changes what they say. A model that saw a few million tokens does not: its heads average
over everything. Therefore, on sequences of 2,048 and more, the target is also run with sparse
attention (first block, recent blocks, blocks of the best mean keys: as at level 2, with budgets
of a sixteenth to an eighth of the length), and how far its two outputs differ is part of the
loss.

    python examples/train_pair --work build target --minutes 60    # tokenizer, then the target
    python examples/train_pair --work build draft --minutes 10     # text, then the target's outputs
    python examples/train_pair --work build export --out models    # LlamaForCausalLM checkpoints
    python examples/train_pair --work build eval                   # held-out loss by context depth
    python examples/train_pair --work build prompts --out prompts  # the held-out text itself

On a GPU, `--device cuda --size medium --rows-factor 16 --micro-tokens 32768 --more-text FOLDER`
trains a pair of tens of millions of parameters in minutes, in bfloat16, on more sources. A batch
goes through in parts of so many tokens: what it keeps for the way back is over a MB a token.

Training is paced by the clock: the learning rate, and the length of the sequences, follow the
share of `--minutes` that has passed. It saves its state every minute; `--resume` goes on, and
more `--minutes` than before continue the schedule from the share now reached.
"""
