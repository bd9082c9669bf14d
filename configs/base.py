"""Every key of the configuration, once, with its default: there is no other place for defaults.

A preset is a file with `get_config()` that changes some of these; the command line changes single keys
(`--config.a.b=value`). Keys, types and rules between keys: app/config.py, app/config_check.py.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    # ---- the job ----------------------------------------------------------------------------------------------------
    config.steps = 1000  # optimizer steps of the whole run; a resumed run goes on to the same number
    config.seq_len = 32_768  # tokens of one row (T). At most 2**24; may exceed model.max_position_embeddings
    config.global_batch = 8  # rows of one optimizer step, whole sequences, over all devices
    config.accumulation = 1  # micro-batches that a step is cut into, one after the other
    config.seed = 0  # of parameters and data order
    config.controller = "multi"  # a process per host, or "single": one process for all devices (Pathways)
    # What a layer keeps for its backward. "full": nothing, all is recomputed; "exchanges": what came over the network
    # along the sequence (small), so that recomputing repeats no communication; "none": everything.
    config.remat = "exchanges"
    config.self_check = True  # at the start, compare the sharded recurrence with one rank's on a short sequence
    config.nonfinite_limit = 5  # steps in a row with a loss or gradient that is not finite, before the run stops

    config.init_from = ""  # weights to start from: what app.hf imported, or WORKDIR/checkpoints/<step> of another run
    config.compile_cache = ""  # directory of compiled programs, which the next start need not compile; "": none

    # ---- model: names and meanings of the published config.json; defaults are Qwen3.5-0.8B --------------------------
    config.model = ConfigDict()
    config.model.vocab_size = 248_320
    config.model.hidden_size = 1024
    config.model.intermediate_size = 3584  # of the MLP
    config.model.num_hidden_layers = 24
    config.model.full_attention_interval = 4  # every n-th layer is softmax attention, the others are Gated DeltaNet
    config.model.num_attention_heads = 8  # softmax attention: query heads
    config.model.num_key_value_heads = 2  # softmax attention: key/value heads
    config.model.head_dim = 256  # softmax attention
    config.model.partial_rotary_factor = 0.25  # share of head_dim that rope turns
    config.model.rope_theta = 10_000_000.0  # (the published classes default to 10,000; every checkpoint says 1e7)
    config.model.linear_num_key_heads = 16  # Gated DeltaNet: query and key heads
    config.model.linear_num_value_heads = 16  # Gated DeltaNet: value heads
    config.model.linear_key_head_dim = 128  # Gated DeltaNet: query and key
    config.model.linear_value_head_dim = 128  # Gated DeltaNet: value
    config.model.linear_conv_kernel_dim = 4  # Gated DeltaNet: taps of the causal convolution
    config.model.rms_norm_eps = 1e-6
    config.model.initializer_range = 0.02  # standard deviation of every matrix at the start
    config.model.tie_word_embeddings = True  # the head is the embedding
    config.model.max_position_embeddings = 262_144  # what the published weights were trained to; no limit here
    config.model.num_experts = 0  # of each mixture-of-experts layer; 0: every layer has an MLP of intermediate_size
    config.model.num_experts_per_tok = 0  # experts that work on one token, besides the shared one
    config.model.moe_intermediate_size = 0  # of one expert
    config.model.shared_expert_intermediate_size = 0  # of the expert that works on every token
    config.model.norm_topk_prob = True  # the weights of a token's experts add up to 1
    config.model.decoder_sparse_step = 1  # every n-th layer has experts, the others an MLP
    config.model.mlp_only_layers = ()  # numbers of layers that have an MLP all the same
    config.model.router_aux_loss_coef = 0.0  # weight of the load-balancing loss (published models: 0.001)

    # ---- dtypes: "float32" or "bfloat16" ----------------------------------------------------------------------------
    config.dtypes = ConfigDict()
    config.dtypes.compute = "bfloat16"  # activations and operands of products (gates, states, loss stay float32)
    config.dtypes.params = "float32"  # stored parameters
    config.dtypes.reduce = "float32"  # gradient sums over devices

    # ---- mesh: devices along each axis; -1 (one axis at most) is what the others leave ------------------------------
    config.mesh = ConfigDict()
    config.mesh.data = 1  # rows; parameters are copied
    config.mesh.fsdp = -1  # rows; parameters are cut along their width
    config.mesh.expert = 1  # experts are shared out; also the inner part of the sequence (1 for a dense model)
    config.mesh.context = 1  # the sequence; parameters are cut along their width here too
    config.mesh.tensor = 1  # heads, MLP hidden, vocabulary
    config.mesh.cpu_devices = 0  # above 0: make this many CPU devices in each process and use nothing else
    # Slices that an axis spans, over the data-centre network; the product is the number of slices. mesh.<axis> counts
    # the whole axis (16 with dcn 2: 8 in each of two slices). 1 keeps an axis inside a slice, the sequence too.
    config.mesh.dcn = ConfigDict()
    config.mesh.dcn.data = 1
    config.mesh.dcn.fsdp = 1
    config.mesh.dcn.expert = 1
    config.mesh.dcn.context = 1
    config.mesh.dcn.tensor = 1

    # ---- block sizes: speed and memory, not results -----------------------------------------------------------------
    config.ops = ConfigDict()
    config.ops.gdn_chunk = 64  # tokens of one chunk of the gated delta rule (xla kernel)
    config.ops.gdn_kernel = "auto"  # "pallas" (TPU) or "xla"; "auto": pallas on TPUs, xla elsewhere
    config.ops.attention_block = 512  # tokens of one block of softmax attention
    config.ops.attention_kernel = "auto"  # "pallas" (TPU) or "xla"; "auto": pallas on TPUs, xla elsewhere
    config.experts = ConfigDict()  # tokens travel to the rank of mesh.expert that has their expert, and back
    # Room of one exchange, x what a rank gets of evenly spread tokens. More tokens go in further rounds: slower, exact.
    config.experts.capacity = 1.25
    config.experts.max_rounds = 0  # 0: as many rounds as it takes. n: what is left then is dropped, and counted
    config.loss = ConfigDict()
    config.loss.chunk = 512  # tokens whose logits exist at a time on a device (x vocab_size x 4 bytes)
    config.loss.z_weight = 0.0  # weight of the mean squared logsumexp, which keeps logits near 0; 1e-4 is usual
    config.loss.layer_balance_weight = 0.0  # a router_aux_loss_coef for which every layer has to be balanced
    config.loss.router_z_weight = 0.0  # the same of the router's logits, over tokens and layers; 1e-3 is usual
    config.loss.mtp_weight = 0.0  # of the loss of one more layer, for the token after the next; 0.1 to 0.3; 0: none

    # ---- optimizer: AdamW, global-norm clipping, linear warm-up then cosine -----------------------------------------
    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-4  # the peak, after the warm-up
    config.optimizer.warmup_steps = 100  # a run of fewer steps (a trial) ends inside the warm-up
    config.optimizer.final_learning_rate = 3e-5  # at the last step
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.1  # of matrices only, not of norms, A_log, dt_bias
    config.optimizer.clip_norm = 1.0  # largest global gradient norm (a large number: no clipping)
    config.optimizer.moment_dtype = "float32"  # of the first moment; the second is float32

    # ---- data -------------------------------------------------------------------------------------------------------
    config.data = ConfigDict()
    config.data.path = ""  # prepared directory (python -m data.prepare); "": WORKDIR/data
    config.data.source = ""  # what to prepare into it if it is not there yet, as "stdlib"; "": nothing
    config.data.tokenizer = "bytes"  # "bytes", "ids:N" or the path of a tokenizer.json; must be the prepared data's
    config.data.documents = "separate"  # "separate": nothing flows from one document to the next; "joined": one stream
    config.data.weights = ""  # shares of the tokens by source, as "web=0.7,code=0.3"; "": as many as each has
    config.data.whole_documents = False  # reorder documents a little so that those that fit in a row are not cut
    config.data.holdout = 0.02  # share of documents, chosen by hash, that is never trained on; 0: no held-out loss
    config.data.workers = 0  # reading processes beside each process; 0: a thread
    config.data.prefetch = 2  # batches held ready, by each worker; 0: read when they are needed

    # ---- every so many steps ----------------------------------------------------------------------------------------
    config.eval = ConfigDict()
    config.eval.every_steps = 500  # held-out loss, also after the last step; 0: only there
    config.eval.batches = 8  # global batches of held-out documents; -1: all
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 500  # also after the last step and when a signal stops the run
    config.checkpoint.every_minutes = 0.0  # also so long after the last, looked at on logged steps; 0: by steps only
    config.checkpoint.keep_last = 3
    config.checkpoint.directory = ""  # "": WORKDIR/checkpoints; gs://... where the workers of a single controller write
    config.checkpoint.keep_every = 0  # keep those of every so many steps for ever; 0: none
    config.checkpoint.local_directory = ""  # also one on every host, of its own part, for a restart of all; "": none
    config.checkpoint.local_every_steps = 50  # the newest two are kept
    config.elastic = ConfigDict()  # controller "single", slices along mesh.data: what a lost slice does
    config.elastic.min_slices = 0  # go on from the newest checkpoint while this many slices are left; 0: stop
    config.elastic.max_losses = 3  # of slices in one run, then it stops
    # Seconds after which a process gives up, so that the launcher starts the job again.
    config.limits = ConfigDict()
    config.limits.join = 900.0  # until all processes are there
    config.limits.step = 1800.0  # for one step, or one batch of the held-out loss
    config.limits.slow = 7200.0  # for anything that may be slow: data, restoring, compiling, the first step, a save
    config.limits.peer = 40.0  # without a sign of life from another process
    config.log = ConfigDict()
    config.log.every_steps = 10
    config.log.tensorboard = True
    config.log.profile_step = 0  # this step and the next two are traced, into `profile` beside the checkpoints; 0: none

    return config.lock()


def one_long_row(seq_len: int) -> ConfigDict:
    """For presets: a row of `seq_len` tokens a step, along all devices."""
    config = get_config()
    config.update(seq_len=seq_len, global_batch=1)
    config.mesh.update(fsdp=1, context=-1)
    return config
