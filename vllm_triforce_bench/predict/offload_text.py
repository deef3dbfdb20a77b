"""What the page of predictions with KV in host memory says beside its tables."""

INTRO = """\
Everything on this page is **predicted** by [`vllm-triforce predict`](../prediction.md), but for
what others report; nothing was measured, and no GPU has run [KV in host memory](../offload.md) yet.
Written by

    {command}

- *Plain* is the same engine without speculation. *Plain alone* is one with `"levels": "3"`, which
  has neither level 2's pool nor chunk summaries nor a draft on the device, and so more layers of
  KV. With as little memory stock vLLM refuses a request of this length.
- In a cell of TriForce: milliseconds a token, speed-up over plain and over plain alone, the best
  setting (`levels 16/2@4096 draft`: k, gamma, budget). Acceptance in the head of a column is level
  2's, of a token by the full pass.
- In brackets, of the time of a token: what its share of the bytes that must cross from host memory
  takes at the link's rate, those of a full pass over the tokens that it yields. 100 % is the
  physical limit."""

LIMITED = """\
A card of 24 GB has as much. Of devices that have more no more is used, since this request would fit
them (`--gpu-memory-utilization` limits vLLM so)."""

DRAFTS = """\
Speed-up over plain, by what level 2 accepts of the draft's tokens and of prompt lookup's; with 0
level 2 drafts by itself. The paper's raw data say 0.21."""

BEYOND = """\
The smallest batch, of powers of two, whose KV does not fit the device. Milliseconds are between a
request's tokens; tokens/s are the batch's."""

OTHERS = """\
Their figures, as they give them: other work, other machines, other baselines, so that none of them
can be compared with a prediction above. An empty cell was not looked up."""

ASSUMED = """\
- **The link**, from host memory to the device: {links}. PCIe is assumed: 25 GB/s of the 31.5 of
  PCIe 4 x16, 50 of the 63 of PCIe 5 x16. Of the 450 of NVLink-C2C 375 were measured by others
  (arXiv 2407.07850). That our kernel of 32 programs reaches as much is assumed; the faster the
  link, the less certain.
- **Memory**: {gib:g} GiB of each device, or all of it where that is said, less a tenth, less 2.5 GB
  for activations, logits and graphs, less weights and the draft's. The engine has `max_num_seqs`
  and `max_speculating_seqs` at the batch, `max_model_len` 256 tokens above the context, host memory
  for all of its KV and no prefix cache. Layers lie where `place_layers` puts them.
- **A full pass** reads the context's blocks of each layer in host memory, then runs the layer's
  attention: nothing overlaps. Attention is counted as without offloading. What a pass writes to
  host memory is left out (17 tokens of Llama-2-7B: 0.4 ms on PCIe 4).
- **Level 2** reads its pool on the device. A selection, every 8th full pass, brings a whole budget
  from host memory, the worst case: chunks that are in the pool are not brought again in truth.
  After each full pass the blocks that it can have touched are brought, at worst two of each layer.
- **Once for each request**, and not in these figures: level 2 looks through all keys, half of a
  full pass's bytes, and its pool is filled. Reading the prompt is left out too.
- **Level 1**: Llama-68M with the target's vocabulary, of whose tokens level 2 accepts {draft:g} (an
  assumption); prompt lookup {lookup:g}. Gamma is 2, Model Runner V2's default with a draft, or 0,
  level 2 by itself, unless the command has `--gammas`.
- Requests of a batch are alike and get tokens in the same steps. FlashAttention 2, on the 4090,
  does not divide a sequence's KV for longer queries, which costs level 2 and the full pass."""
