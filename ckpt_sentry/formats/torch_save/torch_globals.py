"""
Stand-ins for the globals that a `torch.save` file may name: they keep shapes and places, and hold no data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from ckpt_sentry.core.inventory import Entry
from ckpt_sentry.core.report import Shape
from ckpt_sentry.formats.elements import contiguous_strides
from ckpt_sentry.formats.torch_save.machine import MAX_ARGUMENTS
from ckpt_sentry.formats.torch_save.unpickle import Allowed, Opaque, UnreadablePickle, mapping, record

_MAX_RANK: Final = 64
_MAX_SIZE: Final = 2**62
_MAX_ELEMENTS: Final = 2**63


class Dtype(NamedTuple):
    """
    A dtype by name; also a storage class, which stands for the dtype of its elements.
    """

    name: str


class Storage(NamedTuple):
    """
    A storage of the file, by the key that names its bytes. `nbytes` is its size.
    """

    key: str
    dtype: str
    nbytes: int

    @staticmethod
    def from_id(saved: object) -> object:
        """
        Turn the persistent id `("storage", class, key, location, numel, …)` into a storage.

        Anything else that torch writes there (`("module", class, …)`) stands for its second item.
        """
        match saved:
            case ("storage", Dtype(name), str(key), _, int(numel), *_) if 0 <= numel < _MAX_SIZE:
                return Storage(key, name, numel * Entry((1,), name).nbytes)
            case ("module", container, *_):
                return container
        raise UnreadablePickle("refers to a storage in an unknown way")


class Tensor(NamedTuple):
    """
    A tensor: `offset` and `strides` in elements of its storage. `storage` is None where no plain bytes stand for it.
    """

    dtype: str
    shape: Shape
    storage: Storage | None
    offset: int
    strides: tuple[int, ...]


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_RANK:
        raise UnreadablePickle("has a tensor with a bad shape")
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in value):
        raise UnreadablePickle("has a tensor with a bad shape")
    return tuple(value)


def _shape(value: object) -> Shape:
    """
    Sizes of which torch could make a tensor; without the limit, a few bytes would stand for strides of many digits.
    """
    shape = _sizes(value)
    if math.prod(filter(None, shape)) >= _MAX_ELEMENTS:
        raise UnreadablePickle("has a tensor with a bad shape")
    return shape


def _tensor(dtype: object, size: object, stride: object, storage: Storage | None, offset: object = 0) -> Tensor:
    shape, strides = _shape(size), _sizes(stride)
    if len(shape) != len(strides) or type(offset) is not int or not 0 <= offset < _MAX_SIZE:
        raise UnreadablePickle("has a tensor with bad strides")
    return Tensor(dtype.name if isinstance(dtype, Dtype) else str(dtype), shape, storage, offset, strides)


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> Tensor:
    if not isinstance(storage, Storage):
        raise UnreadablePickle("has a tensor without a storage")
    return _tensor(Dtype(storage.dtype), size, stride, storage, offset)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    _grad: object,
    _hooks: object,
    dtype: object,
    *_: object,
) -> Tensor:
    return _tensor(dtype, size, stride, storage if isinstance(storage, Storage) else None, offset)


def _rebuild_quantized(storage: object, _offset: object, size: object, stride: object, *_: object) -> Tensor:
    dtype = Dtype(storage.dtype) if isinstance(storage, Storage) else Dtype("quantized")
    return _tensor(dtype, size, stride, None)


def _rebuild_meta(dtype: object, size: object, stride: object, *_: object) -> Tensor:
    return _tensor(dtype, size, stride, None)


def _rebuild_subclass(_class: object, dtype: object, size: object, stride: object, *_: object) -> Tensor:
    return _tensor(dtype, size, stride, None)


def _rebuild_sparse(layout: object, data: object, *_: object) -> Tensor:
    match layout, data:
        case ("torch.sparse_coo", (_, Tensor() as values, size, *_)):
            pass
        case (_, (_, _, Tensor() as values, size)):
            pass
        case _:
            raise UnreadablePickle("has a sparse tensor of an unknown layout")
    shape = _shape(size)
    return Tensor(values.dtype, shape, None, 0, contiguous_strides(shape))


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(function: object, _type: object, args: object, *_: object) -> object:
    if not isinstance(args, tuple) or len(args) > MAX_ARGUMENTS:
        raise UnreadablePickle("rebuilds a tensor from no arguments it could have")
    if isinstance(function, Opaque) or not callable(function):
        return Opaque("torch._tensor", "_rebuild_from_type_v2", args)
    return function(*args)


def _size(values: object = ()) -> tuple[int, ...]:
    return _sizes(values)


def _layout(name: object) -> object:
    return name


def _defaultdict(_factory: object = None, pairs: object = ()) -> dict[object, object]:
    return mapping(pairs)


def _no_data(*_: object) -> bytes:
    return b""


def _set(values: object = ()) -> list[object]:
    return list(values) if isinstance(values, (list, tuple)) else []


_STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
_DTYPES: Final = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex32",
    "complex64",
    "complex128",
    "qint8",
    "quint8",
    "qint32",
    "quint4x2",
    "quint2x4",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "uint16",
    "uint32",
    "uint64",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
)
_SCHEMES: Final = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
_REBUILD: Final[dict[str, Callable[..., object]]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
    "_rebuild_qtensor": _rebuild_quantized,
    "_rebuild_sparse_tensor": _rebuild_sparse,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta,
    "_rebuild_wrapper_subclass": _rebuild_subclass,
    "_rebuild_device_tensor_from_cpu_tensor": _rebuild_parameter,
}
_DTENSOR: Final = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta"),
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"),
    ("torch.distributed.tensor.placement_types", "Partial"),
    ("torch.distributed.tensor.placement_types", "Replicate"),
    ("torch.distributed.tensor.placement_types", "Shard"),
    ("torch.distributed.tensor.placement_types", "_StridedShard"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
)

_BUILTINS: Final = ("builtins", "__builtin__")  # protocol 2, torch's own, writes the name that Python 2 had
_BUILT_IN: Final[dict[str, Callable[..., object]]] = {
    "dict": mapping,
    "set": _set,
    "bytearray": _no_data,
    "complex": record("builtins", "complex"),
}

ALLOWED: Final[Allowed] = {
    **{("torch._utils", name): function for name, function in _REBUILD.items()},
    **{(module, name): Dtype(dtype) for name, dtype in _STORAGES.items() for module in ("torch", "torch.cuda")},
    **{("torch", name): Dtype(name) for name in _DTYPES},
    **{("torch", name): name for name in _SCHEMES},
    **{(module, name): record(module, name) for module, name in _DTENSOR},
    ("torch.storage", "UntypedStorage"): Dtype("uint8"),
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.nn.parameter", "Parameter"): record("torch.nn.parameter", "Parameter"),
    ("torch", "Tensor"): record("torch", "Tensor"),
    ("torch", "Size"): _size,
    ("torch", "device"): record("torch", "device"),
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): mapping,
    ("collections", "Counter"): mapping,
    ("collections", "defaultdict"): _defaultdict,
    **{(module, name): built for module in _BUILTINS for name, built in _BUILT_IN.items()},
    ("_codecs", "encode"): _no_data,
}
"""What `torch.load(weights_only=True)` allows, and two dict types of the standard library."""
