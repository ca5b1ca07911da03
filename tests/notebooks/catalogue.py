"""The APIs of PyTorch Distributed that docs/apis.md lists, after PyTorch's own pages."""

from __future__ import annotations

from dataclasses import dataclass

OVERVIEW_URL = "https://docs.pytorch.org/tutorials/beginner/dist_overview.html"
OVERVIEW_DATE = "20 July 2025"
_DIST = "torch.distributed"
# Modules whose names say too little alone.
_TOLD_WITH_NAMES = ("autograd", "_symmetric_memory", "_functional_collectives")
DOCS = "https://docs.pytorch.org/docs/stable"


@dataclass(frozen=True)
class Api:
    """One name.

    Attributes:
        path: dotted; a method ends in ``Class.method``.
        reason: why no notebook shows it; nothing where one has to.
        is_method: whether it is called on an instance, whose class the code does not tell.
        own_part: what a notebook adds of its own, without which torch refuses to run it on a CPU.
        title: what the page calls it; by default the end of its path.
    """

    path: str
    reason: str = ""
    is_method: bool = False
    own_part: str = ""
    title: str = ""

    @property
    def shown(self) -> str:
        """The name as the page writes it."""
        if self.title:
            return self.title
        owner, name = self.path.split(".")[-2:]
        return f"{owner}.{name}" if owner[0].isupper() or owner in _TOLD_WITH_NAMES else name


@dataclass(frozen=True)
class Section:
    """The names of one page."""

    title: str
    url: str
    apis: tuple[Api, ...]
    remark: str = ""


def _names(module: str, names: str, reason: str = "") -> tuple[Api, ...]:
    return tuple(Api(f"{module}.{name}", reason) for name in names.split())


def _methods(owner: str, names: str, reason: str = "") -> tuple[Api, ...]:
    return tuple(Api(f"{owner}.{name}", reason, is_method=True) for name in names.split())


_DDP = "torch.nn.parallel.DistributedDataParallel"
_HOOKS = f"{_DIST}.algorithms.ddp_comm_hooks"
_AVERAGING = f"{_DIST}.algorithms.model_averaging"
_DTENSOR = f"{_DIST}.tensor"
_DCP = f"{_DIST}.checkpoint"
_RPC = f"{_DIST}.rpc"
_PP = f"{_DIST}.pipelining"

_BY_THE_MESH = "cellmesh does it when ranks start and stop"
_LIKE_A_HOOK = "registered like allreduce_hook"
_WITH_STATE = "registered with a state, like post_localSGD_hook"
_PARTS = "for code that extends the API"
_FUNCTIONS = f"{_DIST}._functional_collectives"

SECTIONS = (
    Section(
        "Data parallel (DDP)",
        f"{DOCS}/generated/torch.nn.parallel.DistributedDataParallel.html",
        (
            Api(_DDP),
            *_methods(_DDP, "no_sync"),
            *_names(_DDP, "join", "`Join` (below) covers it, also for other classes"),
            *_methods(_DDP, "register_comm_hook"),
            Api("torch.nn.SyncBatchNorm"),
            Api("torch.utils.data.DistributedSampler"),
            Api("torch.nn.DataParallel", "threads of one process; PyTorch advises DDP instead"),
        ),
    ),
    Section(
        "Communication hooks of DDP",
        f"{DOCS}/ddp_comm_hooks.html",
        (
            *_names(f"{_HOOKS}.default_hooks", "allreduce_hook fp16_compress_wrapper"),
            *_names(f"{_HOOKS}.default_hooks", "bf16_compress_wrapper", "the same for bfloat16"),
            *_names(
                f"{_HOOKS}.default_hooks", "fp16_compress_hook bf16_compress_hook", _LIKE_A_HOOK
            ),
            *_names(
                f"{_HOOKS}.powerSGD_hook",
                "PowerSGDState powerSGD_hook batched_powerSGD_hook",
                _WITH_STATE,
            ),
            *_names(f"{_HOOKS}.post_localSGD_hook", "PostLocalSGDState post_localSGD_hook"),
        ),
    ),
    Section(
        "Mixed precision with data parallelism",
        f"{DOCS}/notes/amp_examples.html",
        (Api("torch.autocast"), Api("torch.amp.GradScaler")),
    ),
    Section(
        "Fully sharded data parallel (FSDP2)",
        f"{DOCS}/distributed.fsdp.fully_shard.html",
        (
            *_names(f"{_DIST}.fsdp", "fully_shard MixedPrecisionPolicy CPUOffloadPolicy"),
            *_names(f"{_DIST}.fsdp", "FSDPModule", "the class of a module after `fully_shard`"),
            *_names(f"{_DIST}.fsdp", "OffloadPolicy", "the base class of CPUOffloadPolicy"),
            *_methods(
                f"{_DIST}.fsdp.FSDPModule",
                "unshard reshard",
                "FSDP2 calls it before and after each layer",
            ),
            *_methods(
                f"{_DIST}.fsdp.FSDPModule",
                "set_requires_gradient_sync",
                "gradient accumulation without communication; the notebooks show it for DDP only",
            ),
            *_methods(
                f"{_DIST}.fsdp.FSDPModule",
                "set_modules_to_forward_prefetch set_modules_to_backward_prefetch",
                "tunes the overlap with communication, which CPU ranks do not have",
            ),
            *_names(
                f"{_DIST}.fsdp", "register_fsdp_forward_method UnshardHandle share_comm_ctx", _PARTS
            ),
            *_names(
                f"{_DIST}.fsdp",
                "DataParallelMeshDims",
                "for DTensors on the whole mesh; the notebooks pass a submesh to `fully_shard`",
            ),
            *_names(f"{_DIST}.fsdp", "FullyShardedDataParallel", "FSDP1, superseded by FSDP2"),
        ),
    ),
    Section(
        "Tensor parallel (TP)",
        f"{DOCS}/distributed.tensor.parallel.html",
        (
            *_names(f"{_DTENSOR}.parallel", "parallelize_module ColwiseParallel RowwiseParallel"),
            *_names(
                f"{_DTENSOR}.parallel", "SequenceParallel PrepareModuleInput PrepareModuleOutput"
            ),
            *_names(f"{_DTENSOR}.parallel", "loss_parallel"),
            *_names(
                f"{_DTENSOR}.parallel",
                "PrepareModuleInputOutput",
                "PrepareModuleInput and PrepareModuleOutput in one",
            ),
            *_names(f"{_DTENSOR}.parallel", "ParallelStyle", _PARTS),
        ),
    ),
    Section(
        "Pipeline parallel (PP)",
        f"{DOCS}/distributed.pipelining.html",
        (
            *_names(_PP, "pipeline SplitPoint PipelineStage ScheduleGPipe Schedule1F1B"),
            *_names(_PP, "ScheduleInterleaved1F1B"),
            *_names(_PP, "pipe_split", "the notebooks split with SplitPoint, outside of the model"),
            *_names(_PP, "build_stage Pipe", _PARTS),
            *_names(
                _PP,
                "ScheduleLoopedBFS ScheduleInterleavedZeroBubble",
                "takes the same stages as ScheduleInterleaved1F1B, in another order of steps",
            ),
            *_names(
                _PP,
                "ScheduleZBVZeroBubble ScheduleDualPipeV",
                "two stages a rank in a V: of n ranks, rank r has stages r and 2n - 1 - r",
            ),
        ),
    ),
    Section(
        "DTensor",
        f"{DOCS}/distributed.tensor.html",
        (
            *_names(
                _DTENSOR, "DTensor distribute_tensor distribute_module Shard Replicate Partial"
            ),
            *_methods(f"{_DTENSOR}.DTensor", "from_local to_local full_tensor redistribute"),
            *_names(_DTENSOR, "zeros ones empty full rand randn"),
            *_names(_DTENSOR, "Placement", "the base class of Shard, Replicate and Partial"),
            *_names(f"{_DTENSOR}.debug", "CommDebugMode"),
            *_names(
                f"{_DTENSOR}.debug",
                "visualize_sharding",
                "notebook 03 draws more detailed pictures",
            ),
            *_names(f"{_DTENSOR}.experimental", "local_map implicit_replication"),
            *_names(f"{_DTENSOR}.experimental", "register_sharding", _PARTS),
        ),
    ),
    Section(
        "Context parallel",
        "https://docs.pytorch.org/tutorials/unstable/context_parallel.html",
        (
            Api(
                f"{_DTENSOR}.experimental.context_parallel",
                own_part="the CPU's attention kernel for its ring",
            ),
            Api(f"{_DTENSOR}.experimental._attention.set_rotate_method"),
        ),
        "Experimental; not on the overview page.",
    ),
    Section(
        "DeviceMesh",
        f"{DOCS}/distributed.html#devicemesh",
        (
            *_names(f"{_DIST}.device_mesh", "init_device_mesh DeviceMesh"),
            *_methods(f"{_DIST}.device_mesh.DeviceMesh", "get_group get_local_rank get_coordinate"),
            *_methods(f"{_DIST}.device_mesh.DeviceMesh", "from_group get_all_groups"),
        ),
        'Slices (`mesh["tp"]`) are shown where `get_group` is.',
    ),
    Section(
        "Process groups",
        f"{DOCS}/distributed.html",
        (
            *_names(_DIST, "init_process_group destroy_process_group", _BY_THE_MESH),
            *_names(_DIST, "get_backend get_process_group_ranks new_group"),
            *_names(
                _DIST,
                "get_rank get_world_size is_initialized get_node_local_rank",
                "cellmesh defines `rank`, `world_size` and `local_rank` on every rank",
            ),
            *_names(_DIST, "get_group_rank get_global_rank group"),
            *_names(_DIST, "get_default_backend_for_device is_backend_available"),
            *_names(_DIST, "is_gloo_available is_nccl_available is_mpi_available is_ucc_available"),
            *_names(_DIST, "is_xccl_available"),
            *_names(
                _DIST,
                "Backend",
                "the type of `get_backend()`, and the registry of custom backends, which are "
                "released and made again like torch's own (`tests/mesh/test_other_backends.py`)",
            ),
            *_names(_DIST, "is_torchelastic_launched", "for scripts under torchrun"),
            *_names(_DIST, "new_subgroups"),
            *_names(_DIST, "new_subgroups_by_enumeration", "equivalent to `new_group` in a loop"),
            *_names(_DIST, "split_group"),
            *_names(_DIST, "shrink_group", "NCCL only"),
            *_names(_DIST, "TCPStore FileStore HashStore PrefixStore", _BY_THE_MESH),
        ),
    ),
    Section(
        "Collectives",
        f"{DOCS}/distributed.html#collective-functions",
        (
            *_names(
                _DIST,
                "broadcast all_reduce reduce all_gather all_gather_into_tensor gather scatter",
            ),
            *_names(
                _DIST, "reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single barrier"
            ),
            *_names(_DIST, "monitored_barrier ReduceOp"),
            *_names(_DIST, "Work", "what a call with `async_op=True` returns; see notebook 07"),
            *_methods(f"{_DIST}.Work", "is_completed"),
            *_names(
                _DIST, "broadcast_object_list all_gather_object gather_object scatter_object_list"
            ),
            *_names(
                _DIST,
                "all_gather_single reduce_scatter_single",
                "names in torch 2.13 for all_gather_into_tensor and reduce_scatter_tensor",
            ),
        ),
    ),
    Section(
        "Point-to-point messages",
        f"{DOCS}/distributed.html#point-to-point-communication",
        _names(
            _DIST, "send recv isend irecv batch_isend_irecv P2POp send_object_list recv_object_list"
        ),
    ),
    Section(
        "Functional collectives",
        "https://docs.pytorch.org/docs/main/distributed.html",
        (
            *_names(_FUNCTIONS, "all_reduce reduce_scatter_tensor all_gather_tensor"),
            *_names(_FUNCTIONS, "all_to_all_single broadcast"),
        ),
        "Not documented as public.",
    ),
    Section(
        "Symmetric memory",
        f"{DOCS}/symmetric_memory.html",
        _names(f"{_DIST}._symmetric_memory", "empty rendezvous"),
        "GPUs with NVLink only.",
    ),
    Section(
        "Checkpoints (DCP)",
        f"{DOCS}/distributed.checkpoint.html",
        (
            *_names(_DCP, "save load async_save"),
            *_names(f"{_DCP}.state_dict", "get_state_dict set_state_dict StateDictOptions"),
            *_names(
                f"{_DCP}.state_dict",
                "get_model_state_dict get_optimizer_state_dict",
                "the notebooks use `get_state_dict`, which returns both",
            ),
            *_names(
                f"{_DCP}.state_dict",
                "set_model_state_dict set_optimizer_state_dict",
                "the notebooks use `set_state_dict`, which sets both",
            ),
            *_names(
                f"{_DCP}.stateful",
                "Stateful",
                "for your own classes that define how they are saved",
            ),
            *_names(
                _DCP, "FileSystemReader FileSystemWriter", "`save` and `load` make them from a path"
            ),
            *_names(
                f"{_DCP}.format_utils",
                "dcp_to_torch_save torch_save_to_dcp",
                "a conversion in one process",
            ),
            *_names(_DCP, "StorageReader StorageWriter LoadPlanner SavePlanner", _PARTS),
        ),
    ),
    Section(
        "Uneven inputs (Join)",
        f"{DOCS}/distributed.algorithms.join.html",
        _names(f"{_DIST}.algorithms.join", "Join Joinable JoinHook"),
    ),
    Section(
        "Sharded and local optimizers",
        f"{DOCS}/distributed.optim.html",
        (
            *_names(f"{_DIST}.optim", "ZeroRedundancyOptimizer PostLocalSGDOptimizer"),
            *_names(f"{_AVERAGING}.averagers", "PeriodicModelAverager"),
            *_names(f"{_AVERAGING}.averagers", "ModelAverager", "the base class of the other two"),
            *_names(f"{_AVERAGING}.hierarchical_model_averager", "HierarchicalModelAverager"),
        ),
    ),
    Section(
        "RPC",
        f"{DOCS}/rpc.html",
        (
            *_names(_RPC, "init_rpc shutdown rpc_sync rpc_async remote RRef get_worker_info"),
            *_names(_RPC, "TensorPipeRpcBackendOptions", "the notebooks use the defaults"),
            *_names(f"{_RPC}.functions", "async_execution"),
            *_names(f"{_DIST}.autograd", "context backward get_gradients"),
            *_names(f"{_DIST}.optim", "DistributedOptimizer"),
            *_names(f"{_DIST}.nn.api.remote_module", "RemoteModule"),
        ),
    ),
    Section(
        "Launcher (torchrun)",
        f"{DOCS}/elastic/run.html",
        (
            Api(
                f"{_DIST}.run",
                "`%dist_export` writes a notebook as a script for it; `tests/exactness` runs such "
                "scripts",
                title="torchrun",
            ),
            Api(f"{_DIST}.elastic.multiprocessing.errors.record", "for scripts under torchrun"),
        ),
    ),
    Section(
        "Debugging",
        f"{DOCS}/distributed.html#debugging-torch-distributed-applications",
        (
            *_names(
                _DIST,
                "set_debug_level get_debug_level",
                "`TORCH_DISTRIBUTED_DEBUG`, before the start "
                "(`--env TORCH_DISTRIBUTED_DEBUG=DETAIL`); stop, release and heal work at each "
                "level",
            ),
            *_names(
                _DIST, "breakpoint", "`breakpoint()` opens a debugger for all ranks in the notebook"
            ),
            Api("torch.utils._debug_mode.DebugMode"),
            Api("torch.profiler.profile"),
            *_names(_DIST, "record_comm", "gives collectives another name in profiles"),
            Api(
                "torch._C._distributed_c10d._dump_fr_trace", title="flight recorder: _dump_fr_trace"
            ),
            Api(
                "torch.cuda.memory._record_memory_history",
                title="memory snapshots: _record_memory_history",
            ),
            Api("torch.cuda.memory._snapshot", title="memory snapshots: _snapshot"),
        ),
    ),
)
