#!/usr/bin/env python3
"""Writes corpus/npy, corpus/safetensors, corpus/cache and corpus/gguf: good_... is accepted by the reader, bad_... refused.

    tests/fuzz/make_corpus.py
"""
import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"


def write(folder, files):
    path = CORPUS / folder
    path.mkdir(parents=True, exist_ok=True)
    for old in path.iterdir():
        old.unlink()
    for name, content in files.items():
        (path / name).write_bytes(content)


# ---- .npy ----


def npy_dict(descr="'<f4'", order="False", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def npy(text=None, numbers=bytes(8), version=(1, 0), length=None, **fields):
    header = (npy_dict(**fields) if text is None else text).encode("latin-1") + b"\n"
    form = "<H" if version[0] == 1 else "<I"
    size = len(header) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack(form, size) + header + numbers


FLOATS = struct.pack("<6f", 0.0, -1.5, 1e-40, 3e38, float("inf"), float("nan"))
DOUBLES = struct.pack("<3d", 1e300, -0.1, float("nan"))
HALVES = bytes([0x00, 0x3C, 0x01, 0x00, 0xFF, 0x7B, 0x00, 0x7C, 0x01, 0xFE, 0x00, 0x80])

NPY = {
    "good_floats": npy(numbers=FLOATS, shape="(2, 3)"),
    "good_column_major": npy(numbers=FLOATS, shape="(2, 3)", order="True"),
    "good_column_major_rank3": npy(numbers=FLOATS, shape="(1, 3, 2)", order="True"),
    "good_big_endian": npy(descr="'>f4'"),
    "good_doubles": npy(descr="'<f8'", shape="(3,)", numbers=DOUBLES),
    "good_big_endian_doubles": npy(descr="'>f8'", shape="(3,)", numbers=DOUBLES),
    "good_halves": npy(descr="'<f2'", shape="(6,)", numbers=HALVES),
    "good_integers": npy(descr="'<i4'", shape="(2, 1)", numbers=b"\xff\xff\xff\xff\1\0\0\0"),
    "good_long_integers": npy(descr="'>i8'", shape="(1,)"),
    "good_bytes": npy(descr="'|u1'", shape="(3,)", numbers=b"\0\1\xff"),
    "good_truths": npy(descr="'|b1'", shape="(1, 3)", order="True", numbers=b"\0\1\2"),
    "good_scalar": npy(shape="()", numbers=bytes(4)),
    "good_empty": npy(shape="(0,)", numbers=b""),
    "good_empty_rows": npy(shape="(3, 0)", order="True", numbers=b""),
    "good_rank8": npy(shape="(1, 1, 1, 1, 1, 1, 1, 2)"),
    "good_version2": npy(version=(2, 0)),
    "good_version3": npy(version=(3, 0)),
    "good_other_order": npy("{'shape': (2,), 'descr': '<f4', 'fortran_order': False}"),
    "good_quotes_and_spaces": npy('  {"descr" :\t"<f4","shape":( 2 , ),"fortran_order":False}  '),
    "bad_nothing": b"",
    "bad_magic": b"\x93NUMPZ" + npy()[6:],
    "bad_zeros": bytes(10),
    "bad_cut_magic": b"\x93NUM",
    "bad_cut_version": b"\x93NUMPY\1",
    "bad_cut_length": b"\x93NUMPY\2\0\x40\0",
    "bad_cut_header": npy()[:40],
    "bad_version0": npy(version=(0, 0)),
    "bad_version4": npy(version=(4, 0)),
    "bad_minor_version": npy(version=(1, 1)),
    "bad_length_beyond_file": npy(length=60000),
    "bad_length_4gib": b"\x93NUMPY\2\0\xf0\xff\xff\xff",
    "bad_length_into_numbers": npy(length=len(npy_dict()) + 5),
    "bad_length_0": npy(length=0),
    "bad_short_numbers": npy(numbers=bytes(7)),
    "bad_long_numbers": npy(numbers=bytes(9)),
    "bad_structured": npy(descr="[('a', '<f4')]"),
    "bad_objects": npy(descr="'|O'"),
    "bad_no_byte_order": npy(descr="'f4'"),
    "bad_native_order": npy(descr="'=f4'"),
    "bad_empty_descr": npy(descr="''"),
    "bad_unknown_descr": npy(descr="'<ixy'"),
    "bad_complex": npy(descr="'<c8'"),
    "bad_descr_without_end": npy("{'descr': '<f4"),
    "bad_escape": npy(descr="'<f\\x34'"),
    "bad_truth_case": npy(order="false"),
    "bad_truth_number": npy(order="0"),
    "bad_negative_dimension": npy(shape="(-2,)"),
    "bad_leading_zero": npy(shape="(02,)"),
    "bad_long_dimension": npy(shape="(2L,)"),
    "bad_number_in_brackets": npy(shape="(2)"),
    "bad_shape_without_end": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,"),
    "bad_dimension_overflow": npy(shape="(99999999999999999999,)"),
    "bad_product_overflow": npy(shape="(4294967296, 4294967296)"),
    "bad_bytes_overflow": npy(shape="(4611686018427387904,)"),
    "bad_zero_hides_overflow": npy(shape="(0, 4294967296, 4294967296)", numbers=b""),
    "bad_rank9": npy(shape="(1, 1, 1, 1, 1, 1, 1, 1, 2)"),
    "bad_missing_key": npy("{'descr': '<f4', 'shape': (2,)}"),
    "bad_key_twice": npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"),
    "bad_unknown_key": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}"),
    "bad_text_behind": npy(npy_dict() + " x"),
}

# ---- safetensors ----


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, (bytes, str)) else json.dumps(header, separators=(",", ":"))
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape, begin=0, end=None, dtype="F32"):
    size = {"F64": 8, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}.get(dtype, 1)
    for extent in shape:
        size *= extent
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size if end is None else end]}


def one(text, data=bytes(4)):
    """A file with the tensor "a" whose three members are `text`."""
    return safetensors('{"a":{' + text + "}}", data)


def layer(names, dtype="F32", square=(1, 1), packed=None):
    """Tensors of those names one behind the other, and zeros behind them."""
    header, at = {}, 0
    for name in names:
        shape = [square[0]] if "bias" in name or name.startswith("b_") else list(square)
        if packed and name == packed[0]:
            shape = list(packed[1])
        header[name] = tensor(shape, at, dtype=dtype)
        at = header[name]["data_offsets"][1]
    return safetensors(header, bytes(at))


F32 = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'

SAFETENSORS = {
    "good_one": one(F32),
    "good_nan": one(F32, b"\1\0\xc0\x7f"),
    "good_scalar": safetensors({"a": tensor([])}, bytes(4)),
    "good_empty_tensor": safetensors({"a": tensor([0, 3])}),
    "good_no_tensor": safetensors("{}"),
    "good_spaces": safetensors('{"a":{' + F32 + "}}     ", bytes(4)),
    "good_unaligned": safetensors('{"a":{' + F32 + "}} ", bytes(4)),
    "good_metadata": safetensors({"__metadata__": {"format": "pt"}, "a": tensor([1])}, bytes(4)),
    "good_empty_metadata": safetensors({"__metadata__": {}}),
    "good_escaped_names": safetensors(
        '{"a\\"b":{' + F32 + '},"\\u0041":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)
    ),
    "good_types": safetensors(
        {
            "d": tensor([1], 0, dtype="F64"),
            "h": tensor([3], 8, dtype="F16"),
            "b": tensor([1], 14, dtype="BF16"),
            "f": tensor([1], 16),
        },
        struct.pack("<d", 1e300) + HALVES[:6] + b"\x80\x7f" + struct.pack("<f", 1e-40),
    ),
    "good_other_type": safetensors({"a": tensor([2], dtype="I64")}, bytes(16)),
    "good_unknown_type": safetensors({"a": tensor([3], dtype="F8_XYZ")}, bytes(3)),
    "good_pytorch": layer(
        ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"],
        square=(1, 1),
        packed=("in_proj_weight", (3, 1)),
    ),
    "good_hugging_face": layer(["a." + n + "_proj.weight" for n in "qkvo"], "F16"),
    "good_two_layers": layer(
        [p + n + ".weight" for p in "ab" for n in ("query", "key", "value")] , "BF16"
    ),
    "good_gpt2": layer(
        ["h.c_attn.weight", "h.c_proj.weight"], square=(1, 1), packed=("h.c_attn.weight", (1, 3))
    ),
    "good_article": layer(["W_Q", "W_K", "W_V", "W_O", "b_Q"], "F64"),
    "good_unsupported": layer(["q_proj.weight", "k_proj.weight", "bias_k", "sinks"]),
    "bad_nothing": b"",
    "bad_7_bytes": bytes(7),
    "bad_length_only": struct.pack("<Q", 2),
    "bad_length_0": safetensors("", b"{}"),
    "bad_length_ff": b"\xff" * 8 + b"{}",
    "bad_length_wraps": struct.pack("<Q", 2**64 - 6) + b"{}",
    "bad_length_beyond_file": safetensors("{}", length=3),
    "bad_length_100_million": safetensors("{}", length=100_000_001),
    "bad_length_short": safetensors('{"a":{' + F32 + "}}", bytes(4), length=12),
    "bad_no_brace": safetensors("[]"),
    "bad_space_before": safetensors(" {}"),
    "bad_garbage_behind": safetensors("{} x"),
    "bad_zero_byte_behind": safetensors(b"{}\0"),
    "bad_json": safetensors("{,}"),
    "bad_not_utf8": safetensors(b'{"\xff":{' + F32.encode() + b"}}", bytes(4)),
    "bad_control_in_name": safetensors('{"a\\u001b":{' + F32 + "}}", bytes(4)),
    "bad_zero_in_name": safetensors('{"a\\u0000b":{' + F32 + "}}", bytes(4)),
    "bad_lone_surrogate": safetensors('{"\\ud800":{' + F32 + "}}", bytes(4)),
    "bad_nested": safetensors("{" + '"a":[' + "[" * 400),
    "bad_metadata_number": safetensors('{"__metadata__":{"a":1}}'),
    "bad_metadata_nested": safetensors('{"__metadata__":{"a":{}}}'),
    "bad_name_twice": safetensors('{"a":{' + F32 + '},"a":{' + F32 + "}}", bytes(4)),
    "bad_member_twice": one('"dtype":"F32",' + F32),
    "bad_tensor_is_number": safetensors('{"a":1}'),
    "bad_no_dtype": one('"shape":[1],"data_offsets":[0,4]'),
    "bad_no_shape": one('"dtype":"F32","data_offsets":[0,4]'),
    "bad_no_offsets": one('"dtype":"F32","shape":[1]', b""),
    "bad_one_offset": one('"dtype":"F32","shape":[1],"data_offsets":[0]'),
    "bad_three_offsets": one('"dtype":"F32","shape":[1],"data_offsets":[0,4,4]'),
    "bad_end_before_begin": one('"dtype":"F32","shape":[1],"data_offsets":[4,0]'),
    "bad_negative_offset": one('"dtype":"F32","shape":[1],"data_offsets":[-4,0]'),
    "bad_real_offset": one('"dtype":"F32","shape":[1],"data_offsets":[0,4.0]'),
    "bad_huge_offset": one('"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551620]'),
    "bad_unknown_type_far": one(
        '"dtype":"F8_XYZ","shape":[4],"data_offsets":[1152921504606846976,1152921504606846980]'
    ),
    "bad_negative_shape": one('"dtype":"F32","shape":[-1],"data_offsets":[0,4]'),
    "bad_shape_overflow": one('"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]'),
    "bad_size_mismatch": one('"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]'),
    "bad_rank9": one('"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]'),
    "bad_trailing_byte": one(F32, bytes(5)),
    "bad_hole": safetensors({"a": tensor([1]), "b": tensor([1], 8)}, bytes(12)),
    "bad_overlap": safetensors({"a": tensor([2]), "b": tensor([1], 4)}, bytes(8)),
}

# ---- GGUF ----

FORMS = ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<B", None, None, "<Q", "<q", "<d"]
U32, F32_VALUE, STRING, ARRAY = 4, 6, 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 14: (256, 210), 28: (1, 8), 30: (1, 2)}


def text(string):
    string = string.encode() if isinstance(string, str) else string
    return struct.pack("<Q", len(string)) + string


def value(kind, content):
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        element, items = content
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, item) for item in items)
    return struct.pack(FORMS[kind], content)


def pair(key, kind, content):
    return text(key) + struct.pack("<I", kind) + value(kind, content)


def described(name, shape, kind, offset):
    """Of a shape in the order of the other formats, the fastest dimension last."""
    dimensions = b"".join(struct.pack("<Q", extent) for extent in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


def raw_gguf(tensors=(), pairs=(), data=b"", version=3, n_tensors=None, n_pairs=None, alignment=32):
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def gguf(tensors, pairs=(), alignment=32, **others):
    """Tensors (name, shape, type) one behind the other, and zeros behind them."""
    described_ones, at = [], 0
    for name, shape, kind in tensors:
        block, size = BLOCKS[kind]
        described_ones.append(described(name, shape, kind, at))
        for extent in shape:
            size *= extent
        at += -(-size // block // alignment) * alignment
    return raw_gguf(described_ones, pairs, bytes(at), alignment=alignment, **others)


def model(architecture="llama", heads=2, kv_heads=1, size=16):
    return [
        pair("general.architecture", STRING, architecture),
        pair(architecture + ".attention.head_count", U32, heads),
        pair(architecture + ".attention.head_count_kv", ARRAY, (U32, [kv_heads] * 2)),
        pair(architecture + ".attention.key_length", U32, size),
        pair(architecture + ".rope.freq_base", F32_VALUE, 5e5),
        pair(architecture + ".attention.layer_norm_rms_epsilon", F32_VALUE, 1e-6),
    ]


def block(prefix, kind, width=32, q=32, k=16):
    shapes = {"attn_q": [q, width], "attn_k": [k, width], "attn_v": [k, width], "attn_output": [width, q]}
    return [(prefix + name + ".weight", shape, kind) for name, shape in shapes.items()]


def one_tensor(shape=(1,), kind=0, offset=0, data=bytes(32), name="w"):
    return raw_gguf([described(name, shape, kind, offset)], (), data)


# ---- entries of a cache ----


def entry(n=3, length=None, kind="F32", size=32, extra=None, **changes):
    """A file of mha_cache_save: n tokens of one head."""
    metadata = {"libmha.cache": "1", "type": kind, "length": str(n if length is None else length),
                "n_kv_heads": "1", "head_size": str(size), "value_head_size": str(size)}
    metadata.update(changes)
    dtype, row = {"F32": ("F32", size * 4), "F16": ("F16", size * 2), "BF16": ("BF16", size * 2),
                  "Q8_0": ("U8", size // 32 * 34)}[kind]
    width = row if dtype == "U8" else size
    header = {"__metadata__": metadata, "k": tensor([n, 1, width], 0, n * row, dtype),
              "v": tensor([n, 1, width], n * row, 2 * n * row, dtype)}
    header.update(extra or {})
    return safetensors(header, bytes(2 * n * row))


CACHE = {
    "good_entry": entry(),
    "good_empty": entry(0),
    "good_blocks": entry(2, kind="Q8_0"),
    "good_ring": entry(30, length=1000),
    "good_short_ring": entry(3, length=1000),
    "good_long_past": entry(30, length=2**62),
    "bad_longer_past": entry(30, length=2**62 + 1),
    "bad_longest_past": entry(20, length=2**63 - 8),
    "bad_halves": entry(kind="F16"),
    "bad_version": entry(**{"libmha.cache": "2"}),
    "bad_type": entry(type="I8"),
    "bad_length": entry(length=2),
    "bad_length_text": entry(length="3x"),
    "bad_length_overflow": entry(length=2**63),
    "bad_heads": entry(n_kv_heads="2"),
    "bad_size": entry(size=64),
    "bad_third": entry(extra={"w": tensor([0], 0, 0)}),
    "bad_no_metadata": safetensors({"k": tensor([1, 1, 32], 0, 128), "v": tensor([1, 1, 32], 128, 256)}, bytes(256)),
}


GGUF = {
    "good_nothing_in_it": raw_gguf(),
    "good_llama_q8_0": gguf(block("blk.0.", 8), model()),
    "good_llama_q4_0": gguf(block("blk.0.", 2) + block("blk.1.", 8), model()),
    "good_llama_16_bits": gguf(block("blk.0.", 1) + block("blk.1.", 30), model()),
    "good_norms_and_sinks": gguf(
        block("blk.0.", 30)
        + [("blk.0." + n, [e], 0) for n, e in (("attn_q_norm.weight", 16), ("attn_k_norm.weight", 16),
                                               ("attn_sinks.weight", 2), ("attn_norm.weight", 32))],
        model("qwen3"),
    ),
    "good_packed": gguf(
        [("blk.0.attn_qkv.weight", [96, 32], 1), ("blk.0.attn_qkv.bias", [96], 0),
         ("blk.0.attn_output.weight", [32, 32], 1)],
        model("gpt2", 2, 2),
    ),
    "good_columns_of_blocks": gguf(
        [("c_attn.weight", [2, 96], 8), ("c_proj.weight", [32, 32], 2)], model("x", 1, 1, 32)
    ),
    "good_columns_within_blocks": gguf(
        [("c_attn.weight", [2, 96], 8), ("c_proj.weight", [32, 32], 8)], model("x", 2, 2)
    ),
    "good_other_types": gguf([("a", [256], 14), ("b", [3], 28), ("c", [2, 2], 0), ("d", [], 0)]),
    "good_unknown_type": one_tensor(kind=99),
    "good_own_frequencies": gguf(block("blk.0.", 8) + [("rope_freqs.weight", [8], 0)], model()),
    "good_alignment": gguf(block("blk.0.", 8), [pair("general.alignment", U32, 8)], alignment=8),
    "good_version_2": gguf(block("blk.0.", 8), model(), version=2),
    "good_all_values": raw_gguf(
        pairs=[pair("v", k, 1 if k != STRING else "s") for k in range(13) if k != ARRAY]
        + [pair("a", ARRAY, (k, [1, 2] if k != STRING else ["s", ""])) for k in range(13) if k != ARRAY]
        + [pair("n", ARRAY, (ARRAY, [(U32, [1]), (STRING, ["s"]), (ARRAY, [(0, [])])]))],
    ),
    "bad_nothing": b"",
    "bad_magic": b"GGUX" + raw_gguf()[4:],
    "bad_version_1": raw_gguf(version=1),
    "bad_big_endian": raw_gguf(version=3 << 24),
    "bad_tensor_count": raw_gguf(n_tensors=2**64 - 1),
    "bad_pair_count": raw_gguf(n_pairs=2**63),
    "bad_counts_of_nothing": raw_gguf(n_tensors=1, n_pairs=1),
    "bad_key_length": raw_gguf(pairs=[struct.pack("<Q", 2**64 - 1) + bytes(8)]),
    "bad_value_type": raw_gguf(pairs=[text("a") + struct.pack("<IQ", 13, 0)]),
    "bad_array_count": raw_gguf(pairs=[text("a") + struct.pack("<IIQ", ARRAY, 10, 2**61)]),
    "bad_array_depth": raw_gguf(pairs=[text("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 99]),
    "bad_alignment_0": raw_gguf(pairs=[pair("general.alignment", U32, 0)]),
    "bad_alignment_24": raw_gguf(pairs=[pair("general.alignment", U32, 24)]),
    "bad_alignment_type": raw_gguf(pairs=[pair("general.alignment", 10, 32)]),
    "bad_alignment_twice": raw_gguf(pairs=[pair("general.alignment", U32, 32)] * 2),
    "bad_architecture_type": raw_gguf(pairs=[pair("general.architecture", U32, 1)]),
    "bad_architecture_control": raw_gguf(pairs=[pair("general.architecture", STRING, "\x1b")]),
    "bad_head_count_negative": raw_gguf(pairs=model()[:1] + [pair("llama.attention.head_count", 5, -1)]),
    "bad_head_count_twice": raw_gguf(pairs=model()[:2] + model()[1:2]),
    "bad_base_nan": raw_gguf(pairs=model()[:1] + [pair("llama.rope.freq_base", 12, float("nan"))]),
    "bad_name_control": one_tensor(name="a\n"),
    "bad_name_zero": one_tensor(name="a\0b"),
    "bad_name_not_utf8": one_tensor(name=b"\xff"),
    "bad_name_twice": raw_gguf([described("a", [1], 0, 0), described("a", [1], 0, 32)], (), bytes(64)),
    "bad_rank9": one_tensor([1] * 9),
    "bad_dimension": one_tensor([2**63]),
    "bad_shape_overflow": one_tensor([2**32, 2**31]),
    "bad_shape_overflow_of_0": one_tensor([2**40, 2**40, 0]),
    "bad_size_overflow": one_tensor([2**61], 28),
    "bad_row_of_blocks": one_tensor([32, 33], 8, data=bytes(2048)),
    "bad_offset_unaligned": one_tensor(offset=4),
    "bad_offset_far": one_tensor(offset=2**64 - 32),
    "bad_end_beyond": one_tensor([9]),
    "bad_overlap": raw_gguf([described("a", [9], 0, 0), described("b", [1], 0, 32)], (), bytes(64)),
    "bad_unknown_without_room": one_tensor(kind=99, offset=32),
    "bad_cut": gguf(block("blk.0.", 8), model())[:-1089],
}

if __name__ == "__main__":
    write("gguf", GGUF)
    write("npy", NPY)
    write("safetensors", SAFETENSORS)
    write("cache", CACHE)
