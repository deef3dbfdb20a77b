"""Train an EAGLE-3 head (arXiv 2503.01840) for a target of yours, as level 1's draft.

The head reads the target's hidden states behind three of its layers. Its own output stands in for
them after the first drafted token, so training runs it for three tokens in a row (the paper's
training-time test). The loss is against the target's distributions over the draft vocabulary. At
level 1 the head sees a window of the context, so it trains inside one too.

    python examples/train_head --target build/smollm2/gqa --work build/head corpus \
        --text FOLDER FILE ... --text FOLDER ...         # windows of documents, of each group alike
    python examples/train_head --target build/smollm2/gqa --work build/head answers  # by the target
    python examples/train_head --target build/smollm2/gqa --work build/head states   # to disk
    python examples/train_head --target build/smollm2/gqa --work build/head train
    python examples/train_head --target build/smollm2/gqa --work build/head eval
    python examples/train_head --target build/smollm2/gqa --work build/head export --out head

Any Llama-like target of vLLM and transformers will do. `answers`, `states` and `train` continue
where they were stopped. The folder that `export` writes is a `LlamaForCausalLMEagle3` checkpoint,
which vLLM loads as well (`"method": "eagle3"`).
"""
