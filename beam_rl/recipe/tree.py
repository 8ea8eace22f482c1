"""The recipe: one typed tree that names every choice a run makes.

Knows nothing about files, Megatron, vLLM or Ray. A key stands here only when something reads it; what can't work
together is refused in `checks.py`, so whoever holds a `Recipe` holds one that can start.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from beam_rl.lora import ALL_TARGETS
from beam_rl.placement import Placement
from beam_rl.recipe import checks

Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Strict(), Field(gt=0)]
Count = Annotated[int, Strict(), Field(ge=0)]
Switch = Annotated[bool, Strict()]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Lora(Section):
    """Train an adapter and leave the model as it is; the router and the norms have none."""

    rank: Annotated[int, Strict(), Field(gt=0, le=512)] = Field(64, description="512 at most, as in vLLM")
    alpha: Annotated[float, Field(gt=0)] = 128.0
    targets: list[str] = Field(list(ALL_TARGETS), description="adapted projections of each layer, by their HF names")
    normalize_moe_lora: Switch = Field(True, description="an expert's rank is rank / top-k, else rank")
    expert_alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="alpha of the experts; default: their scale alpha / rank is that of the dense projections"
    )
    adapter: str | None = Field(
        None, description="folder of an HF adapter to start from; default: a new one, which adds 0"
    )


class Model(Section):
    path: str = Field(
        description="HF folder or hub id of a checkpoint, Beam's or another model's (docs/other_models.md); `tiny` and "
        "`small` make a small Beam on first use"
    )
    revision: str | None = Field(None, description="hub revision; ignored for a folder")
    lora: Lora | None = Field(None, description="train an adapter of this shape; default: train all weights")


class DataSource(Section):
    path: str = Field(description="hub id, .jsonl or .parquet file, `tiny` or `small` for the task of that checkpoint")
    config: str | None = Field(None, description="hub data sets: the configuration, where there are several")
    split: str = Field("train", description="hub data sets: the split")
    prompt: str = Field("prompt", description="column with a text or a list of chat messages")
    answer: str = Field("answer", description="column with the gold answer; dots reach into a struct")
    limit: Count = Field(0, description="use only the first N rows; 0: all")


class EvalSource(DataSource):
    task: str = Field("", description="the task's name in metrics; default: the last part of the path")


class Data(Section):
    train: DataSource
    eval: EvalSource | None = None
    max_prompt_tokens: Positive = 2048


class Verifier(Section):
    name: str = Field(
        "math",
        description="math, toy, or your own: `module:function` or `FILE.py:function`, called with (response, gold answer, "
        "finish reason), which returns the score",
    )
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    workers: Positive = 2
    shuffle: Switch = Field(
        False,
        description="a control: hand each step's rewards out anew at random among its samples, so nothing is to learn",
    )


class Environment(Section):
    """Answers what the model says, turn by turn: a tool, a game, a second try (docs/environments.md)."""

    name: str = Field(
        description="second_try, or your own: `module:Class` or `FILE.py:Class`, made for each response with the data set's "
        "row; its step(response) returns (answer or None, reward or None)"
    )
    max_turns: Positive = Field(4, description="the model's turns in one response, at most")
    role: Literal["user", "tool"] = Field("user", description="as whom the chat template lets it speak")
    timeout_s: Annotated[float, Field(gt=0)] = Field(10.0, description="for one answer")
    workers: Positive = Field(8, description="environments that compute an answer at the same time")
    options: dict[str, Any] = Field({}, description="keyword arguments for the class")


class EngineParallel(Section):
    """An engine has tp · pp · dp workers, each on a GPU of its own, or a process of its own on a CPU."""

    tp: Positive = Field(1, description="tensor-parallel workers: heads, MLPs, experts, embedding and head are split")
    pp: Positive = Field(1, description="pipeline-parallel workers: each holds some of the layers")
    dp: Positive = Field(1, description="data-parallel workers of one engine, for attention; experts as ep says")
    ep: Positive = Field(1, description="1, or tp · dp: whole experts are spread over the workers instead of split")

    @property
    def workers(self) -> int:
        return self.tp * self.pp * self.dp


class Speculative(Section):
    """Tokens that are drafted and then verified: samples are distributed as without."""

    method: str = Field("ngram", description="vLLM's name: ngram needs no drafter; draft_model, eagle3, dflash … do")
    tokens: Positive = Field(3, description="drafted at a time")
    model: str | None = Field(None, description="the drafter's checkpoint")
    options: dict[str, Any] = Field({}, description="more of vLLM's speculative_config, such as prompt_lookup_max: 4")


class EngineProfile(Section):
    steps: list[Positive] = Field(
        [],
        description="steps in which each engine traces its sampling for Perfetto, profile/step_N_engine_E.json, and a table",
    )
    engine_steps: Positive = Field(8, description="so many of the engine's own steps, a token for each request")
    python: Switch = Field(
        False,
        description="Python's calls, too, for which a GPU may wait: 20 MB and seconds for each of those steps, in which the "
        "engine answers nobody; after rollout.engine_deadline_s it is lost",
    )


class Rollout(Section):
    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8
    max_response_tokens: Positive = 1024
    temperature: float = 1.0
    top_p: Fraction = 1.0
    precision: Literal["trainer", "mxfp8"] = Field(
        "trainer", description="as trainer.precision; mxfp8: projections in MXFP8 also where the trainer is BF16"
    )
    checkpoint: str | None = Field(
        None,
        description="folder or hub id of model.path in another form, such as FP8 or NVFP4, for the engines; with model.lora",
    )
    routing_replay: Switch = True
    pace: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        "synchronous",
        description="sample and train in turn; sample the next step's batch while training; or sample all the time",
    )
    over_sampling: Annotated[float, Field(ge=1, le=4)] = Field(
        1.0, description="begin so many times the prompts of a step, and go on when a step's worth is finished"
    )
    unfinished: Literal["continue", "restart"] = Field(
        "continue", description="over-sampled responses that a step did not wait for: later kept, or sampled anew"
    )
    engines: Positive = 1
    parallel: EngineParallel = EngineParallel()
    engine_restarts: Count = Field(3, description="how often each engine that was lost is started anew")
    engine_deadline_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="an engine that does not answer for so long is lost"
    )
    max_num_seqs: Positive = Field(256, description="requests that one engine runs at once")
    max_batched_tokens: Positive = Field(4096, description="tokens in one engine step")
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(1.0, description="CPU engines: host memory for the KV cache")
    gpu_memory_utilization: Fraction = Field(0.85, description="GPU engines: share of the GPU that vLLM may use")
    speculative: Speculative | None = None
    profile: EngineProfile = EngineProfile()
    engine_args: dict[str, Any] = Field(
        {},
        description="more of vLLM's engine arguments by vLLM's names, such as kv_cache_dtype: fp8 or attention_backend",
    )


class DynamicSampling(Section):
    enabled: Switch = Field(False, description="drop groups whose rewards are all equal and sample others instead")
    max_rounds: Positive = Field(4, description="sampling rounds a step, the first included")


class Overlong(Section):
    buffer_tokens: Count = Field(0, description="tokens before the limit over which the punishment grows; 0: off")
    penalty: NonNegative = 1.0


class Kl(Section):
    coefficient: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"


class ImportanceCorrection(Section):
    kind: Literal["none", "truncate", "mask"] = Field(
        "none", description="weight by trainer/engine probability: truncated (TIS), or tokens outside the bounds masked"
    )
    low: NonNegative = 0.5
    high: Annotated[float, Field(gt=0)] = 2.0


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo"] = Field("grpo", description="dr_grpo leaves out the division by the std")
    loss: Literal["clip", "gspo", "cispo"] = "clip"
    aggregation: Literal["token_mean", "sample_mean", "constant"] = Field(
        "token_mean",
        description="over the global mini-batch: tokens alike, samples alike, or sum / max_response_tokens",
    )
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.28
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()
    kl: Kl = Kl()
    importance_correction: ImportanceCorrection = ImportanceCorrection()
    staleness: Positive = Field(
        1, description="asynchronous: versions that the weights which sampled may be behind those that train, at most"
    )


class Nvme(Section):
    path: str | None = Field(None, description="a folder on each node's own NVMe; a run makes one of its own in it")
    block_bytes: Positive = Field(
        64 * 2**20, description="of the state that is read, updated and written at once; five are in memory"
    )
    moments: Literal["fp32", "bf16"] = Field(
        "fp32", description="how Adam's moments are kept (offload: cpu or nvme); bf16 rounds them after every update"
    )


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    warmup_updates: Count = 0
    distributed: Switch = Field(True, description="each data-parallel rank holds a part of Adam's state, not all of it")
    offload: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="where FP32 main parameters and Adam's moments live: with the weights, in host memory, in files",
    )
    nvme: Nvme = Nvme()


class Parallel(Section):
    """The trainer has dp · tp · cp · pp ranks; experts are spread anew over the dp · tp · cp ranks of a stage."""

    dp: Positive = Field(1, description="data-parallel replicas")
    tp: Positive = Field(1, description="tensor-parallel ranks: heads, dense MLPs, embedding and head are split")
    sp: Switch = Field(False, description="sequence parallelism: what tp does not split, its ranks split by tokens")
    ep: Positive = Field(1, description="expert-parallel ranks: each holds some of the experts")
    etp: Positive = Field(1, description="expert tensor-parallel ranks: each expert is split")
    pp: Positive = Field(1, description="pipeline-parallel ranks: each holds some of the layers")
    vpp: Positive = Field(1, description="virtual pipeline stages a rank, for a shorter bubble")
    pp_layers: list[Positive] | None = Field(
        None, description="layers of each of the pp · vpp stages, in the model's order; default: as even as can be"
    )
    cp: Positive = Field(1, description="context-parallel ranks: each holds a part of every sample")

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp


class Mxfp8(Section):
    """Which layers are not MXFP8; routers, norms, gate biases, embedding and head never are."""

    keep_first_layers: Count = Field(0, description="so many layers at the model's beginning stay BF16")
    keep_last_layers: Count = Field(0, description="so many layers at the model's end stay BF16")
    activations: Switch = Field(
        True,
        description="trainer, and engines on a CPU: round what weights are multiplied with, too, as Blackwell's units do; "
        "false: weights alone, as vLLM's kernels for other GPUs do",
    )


class Profile(Section):
    steps: list[Positive] = Field(
        [],
        description="steps in which each trainer rank writes a trace for Perfetto, profile/step_N_rank_R.json, and a table",
    )


class Trainer(Section):
    steps: Count = 50
    mini_batches: Positive = Field(2, description="optimizer updates a step")
    precision: Literal["fp32", "bf16", "mxfp8"] = Field(
        "bf16", description="mxfp8: BF16, but projections multiply in MXFP8; FP32 main parameters in each"
    )
    mxfp8: Mxfp8 = Mxfp8()
    numerics: Literal["engine", "reference", "fp32_head"] = Field(
        "engine",
        description="of the logits: rounded after the softcap as vLLM does; FP32 in the trainer alone, as transformers; or "
        "fp32_head: the head's product and all after it in FP32, in trainer and engines",
    )
    deterministic: Switch = Field(False, description="same bits in every run, at some cost in speed")
    token_budget: Positive = Field(4096, description="tokens in one micro-batch; the longest sample must fit")
    logprob_chunk_tokens: Positive = Field(
        2048, description="tokens whose logits over the vocabulary exist at one time"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="in the backward pass compute again: the MLPs and experts (selective), or whole layers"
    )
    collective_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0,
        description="for trainer ranks to wait for each other; then the run ends and names the rank that is missing",
    )
    profile: Profile = Profile()
    optimizer: Optimizer = Optimizer()
    wait_in: Literal["host", "nvme"] = Field(
        "host",
        description="where the trainer's state is while engines have the GPUs that they share: in page-locked host memory, "
        "or in a file in optimizer.nvme.path",
    )
    parallel: Parallel = Parallel()

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """Of activations, and of every weight but the router's, outside of MXFP8's products."""
        return "fp32" if self.precision == "fp32" else "bf16"


class Sync(Section):
    transport: Literal["auto", "shm", "gloo", "ipc", "nccl"] = Field(
        "auto",
        description="shm: shared memory of one machine; gloo: CPUs of several; ipc: one GPU; nccl: separate GPUs; auto: by "
        "where trainer and engines are",
    )
    bucket_bytes: Positive = Field(256 * 2**20, description="two of these buffers are filled and sent in turn")
    deadline_s: Annotated[float, Field(gt=0, description="of every operation of a sync")] = 300.0
    checksums: Switch | None = Field(
        None, description="verify every bucket's bytes on arrival; null: on CPU transports, not on a GPU's"
    )


class Checkpoint(Section):
    every: Count = Field(10, description="steps between checkpoints; 0: only at the end")
    keep_last: Positive = 2
    keep_best: Switch = Field(True, description="also keep the checkpoint with the best eval score")
    asynchronous: Switch = Field(
        True, description="write while training goes on, from a copy in host memory; false: training waits, no copy"
    )
    grace_s: Annotated[float, Field(gt=0)] = Field(
        25.0, description="from a SIGTERM or Ctrl-C until the process must have saved and ended"
    )


class Eval(Section):
    every: Count = Field(10, description="steps between evaluations, also before the first; 0: never")
    samples_per_prompt: Positive = 8
    temperature: NonNegative = 1.0


class Logging(Section):
    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "beam-rl"
    samples_per_step: Count = Field(8, description="samples written to samples/step_N.jsonl; 0: none")


class Cluster(Section):
    address: str = Field(
        "local",
        description="`local` starts Ray for this run; `auto` or host:port joins the Ray that runs on this machine",
    )
    placement: Placement | None = Field(
        None,
        description="colocated: trainer and engines have the same GPUs and take turns; disaggregated: each has its own; "
        "default: colocated for rollout.pace = synchronous, where half of the GPUs would idle otherwise",
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="until trainer and engines are ready")
    gpu: str | None = Field(
        None,
        description="the plan's machines: H100, H200, B200, GB300 or one of cluster.hardware; a run that can't fit them "
        "is refused; default: this machine, as it is",
    )
    nodes: Positive | None = Field(
        None, description="nodes of the cluster, for the plan; default: as many as are needed"
    )
    gpus_per_node: Positive | None = Field(None, description="for the plan; default: as cluster.gpu usually has")
    hardware: str | None = Field(
        None, description="a YAML file with machines that the plan does not know, or knows otherwise (docs/plan.md)"
    )


class Parity(Section):
    prompts: Positive = Field(4, description="prompts to sample one response each, which trainer and engine then score")
    sublayer_bound: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="relative error that a sub-layer may add; default 1e-5 for fp32, 2e-2 for bf16, 1e-1 for mxfp8",
    )
    logprob_mean_bound: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="mean |Δlogp| of any two sides, nats; default 1e-5 for fp32, 1e-2 for bf16, 3e-2 for mxfp8",
    )


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Count = 0
    model: Model
    data: Data
    verifier: Verifier = Verifier()
    environment: Environment | None = None
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    parity: Parity = Parity()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()

    @property
    def rollout_precision(self) -> Literal["fp32", "bf16", "mxfp8"]:
        """What engines multiply in."""
        return self.trainer.precision if self.rollout.precision == "trainer" else self.rollout.precision

    @model_validator(mode="after")
    def _can_work(self) -> "Recipe":
        checks.check(self)
        return self
