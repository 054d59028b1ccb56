"""Names of the standard library, torch and numpy that are harmless in a pickle: to import, to store and to call.

Data classes, and functions that only compute. A class stands here if its constructor and its ``__setstate__`` open no
file, import nothing, and call nothing that the pickle gives them. The few that do call their arguments are in
:data:`PASSES_ON`. Tests compare the lists with the classes and functions that are installed.
"""

from __future__ import annotations

import re
import typing
from functools import lru_cache
from typing import Final

from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.torch_facts.weights_only import DTENSOR_NAMES, WEIGHTS_ONLY_SINCE, WEIGHTS_ONLY_UNTIL


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def _names(module: str, leaves: str) -> frozenset[str]:
    return frozenset(f"{module}.{leaf}" for leaf in words(leaves))


_STANDARD_LIBRARY: Final = frozenset().union(
    _names(
        "builtins",
        "Ellipsis NotImplemented abs all any bool bytearray bytes complex dict float frozenset int len list object "
        "range round set slice str sum tuple",
    ),
    _names(
        "builtins",
        "ArithmeticError AssertionError AttributeError BaseException EOFError Exception FileNotFoundError IndexError "
        "KeyError KeyboardInterrupt NotImplementedError OSError OverflowError RuntimeError StopIteration TypeError "
        "UserWarning ValueError Warning ZeroDivisionError",
    ),
    _names("collections", "ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque"),
    _names("datetime", "date datetime time timedelta timezone tzinfo"),
    _names("functools", "partial"),
    _names("copyreg", "__newobj__ __newobj_ex__ _reconstructor"),
    _names("ipaddress", "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network"),
    _names("itertools", "count repeat"),
    _names("random", "Random SystemRandom"),
    _names("time", "monotonic perf_counter struct_time time"),
    _names("types", "GenericAlias MappingProxyType NoneType SimpleNamespace"),
    *(
        _names(
            module,
            "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        )
        for module in ("pathlib", "pathlib._local")
    ),
    *(
        _names(module, "add and_ eq floordiv ge gt le lt matmul mul ne neg not_ or_ pow sub truediv xor")
        for module in ("operator", "_operator")
    ),
    *(_names(module, "BytesIO StringIO") for module in ("io", "_io")),
    {
        "_random.Random", "argparse.Namespace", "array._array_reconstructor", "array.array", "contextlib.nullcontext",
        "dataclasses._MISSING_TYPE", "decimal.Context", "decimal.Decimal", "fractions.Fraction", "http.HTTPStatus",
        "logging.Logger", "logging.getLogger", "re.Pattern", "re.RegexFlag", "re._compile", "statistics.NormalDist",
        "uuid.SafeUUID", "uuid.UUID", "zoneinfo.ZoneInfo", "zoneinfo.ZoneInfo._unpickle",
    },
)  # fmt: skip

_NUMPY: Final = frozenset().union(
    _names(
        "numpy",
        "bool bool_ bytes_ clongdouble complex128 complex64 datetime64 double dtype float16 float32 float64 int16 "
        "int32 int64 int8 int_ intc intp longdouble longlong matrix ndarray object_ poly1d recarray record single "
        "str_ timedelta64 uint uint16 uint32 uint64 uint8 uintc uintp ulonglong void",
    ),
    _names(
        "numpy",
        "abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin cbrt ceil clip cos cosh "
        "cumsum deg2rad degrees divide equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod greater "
        "greater_equal hypot isfinite isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and "
        "logical_not logical_or logical_xor matmul max maximum mean median min minimum mod multiply nanmax nanmean "
        "nanmedian nanmin nanstd negative not_equal positive power prod rad2deg radians reciprocal remainder rint sign "
        "sin sinh sqrt square std subtract sum tan tanh true_divide trunc var",
    ),
    *(_names(f"numpy.{core}.multiarray", "_reconstruct scalar") for core in ("core", "_core")),
    *(_names(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    *(_names(f"numpy.{core}.records", "recarray record") for core in ("core", "_core")),
    *(_names(f"numpy.{module}", "MaskedArray _mareconstruct") for module in ("ma", "ma.core")),
    _names("numpy.ma.core", "MaskedConstant"),
    _names("numpy.random", "Generator MT19937 PCG64 PCG64DXSM Philox RandomState SFC64 SeedSequence"),
    _names("numpy.random", "__RandomState_ctor"),
    _names("numpy.random._pickle", "__bit_generator_ctor __generator_ctor __randomstate_ctor"),
    _names("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
    {
        "numpy.lib._polynomial_impl.poly1d", "numpy.lib.polynomial.poly1d", "numpy.matrixlib.defmatrix.matrix",
        "numpy.random._generator.Generator", "numpy.random._mt19937.MT19937", "numpy.random._pcg64.PCG64",
        "numpy.random._pcg64.PCG64DXSM", "numpy.random._philox.Philox", "numpy.random._sfc64.SFC64",
        "numpy.random.mtrand.RandomState", "numpy.rec.recarray", "numpy.rec.record",
    },
)  # fmt: skip

#: Functions of ``torch.nn.functional`` that only compute on tensors. Not those that call another function.
_FUNCTIONAL: Final = _names(
    "torch.nn.functional",
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices "
    "affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear binary_cross_entropy "
    "binary_cross_entropy_with_logits celu celu_ channel_shuffle conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout "
    "dropout1d dropout2d dropout3d elu elu_ embedding embedding_bag feature_alpha_dropout fold fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices gaussian_nll_loss "
    "gelu glu grid_sample group_norm gumbel_softmax hardshrink hardsigmoid hardswish hardtanh hardtanh_ "
    "hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss layer_norm leaky_relu leaky_relu_ linear "
    "local_response_norm log_softmax logsigmoid lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss max_pool1d "
    "max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d "
    "max_unpool2d max_unpool3d mish mse_loss multi_head_attention_forward multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss nll_loss normalize one_hot pad pairwise_distance pdist pixel_shuffle pixel_unshuffle "
    "poisson_nll_loss prelu relu relu6 relu_ rms_norm rrelu rrelu_ scaled_dot_product_attention selu selu_ sigmoid "
    "silu smooth_l1_loss soft_margin_loss softmax softmin softplus softshrink softsign tanh tanhshrink threshold "
    "threshold_ triplet_margin_loss unfold upsample upsample_bilinear upsample_nearest",
)
_INIT: Final = _names(
    "torch.nn.init",
    "calculate_gain constant constant_ dirac dirac_ eye eye_ kaiming_normal kaiming_normal_ kaiming_uniform "
    "kaiming_uniform_ normal normal_ ones_ orthogonal orthogonal_ sparse sparse_ trunc_normal_ uniform uniform_ "
    "xavier_normal xavier_normal_ xavier_uniform xavier_uniform_ zeros_",
)
_CHECKPOINT: Final = "torch.distributed.checkpoint"
_SHARD: Final = "torch.distributed._shard"
_TORCH: Final = frozenset().union(
    _FUNCTIONAL,
    _INIT,
    DTENSOR_NAMES,
    _names(
        "torch",
        "Generator Size Tensor channels_last channels_last_3d contiguous_format device dtype finfo iinfo layout "
        "memory_format preserve_format strided",
    ),
    _names("torch._C", "Generator _VariableFunctionsClass"),
    _names("torch._tensor", "Tensor _rebuild_from_type _rebuild_from_type_v2"),
    _names("torch._utils", "_rebuild_sparse_csr_tensor _rebuild_xla_tensor"),
    _names("torch.amp.grad_scaler", "GradScaler OptState _refresh_per_optimizer_state"),
    _names("torch.cuda.amp.grad_scaler", "GradScaler OptState _refresh_per_optimizer_state"),
    _names("torch.optim.swa_utils.SWALR", "_cosine_anneal _linear_anneal"),
    _names("torch.distributed._tensor", "DTensor DeviceMesh Replicate Shard"),
    _names("torch.distributed._tensor.api", "DTensor"),
    _names("torch.distributed._tensor.device_mesh", "DeviceMesh"),
    _names("torch.distributed._tensor.placement_types", "DTensorSpec Replicate Shard TensorMeta _Partial"),
    _names("torch.distributed.tensor._api", "DTensor"),
    _names(f"{_CHECKPOINT}.filesystem", "SerializationFormat _StorageInfo _StoragePrefix"),
    _names(
        f"{_CHECKPOINT}.metadata",
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    ),
    _names(
        f"{_CHECKPOINT}.planner",
        "BytesIOWriteData LoadItemType LoadPlan ReadItem SavePlan TensorWriteData WriteItem WriteItemType",
    ),
    _names(f"{_SHARD}.metadata", "ShardMetadata"),
    _names(f"{_SHARD}.sharded_tensor.api", "ShardedTensor ShardedTensor.ProcessGroupState"),
    _names(f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties"),
    _names(f"{_SHARD}.sharded_tensor.shard", "Shard"),
    _names(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec"),
    _names(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    _names("torch.distributed.fsdp.api", "BackwardPrefetch CPUOffload MixedPrecision ShardingStrategy StateDictType"),
    _names("torch.fx.immutable_collections", "immutable_dict immutable_list"),
    _names("torch.jit._pickle", "build_boollist build_doublelist build_intlist build_tensorlist restore_type_tag"),
    _names("torch.nested._internal.nested_tensor", "NestedTensor _rebuild_njt"),
    _names("torch.nn.parallel", "DataParallel DistributedDataParallel"),
    _names("torch.nn.parallel.data_parallel", "DataParallel"),
    _names("torch.nn.parallel.distributed", "DistributedDataParallel"),
    _names("torch.utils.data", "ConcatDataset Dataset IterableDataset StackDataset Subset TensorDataset"),
    _names("torch.utils.data._utils.collate", "default_collate default_convert"),
    _names("torch.utils.data.dataloader", "DataLoader"),
    _names("torch.utils.data.distributed", "DistributedSampler"),
    _names("torch.utils.hooks", "BackwardHook RemovableHandle"),
    {
        "torch._dynamo.decorators._DimRange", "torch.distributed.remote_device._remote_device",
        "torch.nn.backends.thnn._get_thnn_function_backend", "torch.nn.utils.rnn.PackedSequence",
        "torch.tensor._rebuild_from_type", "torch.torch_version.TorchVersion",
    },
)  # fmt: skip

_HARMLESS: Final = _STANDARD_LIBRARY | _NUMPY | _TORCH | frozenset(WEIGHTS_ONLY_UNTIL)

_DISTRIBUTIONS: Final = (
    "bernoulli beta binomial categorical cauchy chi2 constraints continuous_bernoulli dirichlet distribution "
    "exp_family exponential fishersnedecor gamma generalized_pareto geometric gumbel half_cauchy half_normal "
    "independent inverse_gamma kumaraswamy laplace lkj_cholesky log_normal logistic_normal "
    "lowrank_multivariate_normal mixture_same_family multinomial multivariate_normal negative_binomial normal "
    "one_hot_categorical pareto poisson relaxed_bernoulli relaxed_categorical studentT transformed_distribution "
    "transforms uniform von_mises weibull wishart"
)
_LAYERS: Final = (
    "activation adaptive batchnorm channelshuffle container conv distance dropout flatten fold instancenorm linear "
    "loss module normalization padding pixelshuffle pooling rnn sparse transformer upsampling utils"
)
_OPTIMIZERS: Final = (
    "_adafactor _muon adadelta adagrad adam adamax adamw asgd lbfgs lr_scheduler nadam optimizer radam rmsprop rprop "
    "sgd sparse_adam swa_utils"
)
_QUANTIZED: Final = (
    r"torch(?:\.ao)?\.nn\.(?:intrinsic|qat|quantizable|quantized)"
    r"(?:\.(?:_reference|dynamic|qat|quantized|reference))*\.modules"
)
_QUANTIZED_LAYERS: Final = (
    "activation batchnorm bn_relu conv conv_add conv_fused conv_relu dropout embedding_ops functional_modules fused "
    "linear linear_fused linear_relu normalization rnn sparse"
)
#: Modules whose classes are harmless: a package as a pattern, and its modules.
_FAMILIES: Final = (
    (r"torch\.distributions", _DISTRIBUTIONS),
    (r"torch\.nn", "parameter"),
    (r"torch\.nn\.modules", _LAYERS),
    (r"torch\.nn\.utils", "parametrizations parametrize prune rnn spectral_norm weight_norm"),
    (r"torch\.optim", _OPTIMIZERS),
    (r"torch\.utils\.data", "dataset distributed sampler"),
    (r"torch(?:\.ao)?\.quantization", "fake_quantize observer qconfig quant_type stubs"),
    (_QUANTIZED, _QUANTIZED_LAYERS),
)
#: A class; not a type variable or a constant.
_CLASS: Final = r"(?:_?[A-Z]\w*[a-z]\w*|[A-Z][A-Z0-9]+)"
_MODULES: Final = (
    r"torch\.(?:nn|optim)",
    *(rf"{package}\.(?:{modules.replace(' ', '|')})" for package, modules in _FAMILIES),
)
# Compiled on first use: the names of most checkpoints are in the lists.
_FAMILY: Final = rf"(?:{'|'.join(_MODULES)})\.({_CLASS})"
#: What modules of families import, or define, that is no class of theirs.
_FOREIGN: Final = frozenset(typing.__all__) | words(
    "ABC ABCMeta EPS Enum Function Mapping MutableMapping Node Number OpaqueBase Real Sequence TypeAliasType "
    "_Dirichlet_backward _Reduction"
)
#: Functions of torch's C++ on tensors, some of which are pickled as attributes of a class, and other tables of names.
_PATTERNS: Final = (
    r"torch\.return_types\.[a-z_0-9]+"
    r"|torch\._C\.(?:_nn|_VariableFunctionsClass)\.(?!from_file)[a-z][a-z0-9_]*"
    r"|numpy\.dtypes\.[A-Z]\w*DType"
    r"|numpy\.polynomial\.(?:chebyshev|hermite|hermite_e|laguerre|legendre|polynomial)\.[A-Z]\w*"
    r"|c?math\.[a-z][a-z0-9]*"
    r"|typing\.(?!ForwardRef|NamedTuple|NewType|TypedDict)[A-Z]\w*"
    r"|collections\.abc\.[A-Z]\w*"
)
#: Constants of torch that a pickler has found through a module of torch that imports torch itself.
_THROUGH_TORCH: Final = r"torch\.(?:\w+\.)+torch\.(\w+)"
_CONSTANTS: Final = frozenset(ITEM_BYTES) | words(
    "channels_last channels_last_3d contiguous_format preserve_format strided"
)
#: A member of an enum, or another constant of a class.
_CONSTANT: Final = re.compile(r"[A-Z][A-Z0-9_]+")
#: Most characters of a harmless name.
_LONGEST: Final = 150


@lru_cache(maxsize=4096)
def is_harmless(name: str) -> bool:
    """Whether a name of the standard library, torch or numpy is harmless."""
    if len(name) > _LONGEST:  # patterns would take a time that grows with the square of the length
        return False
    holder, _, leaf = name.rpartition(".")
    return _is_listed(name) or (_CONSTANT.fullmatch(leaf) is not None and is_class(holder))


def is_class(name: str) -> bool:
    """Whether a name is that of a harmless class of the standard library, torch or numpy."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper() and _is_listed(name)


def _is_listed(name: str) -> bool:
    if name in _HARMLESS or name in WEIGHTS_ONLY_SINCE:
        return True
    if (match := re.fullmatch(_THROUGH_TORCH, name)) is not None:
        return match[1] in _CONSTANTS
    match = re.fullmatch(_FAMILY, name)
    return match[1] not in _FOREIGN if match else re.fullmatch(_PATTERNS, name) is not None
