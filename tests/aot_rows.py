"""What the launches of triton_kernels.py and dc_triton_kernels.py ask the compiler for, at the record's shapes.

A row is (name, kernel, signature, constexprs, warps, stages, architectures); kernel_tools.aot_all compiles rows.
"""

import itertools

import dc_triton_kernels as dc
import triton_kernels as kernels


def row(name, kernel, archs, signature, tiles, **constexprs):
    """`tiles` is a launch's entry in one of the *_TILES tables."""
    tiles = {key: value for key, value in tiles.items() if key in kernel.arg_names or "num" in key}  # others: the grid
    warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages", 3)
    return name, kernel, signature, constexprs | tiles, warps, stages, archs


def attention_rows():
    """Heads of 128 and 64."""
    plain = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "first_ptr": "*i32", "after_ptr": "*i32", "cu_ptr": "*i32",
             "length": "i32:16", "window": "i32:16", "scale": "fp32"}
    for streams in 1, 2:
        yield row(f"attention bounds, {streams} positions a token", kernels._attention_bounds_kernel, (80, 90), plain,
                  dict(num_warps=4), STREAMS=streams, BLOCK=1024)
    both = {"forward": kernels._attention_forward_kernel, "dq": kernels._attention_dq_kernel,
            "dkv": kernels._attention_dkv_kernel}
    extras = {"forward": [dict(RUNNING_MAX=False), dict(RUNNING_MAX=True)], "dq": [dict(dq_more_desc=None), {}],
              "dkv": [dict(dk_more_desc=None, dv_more_desc=None), dict(dk_more_desc=None), {}]}
    for (card, archs), H in itertools.product({"large": (90,), "small": (80,)}.items(), (128, 64)):
        for name, kernel in both.items():
            tiles = kernels.ATTENTION_TILES[card, name]
            queries, keys = tiles["BLOCK_T"], tiles["BLOCK_S"]
            types = {f"{x}_desc": f"tensordesc<bf16[{queries},{H}]>" for x in ("q", "y", "dy", "dq", "dq_more")}
            types |= {f"{x}_desc": f"tensordesc<bf16[{keys},{H}]>"
                      for x in ("k", "v", "dk", "dv", "dk_more", "dv_more")}
            types |= {f"{x}_desc": f"tensordesc<fp32[{queries}]>" for x in ("lse", "delta")}
            for extra in extras[name]:
                yield row(f"attention {name} {card} {H} {extra}", kernel, archs, plain | types, tiles, H=H, **extra)


def pointwise_rows():
    """D = 768, 6 heads of 128, bf16, fp32 lambdas and bf16 gates."""
    bf16, any_bf16, archs = "*bf16", "*bf16:1", (80, 90)
    streams = {"mlp": ("*fp32:1", None), "attention": ("*fp32:1", None, None), "skip": (None, any_bf16),
               "mudd": ("*fp32:1",) * 5, "output": (None,) + (any_bf16,) * 5, "as one": (None,)}
    for (name, coefs), direction in itertools.product(streams.items(), ("forward", "backward")):
        K, dstreams = len(coefs), tuple(bf16 if c else None for c in coefs) + (bf16 if None in coefs else None,)
        if direction == "backward":  # the last one is left to the sum's reader
            coefs += ("*fp32:1" if name in ("attention", "skip", "as one") else None,)
        scalars = [name in ("mlp", "attention") and c is not None for c in coefs[:K]] + [coefs[-1] is not None]
        dcoefs = tuple(None if scalar else c and c.replace(":1", "") for c, scalar in zip(coefs, scalars))
        signature = dict.fromkeys(("x_ptr", "n_ptr", "dx_ptr", "dn_ptr"), bf16) | {
            "coefs": coefs, "streams": (bf16,) * K, "dstreams": dstreams, "T": "i32:16",
            "coef_steps": ("i32",) * len(coefs), "dcoefs": dcoefs, "stream_steps": ("i32:16",) * K,
            "peaks_ptr": "*fp32", "partials_ptr": "*fp32", "scales_ptr": "*fp32", "leave_ptr": "*fp32"}
        kernel = kernels._mix_forward_kernel if direction == "forward" else kernels._mix_backward_kernel
        both = dict(K=K, D=768, ROWS=1, COLUMNS=1024)
        if direction == "backward":
            both |= dict(SCALARS=sum(scalar << k for k, scalar in enumerate(scalars)), BY_NORM=False)
            both |= {} if any(scalars) else {"partials_ptr": None}
            if name == "as one":
                yield row("mix backward, by norm", kernel, archs, signature | {"coefs": ("*fp32", "*fp32:1")},
                          kernels.POINTWISE_TILES["mix backward"], **both | {"BY_NORM": True})
        else:
            yield row(f"mix forward and peaks, {name}", kernel, archs, signature,
                      kernels.POINTWISE_TILES["mix forward, peaks"], **both)
            both |= dict.fromkeys(("peaks_ptr", "scales_ptr", "leave_ptr", *["x_ptr"] * (name == "output")))
        yield row(f"mix {direction}, {name}", kernel, archs, signature, kernels.POINTWISE_TILES[f"mix {direction}"],
                  **both)
    heads = {"coefs": (None,) + ("*fp32:1",) * 4, "streams": (bf16,) * 5, "coef_steps": ("i32",) * 5, "T": "i32:16",
             "stream_steps": ("i32:16",) * 5, "x_ptr": bf16, "dx_ptr": bf16}  # the MUDD layer's values
    both = dict(K=5, D=128, ROWS=8, COLUMNS=128)
    yield row("mix forward, heads", kernels._mix_forward_kernel, archs, heads, kernels.POINTWISE_TILES["mix forward"],
              **dict.fromkeys(("n_ptr", "peaks_ptr", "scales_ptr", "leave_ptr")), **both)
    heads |= {"coefs": (*heads["coefs"], None), "dcoefs": (None,) + ("*fp32",) * 4 + (None,),
              "dstreams": (None,) + (bf16,) * 4 + (None,), "coef_steps": ("i32",) * 6}
    yield row("mix backward, heads", kernels._mix_backward_kernel, archs, heads,
              kernels.POINTWISE_TILES["mix backward"], dn_ptr=None, partials_ptr=None, SCALARS=0, BY_NORM=False, **both)
    yield row("mix scalars", kernels._mix_scalars_kernel, archs,
              dict(partials_ptr="*fp32", sums_ptr="*fp32", parts="i32:16"), kernels.MIX_SCALARS_TILES)

    both = {"forward": kernels._injections_forward_kernel, "backward": kernels._injections_backward_kernel}
    for (direction, kernel), K in itertools.product(both.items(), (4, 6)):
        name, absent = f"injections {direction}", K == 4  # one gate, one gradient
        signature = dict.fromkeys(("x_ptr", "y_ptr", "dx_ptr", "dy_ptr"), bf16) | {
            "coefs": (any_bf16,) * (2 * K), "dcoefs": (bf16,) * (2 * K), "outs": (bf16,) * K, "douts": (bf16,) * K,
            "coef_steps": ("i32",) * (2 * K), "T": "i32:16", "x_step": "i32:16", "y_step": "i32:16"}
        if absent:
            signature |= {"coefs": (any_bf16, None) + (any_bf16,) * 4 + (None,) * 2,
                          "dcoefs": (bf16, None) + (bf16,) * 4 + (None,) * 2, "douts": (bf16,) * 3 + (None,)}
        if absent and direction == "forward":
            signature["coefs"] = (any_bf16, None) + (any_bf16,) * 6
        yield row(f"{name}, {K}", kernel, archs, signature, kernels.POINTWISE_TILES[name], K=K, D=768, COLUMNS=1024)
    both = {"forward": kernels._smear_forward_kernel, "backward": kernels._smear_backward_kernel}
    signature = {f"{x}_ptr": bf16 for x in ("e", "w", "n", "dn", "de")} | {"T": "i32:16", "e_step": "i32:16"}
    signature |= {"lam_ptr": "*fp32:1", "partials_ptr": "*fp32"}
    for direction, kernel in both.items():
        name = f"smear {direction}"
        yield row(name, kernel, archs, signature, kernels.POINTWISE_TILES[name], W=12, D=768, ROWS=1, COLUMNS=1024)
    heads = ("qk", "q", "k", "dq", "dk", "dqk", "cos", "sin", "y", "v", "z", "dz", "dy", "dv", "dalpha", "dgate")
    signature = {f"{x}_ptr": bf16 for x in heads} | {"alpha_ptr": any_bf16, "gate_ptr": any_bf16, "T": "i32:16"}
    signature |= {f"{x}_step": "i32:16" for x in ("qk", "y", "v")} | {"alpha_step": "i32", "gate_step": "i32"}
    both = {"forward": kernels._norm_rotary_forward_kernel, "backward": kernels._norm_rotary_backward_kernel}
    for (direction, kernel), paired, offset in itertools.product(both.items(), (False, True), (False, True)):
        name = f"norm_rotary {direction}"
        yield row(f"{name} {paired=} {offset=}", kernel, archs, signature, kernels.POINTWISE_TILES[name],
                  N=6, H=128, STREAMS=1 + paired, KEY_OFFSET=offset)
    both = {"forward": kernels._finish_heads_forward_kernel, "backward": kernels._finish_heads_backward_kernel}
    missing = (), ("alpha_ptr", "dalpha_ptr", "v_ptr", "dv_ptr"), ("gate_ptr", "dgate_ptr")
    for (direction, kernel), absent in itertools.product(both.items(), missing):
        name = f"finish_heads {direction}"
        yield row(f"{name} without {absent[:1]}", kernel, archs, signature, kernels.POINTWISE_TILES[name],
                  N=6, H=128, **{x: None for x in absent if x in kernel.arg_names})
    both = {"forward": kernels._add_values_forward_kernel, "backward": kernels._add_values_backward_kernel}
    signature = {f"{x}_ptr": bf16 for x in ("v", "ve", "near", "w", "y", "dy", "dve", "dnear")}
    signature |= {f"{x}_step": "i32:16" for x in ("v", "ve", "near", "dy")} | {"partials_ptr": "*fp32", "T": "i32:16"}
    for direction, kernel in both.items():
        name, sizes = f"add_values {direction}", dict(D=768, H=128, W=6, NEAR=8, ROWS=1, COLUMNS=1024)
        yield row(name, kernel, archs, signature, kernels.POINTWISE_TILES[name], **sizes)


def matrix_rows():
    for card, archs in ("large", (90,)), ("small", (80, 89)):
        for name, unit, line, step in (("xxt", "depth_stride", "row_stride", False),
                                       ("xtx", "row_stride", "depth_stride", False),
                                       ("polar step", "depth_stride", "row_stride", True)):
            signature = dict(x="*bf16", out="*bf16", alpha="fp32", beta="fp32", diagonal="fp32")
            signature |= dict.fromkeys(("bank_stride", line, "size", "depth"), "i32:16")
            yield row(f"{name} {card}", kernels._symmetric_kernel, archs, signature, kernels.SYMMETRIC_TILES[card],
                      **{unit: 1}, STEP=step, NORMALIZE=step, SIZE_POW2=1024)
        scales = dict(left_scale="*fp32", right_scale="*fp32")
        for product, operand, used, unused in (("fp8", "fp8e4nv", scales, ["post"]),
                                               ("up", "bf16", {}, ["post", *scales]), ("dpre", "bf16", {}, scales)):
            tiles = kernels.MLP_TILES[card, product]
            block_t, block_f, block_d = tiles["BLOCK_T"], tiles["BLOCK_F"], tiles["BLOCK_D"]
            views = dict(left=(operand, block_t, block_d), right=(operand, block_f, block_d),
                         out=("bf16", block_t, block_f // 2))
            views |= {"post": views["out"]} if product == "dpre" else {}
            signature = {name: f"tensordesc<{dtype}[{rows}, {columns}]>" if card == "large" else f"*{dtype}"
                         for name, (dtype, rows, columns) in views.items()}
            signature |= dict.fromkeys(("left_line", "right_line", "out_line", "T", "F", "D"), "i32:16") | used
            yield row(f"mlp {product} {card}", kernels._mlp_kernel, archs if product != "fp8" else archs[-1:],
                      signature, tiles, FP8=product == "fp8", BACKWARD=product == "dpre", **dict.fromkeys(unused))
    tiles = kernels.PRODUCT_TILES
    views = dict(left=("BLOCK_T", "BLOCK_K"), right=("BLOCK_K", "BLOCK_N"))
    views |= {f"more_{name}": view for name, view in views.items()}
    signature = {name: f"tensordesc<bf16[{tiles[a]}, {tiles[b]}]>" for name, (a, b) in views.items()}
    signature["out"] = f"tensordesc<bf16[{tiles['BLOCK_T']}, {tiles['BLOCK_N'] // 2}]>"
    signature |= dict.fromkeys(("T", "N", "K", "K_MORE"), "i32:16")
    yield row("product of two terms", kernels._product_kernel, (90,), signature, tiles, TRANSPOSED=False)
    for transposed in (False, True):
        if transposed:
            signature = signature | {"right": f"tensordesc<bf16[{tiles['BLOCK_N']}, {tiles['BLOCK_K']}]>"}
        yield row(f"product, transposed {transposed}", kernels._product_kernel, (90,), signature, tiles, more_left=None,
                  more_right=None, K_MORE=None, TRANSPOSED=transposed)
    tiles = kernels.HEADS_TILES
    rows, depth = tiles["BLOCK_T"], tiles["BLOCK_K"]
    signature = dict(left=f"tensordesc<bf16[{rows}, {depth}]>", right=f"tensordesc<bf16[128, {depth}]>",
                     out=f"tensordesc<bf16[1, {rows}, 64]>", scale_ptr="*fp32", cos_ptr="*bf16", sin_ptr="*bf16",
                     T="i32:16", K="i32:16")
    yield row("heads", kernels._heads_kernel, (90,), signature, tiles, N=6, H=128, STREAMS=2)
    signature = dict.fromkeys(("out_ptr", "dq_ptr", "dk_ptr", "dqk_ptr", "cos_ptr", "sin_ptr"), "*bf16")
    signature |= {"scale_ptr": "*fp32", "T": "i32:16"}
    yield row("heads backward", kernels._heads_backward_kernel, (80, 90), signature,
              kernels.POINTWISE_TILES["norm_rotary backward"], N=6, H=128, STREAMS=2)
    signature = dict(x="*bf16", peaks="*fp32", bank_stride="i32:16", numel="i32:16", blocks="i32")
    yield row("quantize peak", kernels._quantize_peak_kernel, (80, 90), signature, kernels.QUANTIZE_TILES)
    yield row("quantize cast", kernels._quantize_cast_kernel, (89, 90),
              signature | dict(x8="*fp8e4nv", cells="*fp32", parts="i32:16"), kernels.QUANTIZE_TILES, PARTS_POW2=8192)


def updates_rows():
    def update(name, kernel, tiles, pointers, integers=(), numbers=(), **constexprs):
        signature = pointers | dict.fromkeys(integers, "i32:16") | dict.fromkeys(numbers, "fp32")
        return row(name, kernel, (80, 90), signature, tiles, **constexprs)

    wide = dict.fromkeys(("exp_avg", "exp_avg_sq", "hyper"), "*fp32")
    for name, starts in ("adam", {"starts": None}), ("adam, flat", {}):
        pointers = dict(p="*bf16", g="*bf16", starts="*i32") | wide
        yield update(name, kernels._adam_kernel, kernels.ADAM_TILES, pointers, ["numel"], **starts)
    yield update("momentum", kernels._momentum_kernel, kernels.MOMENTUM_TILES,
                 dict(g="*bf16", buf="*fp32", momentum="*fp32", x="*bf16"), ["numel"])
    states = dict(x="*bf16", v2="*fp32", means="*fp32")
    for name, lines, line_stride, depth_stride in ("by row", 3072, 768, 1), ("by column", 768, 1, 768):
        strides = dict(line_stride=line_stride, depth_stride=depth_stride)
        unit = {k: v for k, v in strides.items() if v == 1}  # Triton compiles an argument of 1 as a constant
        yield update(f"variance {name}", kernels._variance_kernel, kernels.VARIANCE_TILES,
                     states | dict(beta2="*fp32"), ["lines", "depth", *(strides.keys() - unit.keys())], **unit)
        unit.pop("depth_stride", None)
        yield update(f"rescale {name}", kernels._rescale_kernel, kernels.RESCALE_TILES, states,
                     ["lines", "depth", *({"line_stride"} - unit.keys())], ["floor"],
                     ALL_LINES=kernels.triton.next_power_of_2(lines), **unit)
    yield update("cautious", kernels._cautious_kernel, kernels.CAUTIOUS_TILES,
                 dict(p="*u16", low="*u16", x="*bf16", lr="*fp32", wd="*fp32"), ["numel"], SPLIT=True)
    banks, strides = dict.fromkeys(("folded", "dfolded", "w", "dw"), "*bf16"), ["folded_stride", "w_stride", "numel"]
    banks |= dict(scale="*fp32", partials="*fp32")
    for name, kernel, more in ("fold", kernels._fold_kernel, []), ("unfold", kernels._unfold_kernel, ["dw_stride"]):
        pointers = {pointer: banks[pointer] for pointer in kernel.arg_names if pointer in banks}
        yield update(name, kernel, kernels.FOLD_TILES, pointers, strides + more)


def head_rows():
    """The head, and the transposes."""
    bf16, fp8 = (80, 90, 100), (89, 90, 100)

    def launch(name, kernel, archs, signature, tiles, **constexprs):
        types = dict.fromkeys(kernel.arg_names, "fp32")
        types |= dict.fromkeys("T V D R C M N padded_T padded_R stride_VT left src_m dst_n".split(), "i32:16")
        types |= dict(n_weights="i32", tiles="i32", targets_ptr="*i64") | signature
        types |= {name: "*fp32" for name, type_ in types.items() if name.endswith("_ptr") and type_ == "fp32"}
        if "HARDWARE" in kernel.arg_names:
            constexprs["HARDWARE"] = True
        return row(name, kernel, archs, types, tiles, **constexprs)

    ROWS, COLS, DEPTH = (kernels.HEAD_PRODUCT_TILES[name] for name in ("ROWS", "COLS", "DEPTH"))
    yield launch("head_product", kernels._head_product_kernel, (90, 100), dict(
        x_desc=f"tensordesc<fp8e4nv[{ROWS}, {DEPTH}]>", w_desc=f"tensordesc<fp8e4nv[{COLS}, {DEPTH}]>",
        sigma_desc=f"tensordesc<u8[{ROWS}, {COLS}]>"), kernels.HEAD_PRODUCT_TILES, MASKED=False)
    for sigma in "*bf16", "*fp32":
        yield launch(f"head_softcap {sigma}", kernels._head_softcap_kernel, bf16,
                     dict(logits_ptr="*bf16", sigma_ptr=sigma), kernels.HEAD_SOFTCAP_TILES)
    for sigma, archs in ("*bf16", bf16), ("*u8", fp8):
        yield launch(f"head_loss {sigma}", kernels._head_loss_kernel, archs, dict(sigma_ptr=sigma),
                     kernels.HEAD_LOSS_TILES)
    yield launch("head_gradient", kernels._head_gradient_kernel, bf16, dict(sigma_ptr="*bf16", g_ptr="*bf16"),
                 kernels.HEAD_GRADIENT_TILES)
    yield launch("head_gradient_fp8", kernels._head_gradient_fp8_kernel, fp8,
                 dict(sigma_ptr="*u8", g_ptr="*u8", g_VT_ptr="*i32"), kernels.HEAD_GRADIENT_FP8_TILES)
    yield launch("head_targets", kernels._head_targets_kernel, bf16, dict(g_ptr="*bf16"), kernels.HEAD_TARGETS_TILES,
                 FP8=False, g_VT_ptr=None)
    yield launch("head_targets_fp8", kernels._head_targets_kernel, fp8, dict(g_ptr="*u8", g_VT_ptr="*u8"),
                 kernels.HEAD_TARGETS_TILES, FP8=True)
    for plain, transposed in (True, True), (True, False), (False, True):
        yield launch(f"quantize_head {plain} {transposed}", kernels._quantize_head_kernel, fp8,
                     dict(src_ptr="*bf16", dst_ptr="*fp8e4nv", dst_T_ptr="*fp8e4nv"), kernels.HEAD_QUANTIZE_TILES,
                     SHARED=not plain, PLAIN=plain, TRANSPOSED=transposed)
    for add, type_ in (False, "*i16"), (True, "*bf16"):
        yield launch(f"transpose {type_}", kernels._transpose_kernel, bf16, dict(src_ptr=type_, dst_ptr=type_),
                     kernels.TRANSPOSE_TILES, ADD=add, src_n=1, dst_m=1)


def dc_rows():
    """6 heads of 128, and narrower heads and windows."""
    plain = {"cu_ptr": "*i32", "first_ptr": "*i32", "lse_ptr": "*fp32", "T": "i32:16", "window": "i32:16",
             "scale": "fp32", "scale_log2e": "fp32"}

    def type_of(argument, card, H, LEFT):
        block = dc.DC_BLOCK[card]
        left, cell = (LEFT, H), (block, block)
        tiles = {"k_left_rows": left, "v_left_rows": left, "a_rows": cell, "ds_rows": cell}
        if argument.endswith("_rows") and card == "large":
            return "tensordesc<bf16[{}, {}]>".format(*tiles.get(argument, (block, H)))
        return plain.get(argument, "*bf16" if argument.endswith(("_rows", "_ptr")) else "i32")

    sizes = (128, 128), (64, 128), (128, 64)
    for (card, archs), (H, LEFT) in itertools.product({"large": (90,), "small": (80, 120)}.items(), sizes):
        for name in "forward", "mixed_grad", "query_grad", "key_grad":
            kernel = getattr(dc, f"_dc_{name}_kernel")
            constants = dict(N=6, H=H, LEFT=LEFT, BLOCK=dc.DC_BLOCK[card], ENGINE=card == "large")
            signature = {x: type_of(x, card, H, LEFT) for x in kernel.arg_names if x not in constants}
            yield row(f"dc {name}, {card}, H {H}, {LEFT} left", kernel, archs, signature, dc.DC_TILES[card, name],
                      **constants)


def lookup_rows():
    """The six planes of a token with int32 rows, the bigram table with signs; bf16, D = 768."""
    sizes = dict(D=768, COLUMNS=256)
    for planes, signed in (6, False), (1, True):
        bf16 = ("*bf16",) * planes
        types = dict(outs=bf16, tables=bf16, grads=bf16, ds=bf16, d_steps=("i32:16",) * planes, T="i32:16")
        types |= dict(rows_ptr="*i32", sorted_ptr="*i32", order_ptr="*i64", partial_ptr="*fp32", signs_ptr="*bf16")
        types |= dict(sign_rows_ptr="*i32")
        missing = {} if signed else dict(signs_ptr=None, sign_rows_ptr=None)
        tiles = {name: tiles | sizes for name, tiles in kernels.LOOKUP_TILES.items()}
        span = tiles["add"]["ROWS"] * tiles["add"]["STEPS"]
        for name, more in ("gather", missing), ("add", missing), ("borders", dict(SPAN=span)):
            yield row(f"lookup {name}, {planes} planes", getattr(kernels, f"_lookup_{name}_kernel"), (80, 90), types,
                      tiles[name], PLANES=planes, **more)


def gates_rows():
    """The record's pre and post gates, MUDD's lanes in fp32, and the most lanes; D = 768, 64 hidden units."""
    names = "x w1 w2 b2 gates dgates hidden dhidden dx dw2 db2".split()
    types = {f"{name}_ptr": "*bf16" for name in names} | dict(T="i32:16", parts="i32", x_step="i32:16", factor="fp32")
    types |= dict(scale_ptr="*fp32:4", dscale_ptr="*fp32:4", sums_ptr="*fp32", b2_ptr="*bf16:2", db2_ptr="*bf16:2")
    for L, missing in (26, {}), (41, {}), (14, {"scale_ptr": None, "dscale_ptr": None}), (128, {}):
        wide = dict(gates_ptr="*fp32", dgates_ptr="*fp32") if missing else {}
        lanes, block = max(16, kernels.triton.next_power_of_2(L)), kernels.GATES_TILES["sums"]["BLOCK"]
        sizes = dict(D=768, F=64, L=L, LANES=lanes, PITCH=-(-L // 8) * 8, PARTS=block // lanes) | missing
        for name, tiles in kernels.GATES_TILES.items():
            kernel = getattr(kernels, f"_gates_{name.split(',')[0]}_kernel")
            constants = {key: value for key, value in sizes.items() if key in kernel.arg_names}
            archs = (90,) if name == "backward" else (80, 89, 90)
            if name != "backward" or L <= 64:
                yield row(f"gates {name}, {L} lanes", kernel, archs, types | wide, tiles, **constants)
