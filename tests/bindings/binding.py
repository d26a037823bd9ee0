"""A binding for Python in small: ctypes, NumPy arrays that a layer borrows, a file opened once,
halves of the keys merged, gradients by way of a tape. The structs are written down from mha.h;
docs/layouts.md has their sizes.

    binding.py <path of libmha.so>
"""

import ctypes as c
import gc
import os
import sys
import tempfile
import weakref

try:
    import numpy as np
except ImportError:
    print("SKIPPED: there is no NumPy")
    sys.exit(77)

lib = c.CDLL(sys.argv[1])
floats = c.POINTER(c.c_float)


class Struct(c.Structure):
    """One that begins with its own size: prepared by the library, then filled in."""

    def __init__(self, **members):
        super().__init__()
        lib.mha_struct_init(c.byref(self), c.c_size_t(c.sizeof(self)))
        for name, value in members.items():
            setattr(self, name, value)


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("message", c.c_char * 512)]


class Config(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("flags", c.c_uint32), ("scale", c.c_float), ("softcap", c.c_float)]
        + [(n, c.c_int64) for n in ("n_heads", "n_kv_heads", "head_size", "value_head_size")]
        + [(n, c.c_int64) for n in ("query_width", "key_width", "value_width", "output_width")]
        + [("norm", c.c_int32), ("norm_epsilon", c.c_float), ("rope", c.c_int32), ("reserved", c.c_int32)]
        + [("rotary_size", c.c_int64), ("rope_base", c.c_double), ("rope_positions", c.c_int64)]
        + [("rope_cos", floats), ("rope_sin", floats), ("allocator", c.c_void_p)]
    )


Release = c.CFUNCTYPE(None, c.c_void_p)


class Matrices(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("orientation", c.c_int32), ("ownership", c.c_int32)]
        + [(n, c.c_void_p) for n in ("query", "key", "value", "output")]
        + [(n + "_element", c.c_int32) for n in ("query", "key", "value", "output")]
        + [(n + "_ld", c.c_int64) for n in ("query", "key", "value", "output")]
        + [(n + "_bias", floats) for n in ("query", "key", "value", "output")]
        + [(n, floats) for n in ("query_norm", "key_norm", "sinks")]
        + [("release", Release), ("release_user", c.c_void_p)]
    )


class Tensor(c.Structure):
    _fields_ = (
        [("data", c.c_void_p)]
        + [(n, c.c_int64) for n in ("batch", "length", "heads", "size")]
        + [(n + "_stride", c.c_int64) for n in ("batch", "row", "head", "size")]
        + [("element", c.c_int32), ("reserved", c.c_int32)]
    )


class Results(Struct):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("stage", c.c_int32),
        ("reserved", c.c_int32),
        ("weights", c.c_void_p),
        ("average", c.c_void_p),
        ("log_sum_exp", c.c_void_p),
    ]


class AttendArgs(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("flags", c.c_uint32), ("reserved", c.c_int32)]
        + [("n_sequences", c.c_int64), ("output", c.c_void_p)]
        + [("output_%s_stride" % n, c.c_int64) for n in ("batch", "row", "head")]
        + [("rules", c.c_void_p), ("results", c.POINTER(Results))]
    )


class ForwardArgs(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("flags", c.c_uint32), ("accumulate", c.c_int32)]
        + [("cache_mode", c.c_int32), ("reserved", c.c_int32)]
        + [(n, c.c_int64) for n in ("batch", "query_length", "key_length")]
        + [(n, c.c_void_p) for n in ("query", "key", "value", "output")]
        + [("%s_%s_stride" % (a, n), c.c_int64)
           for a in ("query", "key", "value", "output") for n in ("batch", "row")]
        + [("rules", c.c_void_p), ("results", c.POINTER(Results)), ("cache", c.c_void_p)]
        + [(n, c.c_void_p) for n in ("cache_entries", "new_lengths", "expected_lengths")]
        + [(n, c.c_int64) for n in ("query_position", "key_position")]
        + [(n, c.c_void_p) for n in ("query_positions", "key_positions", "tape")]
    )


class BackwardArgs(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("flags", c.c_uint32), ("accumulate", c.c_int32)]
        + [("dy", c.c_void_p), ("dy_batch_stride", c.c_int64), ("dy_row_stride", c.c_int64)]
        + [("d_" + n, c.c_void_p) for n in ("query", "key", "value", "wq", "wk", "wv", "wo")]
        + [("d_" + n, c.c_void_p) for n in ("bq", "bk", "bv", "bo", "query_norm", "key_norm")]
        + [("d_" + n, c.c_void_p) for n in ("bias", "alibi_slopes", "sinks")]
        + [("tape", c.c_void_p)]
    )


class MergeArgs(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("flags", c.c_uint32), ("reserved", c.c_int32)]
        + [("n_parts", c.c_int64), ("outputs", c.POINTER(Tensor))]
        + [("log_sum_exps", c.POINTER(c.c_void_p)), ("sinks", floats), ("output", c.c_void_p)]
        + [("output_%s_stride" % n, c.c_int64) for n in ("batch", "row", "head")]
        + [("log_sum_exp", c.c_void_p)]
    )


class LayerInfo(Struct):
    _fields_ = (
        [("struct_size", c.c_size_t), ("prefix", c.c_char_p), ("family", c.c_char_p)]
        + [("orientation", c.c_int32), ("is_complete", c.c_int32)]
        + [("missing", c.c_char_p), ("unsupported", c.c_char_p), ("parts", c.c_int64 * 13)]
    )


OUT_IN, BORROW = 2, 1


class MhaError(Exception):
    pass


def call(name, *arguments):
    """Calls a function whose last parameter is the error; a message becomes an exception."""
    error = Error()
    status = getattr(lib, name)(*arguments, c.byref(error))
    assert status == error.status
    if status != 0:
        raise MhaError(error.message.decode())


class Handle:
    """Owns one of the library's objects."""

    def __init__(self, kind, create, *arguments):
        self.pointer = c.c_void_p()
        call(create, *arguments, c.byref(self.pointer))
        destroy = getattr(lib, "mha_%s_destroy" % kind)
        weakref.finalize(self, destroy, c.c_void_p(self.pointer.value))


kept = {}  # what layers borrow, by a number that the library hands back


@Release
def give_back(user):
    del kept[user]


def borrow(heads, wq, wk, wv, wo):
    """A layer over NumPy arrays [out][in], which it keeps alive."""
    arrays = [np.ascontiguousarray(w, dtype=np.float32) for w in (wq, wk, wv, wo)]
    number = len(kept) + 1
    matrices = Matrices(orientation=OUT_IN, ownership=BORROW, release=give_back, release_user=number)
    for name, array in zip(("query", "key", "value", "output"), arrays):
        setattr(matrices, name, array.ctypes.data)
    config = Config(n_heads=heads, query_width=arrays[0].shape[1])
    layer = Handle("weights", "mha_weights_create", c.byref(config), c.byref(matrices))
    kept[number] = arrays
    return layer


def self_attention(context, layer, x):
    batch, length, _ = x.shape
    y = np.empty_like(x)
    call("mha_self_attention", context.pointer, layer.pointer, c.c_void_p(x.ctypes.data),
         c.c_int64(batch), c.c_int64(length), c.c_void_p(y.ctypes.data))
    return y


def gradients(context, layer, tape, x, dy):
    """Those of x and Wq, by way of a tape."""
    y, d_x, d_wq = np.empty_like(x), np.empty_like(x), np.empty((x.shape[2],) * 2, np.float32)
    args = ForwardArgs(batch=x.shape[0], query_length=x.shape[1], query=x.ctypes.data,
                       output=y.ctypes.data, tape=tape.pointer)
    back = BackwardArgs(dy=dy.ctypes.data, d_query=d_x.ctypes.data, d_wq=d_wq.ctypes.data,
                        tape=tape.pointer)
    call("mha_forward", context.pointer, layer.pointer, c.byref(args))
    call("mha_backward", context.pointer, layer.pointer, c.byref(args), c.byref(back))
    return d_x, d_wq


def by_hand(x, heads, wq, wk, wv, wo):
    """The layer in NumPy, in double precision."""
    x = x.astype(np.float64)
    b, n, e = x.shape
    q, k, v = ((x @ w.astype(np.float64).T).reshape(b, n, heads, -1).transpose(0, 2, 1, 3)
               for w in (wq, wk, wv))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(b, n, e) @ wo.astype(np.float64).T


def tensor(array):
    return Tensor(array.ctypes.data, *array.shape, 0, 0, 0, 0, 0, 0)


def attend(context, q, k, v):
    y = np.empty(q.shape, np.float32)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    results = Results(log_sum_exp=lse.ctypes.data)
    args = AttendArgs(output=y.ctypes.data, results=c.pointer(results))
    call("mha_attend", context.pointer, c.byref(tensor(q)), c.byref(tensor(k)), c.byref(tensor(v)),
         c.byref(args))
    return y, lse


def main():
    random = np.random.default_rng(7)
    heads, e = 4, 24
    w = [random.normal(0, 0.3, (e, e)).astype(np.float32) for _ in range(4)]
    x = random.normal(size=(2, 11, e)).astype(np.float32)
    context = Handle("context", "mha_context_create", None)

    layer = borrow(heads, *[m.copy() for m in w])
    gc.collect()
    assert len(kept) == 1, "the layer keeps what it borrows"
    y = self_attention(context, layer, x)
    assert np.abs(y - by_hand(x, heads, *w)).max() < 1e-4

    dy, u = (random.normal(size=x.shape).astype(np.float32) for _ in range(2))
    wu = random.normal(size=w[0].shape).astype(np.float32)
    tape = Handle("tape", "mha_tape_create", None)
    d_x, d_wq = gradients(context, layer, tape, x, dy)
    h = 1e-4  # differences in double precision
    along_x = (by_hand(x.astype(np.float64) + h * u, heads, *w)
               - by_hand(x.astype(np.float64) - h * u, heads, *w)) / (2 * h)
    along_wq = (by_hand(x, heads, w[0].astype(np.float64) + h * wu, *w[1:])
                - by_hand(x, heads, w[0].astype(np.float64) - h * wu, *w[1:])) / (2 * h)
    assert abs((along_x * dy).sum() - (d_x * u).sum()) < 1e-3 * np.abs(d_x * u).sum()
    assert abs((along_wq * dy).sum() - (d_wq * wu).sum()) < 1e-3 * np.abs(d_wq * wu).sum()

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "layer.safetensors").encode()
        call("mha_weights_save", layer.pointer, path, b"a.")
        file = Handle("file", "mha_file_open", path, None)
        info = LayerInfo()
        call("mha_file_layer", file.pointer, c.c_int64(0), c.byref(info))
        assert info.prefix == b"a." and info.is_complete and info.unsupported is None
        config = Config(n_heads=heads)
        loaded = [Handle("weights", "mha_weights_load_from", c.byref(config), file.pointer, info.prefix)
                  for _ in range(2)]
        del file
        for one in loaded:
            assert np.array_equal(self_attention(context, one, x), y)
        try:
            Handle("weights", "mha_weights_load", c.byref(config), path, b"b.")
            raise AssertionError("a layer that is not there is an exception")
        except MhaError as error:
            assert "b." in str(error)

    del layer
    gc.collect()
    assert not kept, "the last reference gives the arrays back"

    q, k, v = (random.normal(size=(2, 9, 4, 5)).astype(np.float32) for _ in range(3))
    whole, whole_lse = attend(context, q, k, v)
    parts = [attend(context, q, np.ascontiguousarray(k[:, s]), np.ascontiguousarray(v[:, s]))
             for s in (slice(0, 2), slice(2, 9))]
    merged, lse = np.empty_like(whole), np.empty_like(whole_lse)
    outputs = (Tensor * 2)(*[tensor(p[0]) for p in parts])
    sums = (c.c_void_p * 2)(*[p[1].ctypes.data for p in parts])
    args = MergeArgs(n_parts=2, outputs=outputs, log_sum_exps=sums, output=merged.ctypes.data,
                     log_sum_exp=lse.ctypes.data)
    call("mha_merge", c.byref(args))
    assert np.abs(merged - whole).max() < 1e-5 and np.abs(lse - whole_lse).max() < 1e-5


main()
