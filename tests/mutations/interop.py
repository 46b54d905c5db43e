"""Planted faults in how PyTorch's tensors and JAX's arrays are accepted, returned and differentiated."""

from __future__ import annotations

from mutations import interop_guards
from mutations.planting import Edit

RANKS, DEVICES = "torch/_context_parallel.py", "jax/_context_parallel.py"
FAULTS = {
    interop_guards.tensors_of_ranks_are_right: {
        "ranks drop the gradient of lse": Edit(RANKS, "_Attention.backward", '("dlse", dlse)', '("dlse", None)'),
        "no gradient of o is one of ones on ranks": Edit(
            RANKS, "_Attention.backward", "namespace.zeros_like(ctx.vjp._o)", "namespace.ones_like(ctx.vjp._o)"
        ),
        "a rank takes the first rows of a tensor": Edit(
            RANKS, "ContextParallel.shard", "self._rows_of(x)", "self._rows_of(x) * 0"
        ),
    },
    interop_guards.rows_of_devices_are_those_of_the_sequence: {
        "the second chunk of a device is the one before": Edit(
            DEVICES, "runs_of", "2 * size - 1 - rank", "2 * size - 2 - rank"
        ),
        "chunks that meet are two runs": Edit(DEVICES, "runs_of", "if late > rank + 1", "if late > rank"),
        "gathered rows are permuted the other way": Edit(
            DEVICES, "_in_order", "np.argsort(np.concatenate(positions))", "np.concatenate(positions)"
        ),
    },
    interop_guards.tensors_are_right: {
        "no gradient of o is a gradient of ones": Edit(
            "torch/_functions.py", "_pulled_back", "torch.zeros_like(o) if do is None",
            "torch.ones_like(o) if do is None"
        ),
        "a negated gradient is read without its sign": Edit(
            "torch/_functions.py", "_pulled_back", "_resolved((do, dlse))", "(do, dlse)"
        ),
        "the gradient of lse is dropped": Edit(
            "torch/_functions.py", "_pulled_back", "_resolved((do, dlse))", "_resolved((do, None))"
        ),
        "no gradient of a sink is requested": Edit(
            "torch/__init__.py", "_called", "options = options._replace(wrt=tuple(needed))", "pass"
        ),
        "a given output is returned for the other": Edit(
            "torch/_tensors.py", "returned", "None else each for each in outs",
            "None else each for each in reversed(outs)"
        ),
    },
    interop_guards.scores_of_tensors_are_right: {
        "all operands have gradients": Edit(
            "torch/__init__.py", "_called", 'if getattr(each, "requires_grad", False))', "if each.is_floating_point())"
        ),
        "gradients of operands are the next one's": Edit(
            "torch/_functions.py", "_placed", "dict(zip(wrt, results[3:]))", "dict(zip(call.names[3:], results[3:]))"
        ),
        "a captured tensor has to be one of floats": Edit(
            "torch/_tensors.py", "_kind_reasons", "and not is_captured:", ":"
        ),
        "a Score of the library loses its tensors": Edit(
            "scores/score.py", "_as_array", "(array, ShapeDtype) or is_differentiated(array)", "(array, ShapeDtype)"
        ),
        "numbers next to a tensor have its dtype": Edit(
            "scores/library.py", "_beside", 'dtype=sys.modules["torch"].int32, ', ""
        ),
    },
    interop_guards.recorded_calls_use_their_own_mask: {
        "a graph's gradients use the mask of its last run": Edit(
            "torch/_transformed.py", "Transformed._keep",
            "not self.is_traced or isinstance(call, OnGpu) and not isinstance(self._options.mask, MaskOfTensors)",
            "True",
        ),
    },
    interop_guards.graphs_hold_texts: {
        "a graph has the number of a call": Edit("torch/_operators.py", "name_of", "call.name = call.text", "pass"),
        "a call of another process is an error of Python": Edit(
            "torch/_operators.py", "_call", "if call is None:", "if False:"
        ),
        "a text has no score": Edit(
            "torch/_transformed.py", "Transformed.text", "bias=bias), parts))", "bias=bias), ()))"
        ),
        "a text names a class of the user": Edit(
            "calls/_call_text.py", "_encoded", "_is_ours(type(value)) and not", "not"
        ),
        "a class of the user is one of the library": Edit(
            "calls/_call_text.py", "masks_of_library", "if _is_ours(each):", "if True:"
        ),
        "a call of a text has a number": Edit(
            "torch/_transformed.py", "Transformed.read", "call.name, call.is_traced = text, True", "pass"
        ),
    },
    interop_guards.programs_hold_no_symbols: {
        "a length stays a symbol": Edit(
            "torch/_mask_parts.py", "constant", "(int, float, torch.SymInt)", "(int, float)"
        ),
    },
    interop_guards.graphs_follow_numbers: {
        "a graph draws the weights of seed 0": Edit(
            "torch/_transformed.py", "Transformed.drawing", "twin.draws = draws", "pass"
        ),
        "a graph ignores a seed in a tensor": Edit(
            "torch/_transformed.py", "Transformed._with_one_score", "tensors.get(SEED, seed % (1 << 64))",
            "seed % (1 << 64)"
        ),
        "a seed must be a signed integer": Edit(
            "torch/_operators.py", "compiled", "seed if seed < 1 << 63 else seed - (1 << 64), offset", "seed, offset"
        ),
        "an offset is a constant": Edit(
            "torch/_operators.py", "compiled", "seed - (1 << 64), offset", "seed - (1 << 64), constant(offset)"
        ),
    },
    interop_guards.equal_masks_share_a_graph: {
        "masks are compared by identity": Edit(
            "torch/_operators.py", "compiled", "parts_of(mask, of_mask) if isinstance(mask, Mask) else None", "None"
        ),
        "numbers of masks may change within a graph": Edit(
            "torch/_mask_parts.py", "parts_of", "return (constant(value),)", "return (value,)"
        ),
        "an array of a score may be the mask": Edit(
            "torch/_mask_parts.py", None, 'MASK = "mask="', 'MASK = "mask"'
        ),
        "a graph has no mask": Edit("torch/_operators.py", "_named", "_object_at(mask_id, mask)", "mask"),
        "a graph has no score": Edit("torch/_operators.py", "_named", "_object_at(score_id, score)", "score"),
        "masks have their fields in reverse": Edit(
            "torch/_mask_parts.py", "_whole", "zip(_FIELDS[_KINDS[name]], values)",
            "zip(reversed(_FIELDS[_KINDS[name]]), values)"
        ),
    },
    interop_guards.graphs_create_masks: {
        "a graph has the tensors of its first run": Edit(
            "torch/_operators.py", "compiled", "parts_of(mask, of_mask) if isinstance(mask, Mask) else None", "None"
        ),
        "a graph has one tensor of a mask": Edit(
            "torch/_mask_parts.py", "parts_of", 'f"{MASK}{len(tensors)}"', 'f"{MASK}0"'
        ),
        "a text has no mask of tensors": Edit(
            "torch/_transformed.py", "Transformed.read", "parsed_call(text, Options, MaskOfTensors)",
            "parsed_call(text, Options)"
        ),
        "gradients read the tensors of masks as operands": Edit(
            "torch/_transformed.py", "run_pass", "if not each.startswith(MASK)}", "if each != MASK}"
        ),
        "a graph checks masks of tensors without data": Edit(
            "torch/_mask_parts.py", "_unless_compiling", "torch.compiler.is_dynamo_compiling()", "False"
        ),
        "an invalid mask stops the compiler": Edit(
            "torch/_operators.py", "_named", "with suppress(UnsupportedProblem):", "with suppress(KeyError):"
        ),
        "a graph contains a mask with a function": Edit(
            "torch/_operators.py", "compiled", "getattr(mask, UNCHECKED, False)", "False"
        ),
        "a mask that leaves a graph stays unchecked": Edit(
            "masks/content.py", "_tokens", "value.__dict__.pop(UNCHECKED, False)", "False"
        ),
    },
    interop_guards.graphs_keep_positions: {
        "a graph contains calls at the start of a sequence": Edit(
            "torch/_operators.py", "compiled", "options[:-2]", "options[:-4]"
        ),
        "numbers that change are inputs of a graph": Edit(
            "torch/_mask_parts.py", "constant", "if is_number else value", "if value is None else value"
        ),
    },
    interop_guards.graphs_leave_calls_to_python: {
        "a graph contains the NumPy code of calls with outputs": Edit(
            "torch/__init__.py", None, "leave_to_python(_called)", "pass"
        ),
        "a graph contains the NumPy code of public calls": Edit(
            "keywords/answers.py", "_explained", "vars(call).update(UNTRACED)", "pass"
        ),
    },
    interop_guards.scores_of_jax_are_right: {
        "all operands have a gradient": Edit(
            "jax/_derivatives.py", "_wrt", "return tuple(name for name in names if",
            "return tuple(name for name in ('bias', 'table') if",
        ),
        "plans do not differ by what gradients are asked of": Edit(
            "jax/_call.py", "JaxCall.cached_plan", "key = executor, own, wrt,", "key = executor, own,"
        ),
    },
    interop_guards.writing_is_told: {
        "PyTorch is not told that outputs were written to": Edit(
            "torch/_tensors.py", "returned", "increment_version([each for each in outs if each is not None])", "pass"
        ),
        "gradients are constants to PyTorch": Edit(
            "torch/_functions.py", "_pulled_back", "not (torch.is_grad_enabled() or", "not (",
        ),
    },
    interop_guards.bfloat16_is_taken_and_given: {
        "bfloat16 goes by NumPy's DLPack": Edit(
            "layouts.py", "taken", "if extended is None else _of_extended(value, extended, xp)", ""
        ),
        "tensors of bfloat16 stay int16": Edit(
            "layouts.py", "_of_extended", "xp.from_dlpack(value.view(integers)).view(dtype)",
            "xp.from_dlpack(value.view(integers))",
        ),
        "results of bfloat16 go by DLPack": Edit(
            "torch/_tensors.py", "as_tensor", 'if array.dtype.kind == "V":', "if False:"
        ),
    },
    interop_guards.tensors_without_elements_are_named: {
        "a bias of integers is an array of NumPy": Edit("torch/_passes.py", "_first", "tensors | bias", "tensors"),
        "a meta tensor holds data": Edit(
            "layouts.py", "tensor_reasons", 'if value.device.type == "meta":', "if False:"
        ),
        "a sparse tensor is dense": Edit(
            "layouts.py", "tensor_reasons", "if value.layout != torch.strided:", "if False:"
        ),
        "a tracer has memory": Edit("layouts.py", "tensor_reasons", "if not has_memory:", "if False:"),
        "operations of a subclass are lost": Edit("layouts.py", "tensor_reasons", "if not is_plain:", "if False:"),
        "a negated view holds its values": Edit("layouts.py", "tensor_reasons", "if value.is_neg():", "if False:"),
        "calls for NumPy lose gradients": Edit(
            "layouts.py", "is_on_cuda", "and value.requires_grad", "and False"
        ),
    },
    interop_guards.tangents_are_refused: {
        "a tangent is lost": Edit("layouts.py", "tensor_reasons", ".tangent is not None:", ".tangent is False:"),
        "a repeated call on a GPU loses a tangent": Edit("torch/__init__.py", "_called", "or has_dual_level()", ""),
        "the tangent of a gradient is lost": Edit(
            "torch/_functions.py", "_pulled_back", "or has_dual_level())", ")"
        ),
        "a batch of gradients is not a batch": Edit(
            "torch/_tensors.py", "require_cotangents", "if each is not None and is_batched(each):", "if False:"
        ),
    },
    interop_guards.derivatives_of_tensors_are_right: {
        "absent tangents of a tangent have gradients": Edit(
            "torch/_functions.py", "_Tangent.backward", "each if dot is not None else None for", "each for"
        ),
        "the gradient of a tangent is that of o": Edit(
            "torch/_functions.py", "_Tangent.backward",
            "_Second.apply(call, wrt, u, u_lse, o, lse, o_dot, lse_dot, None",
            "_Second.apply(call, wrt, u, u_lse, o, lse, o_dot, lse_dot, u",
        ),
        "gradients of tangents read lse_dot's as none": Edit(
            "torch/_functions.py", "_Tangent.backward", "_Gradients.apply(call, wrt, u, u_lse,",
            "_Gradients.apply(call, wrt, u, None,",
        ),
        "a gradient without memory is not one of zeros": Edit(
            "torch/_functions.py", "_resolved", "if tensor._is_zerotensor()", "if False"
        ),
        "double backward has no gradient of do": Edit(
            "torch/_functions.py", "_Gradients.backward", "return None, None, o_dot,", "return None, None, None,"
        ),
        "double backward has no gradient of dlse": Edit(
            "torch/_functions.py", "_Gradients.backward", "None if dlse is None else lse_dot", "None"
        ),
        "the tangent of do is lost": Edit(
            "torch/_functions.py", "_Gradients.jvp", "o_dot, lse_dot, do_dot, dlse_dot,",
            "o_dot, lse_dot, None, dlse_dot,"
        ),
        "the tangent of dlse is lost": Edit(
            "torch/_functions.py", "_Gradients.jvp", "o_dot, lse_dot, do_dot, dlse_dot,",
            "o_dot, lse_dot, do_dot, None,"
        ),
        "a second derivative is a constant": Edit(
            "torch/_functions.py", "_Second.backward", "_refuse_third()", "return (None,) * 50"
        ),
        "results of operands are in the order of the plan": Edit(
            "torch/_functions.py", "_placed", "by_name.get(name) for name in call.names[3:]", "iter(results[3:])"
        ),
        "tensors that all calls share are not repeated": Edit(
            "torch/_transformed.py", "_at_front", "tensor.expand(size, *tensor.shape) if axis is None",
            "tensor[None] if axis is None"
        ),
        "a mapped axis stays where it is": Edit(
            "torch/_transformed.py", "_at_front", "tensor.movedim(axis, 0)", "tensor"
        ),
        "matrices in a batch are heads": Edit("torch/_transformed.py", "Transformed.batched", "max(3, *", "max(2, *"),
        "a batch draws other weights than its calls": Edit(
            "torch/_transformed.py", "Transformed._reads_batch_entries", "or options.dropout is not None", ""
        ),
        "a batch counts its entries": Edit(
            "torch/_transformed.py", "Transformed._reads_batch_entries", "return reads_b or", "return"
        ),
        "functions as masks count the entries of a batch": Edit(
            "torch/_transformed.py", "_is_uniform", "not reads_numbers(mask)", "True"
        ),
        "gradients of arrays of a score are sums over a batch": Edit(
            "torch/_transformed.py", "Transformed.batched", "others & (mapped | set(wrt))", "others & mapped"
        ),
    },
    interop_guards.own_integers_are_taken: {
        "integers of the library are not tensors": Edit(
            "torch/_tensors.py", "own_integers", "if not is_integer_dtype(array.dtype):", "if True:"
        ),
        "a mask of a transformation has no elements": Edit(
            "layouts.py", "_without_tracking", "while functorch.is_gradtrackingtensor(value):", "while False:"
        ),
        "a bias of integers is the library's own": Edit(
            "torch/_tensors.py", "own_integers", 'name in ("bias", "sink") or', ""
        ),
    },
    interop_guards.models_are_served: {
        "a prompt meets the last keys of a static cache": Edit(
            "calls/model_options.py", "model_options", '"top_left" if', '"bottom_right" if'
        ),
        "a window may be True": Edit(
            "calls/model_options.py", "model_options", "int_reasons(1, sliding_window=sliding_window)", "[]"
        ),
        "is_causal of a call is ignored": Edit(
            "calls/model_options.py", "model_options", "if is_causal is None:", "if True:"
        ),
        "a mask is also causal": Edit(
            "calls/model_options.py", "model_options", "if is_causal and mask is None and", "if is_causal and"
        ),
        "a bias of positions is ignored": Edit(
            "calls/model_options.py", "model_options", "bias = bias.to(query.dtype)", "bias = None"
        ),
        "a window has a key more": Edit(
            "calls/model_options.py", "model_options", "left = sliding_window - 1", "left = sliding_window"
        ),
        "packed sequences are one": Edit(
            "calls/model_options.py", "model_options", "cu_seq_lens_q is not None or cu_seq_lens_k is not None", "False"
        ),
    },
    interop_guards.arrays_of_numpy_are_taken_by_jax: {
        "an array of NumPy is none for JAX": Edit(
            "jax/_entry.py", "_of_jax", "jax.numpy.array(value) if is_numpy or isinstance(value, list) else value",
            "value",
        ),
        "captured arrays have dtypes that JAX lacks": Edit(
            "jax/_entry.py", "_with_arrays_of_jax",
            "all(array.dtype == score.arrays[name].dtype for name, array in arrays.items())", "True",
        ),
    },
    interop_guards.parts_of_a_mesh_are_differentiated: {
        "results are the same in all parts": Edit(
            "jax/_primitives.py", "_types", "if not _varying_axes(like):", "if True:"
        ),
        "arrays that are the same in all parts have other gradients": Edit(
            "jax/_primitives.py", "bind", "*varying_alike(arrays.values())", "*arrays.values()"
        ),
    },
    interop_guards.masks_of_jax_on_a_device_are_listed: {
        "lists lie where the workspaces lie": Edit(
            "executors/xla_gpu.py", "flat", "start = _aligned(nbytes)", "start = 0"
        ),
        "Python launches with addresses that are not raised": Edit(
            "executors/xla_gpu.py", "Flat.launch", "words[word] = buffers[buffer] + offset",
            "words[word] = buffers[buffer]",
        ),
        "the host evaluates masks of arrays": Edit(
            "jax/_runs.py", "_gpu_plan", "planned if call.looked_up.contents is None else at_each_call(planned)",
            "planned",
        ),
    },
    interop_guards.passes_of_jax_on_a_device_are_right: {
        "counters are not set to zero": Edit(
            "executors/xla_gpu.py", "placed", "[num_zeroed]", "[0]"
        ),
        "results that kernels add to are not set to zero": Edit(
            "executors/xla_gpu.py", "flat", "for place, nbytes in last.zeroed", "for place, nbytes in ()"
        ),
        "Python sets nothing to zero": Edit("executors/xla_gpu.py", "Flat.launch", "in self.zeros:", "in ():"),
    },
    interop_guards.memory_orders_of_jax_are_right: {
        "arrays are copied into another order": Edit(
            "jax/_entry.py", "called", "memory == \"tokens_first\" and not have_data", "False"
        ),
        "arrays with data have tokens first": Edit(
            "jax/_primitives.py", "_executed", "if one.call.tokens_first:", "if False:"
        ),
        "the host reads arrays in the order of their axes": Edit(
            "jax/_runs.py", "OnHost._run", "buffers], self._are_swapped)", "buffers], [False] * 9)"
        ),
        "the host writes results in the order of their axes": Edit(
            "jax/_runs.py", "OnHost._run", "_in_order(computed, self._are_results_swapped)", "computed"
        ),
        "kernels read arrays in the order of their axes": Edit(
            "jax/_runs.py", "_view", "_swapped(order) if is_swapped else order", "order"
        ),
        "kernels write results in the order of their axes": Edit(
            "executors/xla_gpu.py", "flat", "axes.get(each)", "None"
        ),
        "gradients have the order of the axes": Edit(
            "jax/_runs.py", "Pass._is_swapped", "name.removesuffix(DOT)", "name"
        ),
    },
    interop_guards.launches_of_xla_are_right: {
        "every kernel has one block": Edit("jax/handler.cpp", "launched", "kernel.grid, 1, 1", "1, 1, 1"),
        "addresses are not raised by offsets": Edit(
            "jax/handler.cpp", "launched", "buffers[pass->places[i].buffer] + pass->places[i].offset",
            "buffers[pass->places[i].buffer]"
        ),
        "seeds and offsets of dropout are left out": Edit(
            "executors/xla_gpu.py", "flat", "words[-1][word] = (offset + more) % (1 << 64)", "words[-1][word] = offset"
        ),
        "kernels read no row intervals while they list masks": Edit(
            "executors/xla_gpu.py", "lists_of", "works = (False, work), (True,", "works = (False, work), (False,"
        ),
    },
    interop_guards.new_contents_of_jax_compile_nothing: {
        "lists are parts of functions": Edit(
            "jax/_entry.py", "called", "if call.holds_contents:", "if False:"
        ),
        "the positions of lists are those of their lengths": Edit(
            "executors/xla_gpu.py", "packed", "3 * max(_ALIGNMENT, 1 << ((array.nbytes - 1) // 3).bit_length())",
            "-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT + 256 * (array.nbytes % 7)",
        ),
        "lists are not moved to their positions": Edit(
            "executors/xla_gpu.py", "packed", "memory[start : start + array.nbytes]", "memory[: array.nbytes]"
        ),
        "all lists start where the first one starts": Edit(
            "jax/_runs.py", "OnGpu._maker", "Source(len(names), start)", "Source(len(names))"
        ),
        "each mask on the device is planned": Edit(
            "jax/_primitives.py", "_executed", "is_general=bool(call.held)", "is_general=False"
        ),
        "all calls share a function": Edit("jax/_runs.py", "executable", "runner.number", "0"),
    },
    interop_guards.contents_of_jax_on_the_host_are_right: {
        "gradients are those of an edited mask": Edit(
            "jax/_entry.py", "_with_contents", "looked_up, False, own=own)", "looked_up, True, own=own)"
        ),
        "a function that is not compiled calls itself": Edit(
            "jax/_primitives.py", "_executed", "with jax.disable_jit(False):", "if True:"
        ),
        "edits are not seen": Edit(
            "planning/lookup.py", "Lookup.find", "call if snapshot.is_current() else None", "call"
        ),
        "results are bound to a device": Edit(
            "jax/_runs.py", "OnHost.on_data", "device if is_placed else None", "device"
        ),
        "runs keep masks": Edit(
            "jax/_runs.py", "OnHost.__init__", "self._plan_of = lambda arrays: plan",
            "self._plan_of = lambda arrays: (plan, one)[0]",
        ),
        "JAX keeps masks": Edit("jax/_primitives.py", None, "set[type]()).add(JaxCall)", "set[type]()).copy()"),
    },
    interop_guards.traced_options_are_named: {
        "a traced scale is a number": Edit(
            "jax/_checks.py", "traced_reasons", "if is_tracer(options.scale):", "if False:"
        ),
    },
    interop_guards.arrays_of_jax_are_right: {
        "cotangents are taken in the other order": Edit(
            "jax/_derivatives.py", "_cotangents", "(do, dlse), (o, _) = cotangents, one.results",
            "(dlse, do), (o, _) = cotangents, one.results",
        ),
        "gradients of operands are left out": Edit(
            "jax/_derivatives.py", "_gradients", '("q", "k", "v", *wrt)', '("q", "k", "v")'
        ),
        "a number is an array of JAX": Edit(
            "jax/_checks.py", "array_reasons", "if not isinstance(array, (jax.Array, np.ndarray)):", "if False:"
        ),
        "a sink is left out": Edit("jax/_call.py", "JaxCall.planned", 'sink=of.get("sink")', "sink=None"),
        "calls do not differ by dtypes": Edit(
            "jax/_call.py", "JaxCall.cached", "(*key, *self.dtypes.items())", "key"
        ),
        "calls with and without lse share a function": Edit(
            "jax/_entry.py", "called", "numbers_of(without.dropout), return_lse)", "numbers_of(without.dropout))"
        ),
        "subnormal numbers are flushed": Edit(
            "jax/_runs.py", "_subnormal_numbers", "ctypes.pythonapi.fesetenv(ctypes.c_void_p(-1))", "pass"
        ),
    },
    interop_guards.equal_calls_of_jax_are_traced_once: {
        "calls are traced again": Edit("jax/_call.py", "from_cache", "if key is not None:", "if False:"),
        "gradients are traced again": Edit("jax/_entry.py", "called", "run = jax.jit(run)", "pass"),
        "an array that is a mask is a constant": Edit(
            "jax/_call.py", "separated", "isinstance(mask, jax.Array)", "False"
        ),
    },
    interop_guards.second_derivatives_of_jax_are_right: {
        "o_dot of the cotangents is that of zeros": Edit(
            "jax/_derivatives.py", "_second_transpose",
            'dict(zip((f"o{DOT}", f"lse{DOT}"), of_results))',
            'dict(zip((f"o{DOT}", f"lse{DOT}"), map(jax.numpy.zeros_like, of_results)))',
        ),
        "tangents of cotangents are left out": Edit(
            "jax/_derivatives.py", "_backward_jvp", "_with_suffix(dots | of_cotangents)", "_with_suffix(dots)"
        ),
        "tangents of tangents are left out": Edit(
            "jax/_derivatives.py", "_jvp_jvp", "if again:", "if False:"
        ),
        "derivatives of the tangent are left out": Edit("jax/_derivatives.py", "_jvp_jvp", "if twice:", "if False:"),
        "gradients of repeated arrays are not summed": Edit(
            "jax/_derivatives.py", "_transposed", "_summed(results[name], array.aval)", "results[name]"
        ),
    },
    interop_guards.mapped_calls_of_jax_are_right: {
        "entries share the gradients of arrays that they share": Edit(
            "jax/_batching.py", "_spread", 'spread |= {"q", "k", "v", *one.wrt}', "pass"
        ),
        "the mapped axis is the last of the batch": Edit(
            "jax/_batching.py", "_at_once", "leading = (array.shape[0], *missing,",
            "leading = (*missing, array.shape[0],",
        ),
        "axes of the batch are axes of a score's array": Edit(
            "jax/_batching.py", "_num_indices", "len(each.args) for each in loads",
            "score.program.arrays[each.value].rank for each in loads",
        ),
        "an array is read with one number of indices": Edit(
            "jax/_batching.py", "_takes_an_axis", "name.removesuffix(DOT))) > 1", "name.removesuffix(DOT))) > 9"
        ),
        "mapped calls draw the weights of one large call": Edit(
            "jax/_batching.py", "_takes_an_axis", "if options.dropout is not None:", "if False:"
        ),
        "batch entries are numbered through all mapped entries": Edit(
            "jax/_batching.py", "_takes_an_axis", 'if any(each.op == "b" for', 'if any(each.op == "" for'
        ),
        "masks of functions number the entries": Edit(
            "masks/arrays.py", "reads_numbers", "FromFunction in kinds or", ""
        ),
        "lists of blocks have as many batch axes as lengths": Edit(
            "jax/_batching.py", "_takes_an_axis", "ChosenBlocks not in kinds and", ""
        ),
        "a shared bias of two axes has an axis of heads": Edit(
            "jax/_batching.py", "_takes_an_axis", "mapped | _spread(one, mapped)", "mapped"
        ),
        "arrays of a mask may not be traced next to arrays of the host": Edit(
            "blocks/work_list.py", "_location_reasons", 'if space.__name__ != "jax.numpy"', ""
        ),
        "ids of keys may not be traced next to ids of queries on the host": Edit(
            "masks/documents.py", "Documents.resolve", "{namespace(self.q_ids), namespace(kv_ids)} <= {np}",
            "namespace(self.q_ids) is np",
        ),
        "offsets of keys may not be traced next to offsets of queries on the host": Edit(
            "scores/offsets.py", "pair_reasons", 'spaces - {"jax.numpy"}', "spaces"
        ),
    },
    interop_guards.sharded_calls_of_jax_are_right: {
        "gradients of what devices share are not added up": Edit(
            "jax/_sharding.py", "_on_shard", "_added(result, names) if names else result", "result"
        ),
        "each device numbers its batch entries": Edit(
            "jax/_sharding.py", "_of_score", 'all(each.op != "b" for each in instructions)', "True"
        ),
        "each device numbers its heads": Edit(
            "jax/_sharding.py", "_of_score", "heads = heads and not indexed", "pass"
        ),
        "all devices drop the same weights": Edit(
            "jax/_sharding.py", "Axes.__init__", "has_dropout = one.call.options.dropout is not None",
            "has_dropout = False"
        ),
        "functions number the heads of each device": Edit(
            "jax/_sharding.py", "_of_mask", "if reads_numbers(mask):", "if False:"
        ),
    },
}  # fmt: skip
