"""What others report of decoding with KV in host memory, as they say it: no prediction is made of
it, and none of it was run here."""

# Method, figure, what it is for, whether outputs are the target's own, the source.
_OTHERS = (
    (
        "TriForce, the paper's code",
        "7.78x (108 against 840 ms a token)",
        "7B with all heads, 127K, two RTX 4090, its own offloaded decoding",
        "greedy alone",
        "arXiv 2404.11912",
    ),
    (
        "the same",
        "7.37x (114 against 840 ms)",
        "LWM 7B, two RTX 4090",
        "greedy alone",
        "arXiv 2404.11912",
    ),
    (
        "the same",
        "7.94x (226 against 1794 ms)",
        "13B, two RTX 4090",
        "greedy alone",
        "arXiv 2404.11912",
    ),
    (
        "the same",
        "4.86x (312 against 1516 ms)",
        "7B, one RTX 4090, against DeepSpeed ZeRO-Inference",
        "greedy alone",
        "arXiv 2404.11912",
    ),
    (
        "VeriCache",
        "up to 4x",
        "drafts from the device's memory while all KV crosses",
        "yes",
        "arXiv 2605.17613, abstract",
    ),
    ("HiSparse in SGLang", "0.92x at batch 1, 3.0x at 54", "DSA models alone", "", "SGLang"),
    ("MagicPIG", "54 ms a token", "8B with grouped heads, 96K, one RTX 4090", "no", "its paper"),
    ("RetroInfer", "4.4x", "120K", "", "its paper"),
    ("ScoutAttention", "2.1x", "", "", "its paper"),
    ("SparseServe", "3.14x throughput", "", "", "its paper"),
)


def others_table() -> str:
    """A Markdown table."""
    lines = ["| who | reported | on | lossless | source |", "|---|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in _OTHERS])
