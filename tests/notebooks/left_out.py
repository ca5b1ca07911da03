"""The public names of torch.distributed that the catalogue does not list, and why."""

from __future__ import annotations

from dataclasses import dataclass

_DIST = "torch.distributed"
_CORE = f"{_DIST}.distributed_c10d"
_DCP = f"{_DIST}.checkpoint"

# Each public name of these is in the catalogue, or left out below.
PUBLIC_MODULES = (
    _DIST,
    _CORE,
    f"{_DIST}.algorithms.ddp_comm_hooks",
    f"{_DIST}.algorithms.ddp_comm_hooks.default_hooks",
    f"{_DIST}.algorithms.ddp_comm_hooks.post_localSGD_hook",
    f"{_DIST}.algorithms.ddp_comm_hooks.powerSGD_hook",
    f"{_DIST}.algorithms.join",
    f"{_DIST}.algorithms.model_averaging.averagers",
    f"{_DIST}.algorithms.model_averaging.hierarchical_model_averager",
    f"{_DIST}.autograd",
    _DCP,
    f"{_DCP}.format_utils",
    f"{_DCP}.hf_storage",
    f"{_DCP}.planner",
    f"{_DCP}.staging",
    f"{_DCP}.state_dict",
    f"{_DCP}.stateful",
    f"{_DCP}.storage",
    f"{_DIST}.device_mesh",
    f"{_DIST}.fsdp",
    f"{_DIST}.fsdp.wrap",
    f"{_DIST}.nn",
    f"{_DIST}.nn.api.remote_module",
    f"{_DIST}.nn.functional",
    f"{_DIST}.optim",
    f"{_DIST}.pipelining",
    f"{_DIST}.rpc",
    f"{_DIST}.rpc.functions",
    f"{_DIST}.rpc.options",
    f"{_DIST}.tensor",
    f"{_DIST}.tensor.debug",
    f"{_DIST}.tensor.experimental",
    f"{_DIST}.tensor.parallel",
    f"{_DIST}.tensor.placement_types",
)


@dataclass(frozen=True)
class LeftOut:
    """Names of one kind.

    Attributes:
        reason: why the catalogue does without them.
        module: which they can be imported from.
        names: in it.
    """

    reason: str
    module: str
    names: tuple[str, ...]


def _out(reason: str, module: str, names: str) -> LeftOut:
    return LeftOut(reason, module, tuple(names.split()))


_EXCEPTIONS = "exceptions"
_TYPES = "types, enumerations and constants: arguments, results or annotations"
_OWN_BACKEND = "for authors of backends"
_DEPRECATED = "deprecated"
_FSDP1 = "arguments of FSDP1, which FSDP2 supersedes"
_PRIVATE = "exported, but undocumented and for torch's own use"
_OWN_STORAGE = "parts of DCP, for authors of planners, stagers and storages"
_HUGGING_FACE = "checkpoints in safetensors files, which need another package"

LEFT_OUT = (
    _out("whether torch was built with it", _DIST, "is_available"),
    _out("whether torch was built with it", f"{_DIST}.autograd", "is_available"),
    _out("whether torch was built with it", f"{_DIST}.rpc", "is_available"),
    _out(
        _EXCEPTIONS,
        _DIST,
        "DistError DistBackendError DistNetworkError DistStoreError QueueEmptyError",
    ),
    _out(_EXCEPTIONS, _DCP, "CheckpointException"),
    _out(_TYPES, _DIST, "DebugLevel GroupMember GroupName ProcessGroup ProcessGroupGloo Store"),
    _out(_TYPES, _CORE, "default_pg_timeout"),
    _out(
        _TYPES,
        f"{_DCP}.state_dict",
        "FQNS_T PrimitiveType ValueType DictValueType ListDictValueType",
    ),
    _out(_TYPES, f"{_DCP}.state_dict", "OptimizerStateType"),
    _out(_TYPES, f"{_DCP}.stateful", "StatefulT"),
    _out(
        _OWN_BACKEND,
        _DIST,
        "AllreduceCoalescedOptions AllreduceOptions AllToAllOptions BarrierOptions",
    ),
    _out(_OWN_BACKEND, _DIST, "BroadcastOptions GatherOptions ReduceOptions ReduceScatterOptions"),
    _out(_OWN_BACKEND, _DIST, "ScatterOptions BackendConfig get_backend_config supports_complex"),
    _out(
        "how a launcher's processes find each other",
        _DIST,
        "rendezvous register_rendezvous_handler",
    ),
    _out(_DEPRECATED, _DIST, "all_gather_coalesced all_reduce_coalesced reduce_op"),
    _out(_DEPRECATED, _CORE, "reduce_op"),
    _out(_DEPRECATED, _DCP, "load_state_dict save_state_dict load_sharded_optimizer_state_dict"),
    _out(_FSDP1, f"{_DIST}.fsdp", "BackwardPrefetch CPUOffload MixedPrecision ShardingStrategy"),
    _out(
        _FSDP1, f"{_DIST}.fsdp", "StateDictConfig StateDictSettings StateDictType OptimStateKeyType"
    ),
    _out(
        _FSDP1, f"{_DIST}.fsdp", "FullStateDictConfig LocalStateDictConfig ShardedStateDictConfig"
    ),
    _out(
        _FSDP1,
        f"{_DIST}.fsdp",
        "FullOptimStateDictConfig LocalOptimStateDictConfig OptimStateDictConfig",
    ),
    _out(_FSDP1, f"{_DIST}.fsdp", "ShardedOptimStateDictConfig"),
    _out(
        _FSDP1, f"{_DIST}.fsdp.wrap", "always_wrap_policy lambda_auto_wrap_policy enable_wrap wrap"
    ),
    _out(_FSDP1, f"{_DIST}.fsdp.wrap", "transformer_auto_wrap_policy size_based_auto_wrap_policy"),
    _out(_FSDP1, f"{_DIST}.fsdp.wrap", "CustomPolicy ModuleWrapPolicy"),
    _out(
        _OWN_STORAGE,
        _DCP,
        "DefaultLoadPlanner DefaultSavePlanner LoadPlan SavePlan ReadItem WriteItem",
    ),
    _out(
        _OWN_STORAGE,
        _DCP,
        "Metadata BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata",
    ),
    _out(
        _OWN_STORAGE,
        f"{_DCP}.planner",
        "WriteItemType LoadItemType BytesIOWriteData TensorWriteData",
    ),
    _out(_OWN_STORAGE, f"{_DCP}.storage", "WriteResult"),
    _out(
        _OWN_STORAGE, f"{_DCP}.format_utils", "BroadcastingTorchSaveReader DynamicMetaLoadPlanner"
    ),
    _out(
        _OWN_STORAGE,
        f"{_DCP}.staging",
        "AsyncStager BlockingAsyncStager DefaultStager StagingOptions",
    ),
    _out(_HUGGING_FACE, _DCP, "HuggingFaceStorageReader HuggingFaceStorageWriter"),
    _out(_HUGGING_FACE, _DCP, "QuantizedHuggingFaceStorageReader"),
    _out(_PRIVATE, _DIST, "get_pg_count"),
    _out(_PRIVATE, f"{_DIST}.algorithms.ddp_comm_hooks", "DDPCommHookType register_ddp_comm_hook"),
    _out(_PRIVATE, f"{_DIST}.optim", "as_functional_optim"),
    _out(_PRIVATE, f"{_DIST}.rpc", "AllGatherStates BackendType method_factory new_method"),
    _out(
        "collectives with gradients, experimental; notebook 02 writes one by hand",
        f"{_DIST}.nn.functional",
        "broadcast gather scatter reduce reduce_scatter all_gather all_to_all all_to_all_single "
        "all_reduce",
    ),
)
