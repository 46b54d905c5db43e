"""Faults in how PyTorch's tensors and JAX's arrays are taken, given and differentiated."""

from __future__ import annotations

from mutations.interop_guards import (
    arrays_of_jax_are_right, bfloat16_is_taken_and_given, negated_tensors_are_not_looked_up, scores_of_jax_are_right,
    scores_of_tensors_are_right, tensors_are_right, tensors_without_elements_are_named, writing_is_told,
)  # fmt: skip
from mutations.planting import Edit

FAULTS = {
    tensors_are_right: {
        "no gradient of o is a gradient of ones": Edit(
            "torch.py", "_Attention.backward", "torch.zeros_like(o) if do is None", "torch.ones_like(o) if do is None"
        ),
        "a negated gradient is read without its sign": Edit(
            "torch.py", "_Attention.backward", "else do.resolve_neg()", "else do"
        ),
        "the gradient of lse is dropped": Edit(
            "torch.py", "_Attention.backward",
            "dlse = None if dlse is None else dlse.resolve_neg()", "dlse = None",
        ),
        "no gradient of a sink is asked for": Edit(
            "torch.py", "_called", "options = options._replace(wrt=tuple(needed))", "pass"
        ),
        "a given output is returned for the other": Edit(
            "torch.py", "_returned", "next(others, None) if each is None else each for each in outs",
            "next(others, None) if each is None else each for each in reversed(outs)",
        ),
        "operands follow in the place of dlse": Edit(
            "torch.py", "_backward_names", '*(("dlse",) if has_dlse else ()), *operands',
            '*operands, *(("dlse",) if has_dlse else ())',
        ),
    },
    negated_tensors_are_not_looked_up: {
        "a negated tensor is read as it lies": Edit(
            "torch.py", "_key", "if any(map(torch.Tensor.is_neg, tensors)):", "if False:"
        ),
    },
    scores_of_tensors_are_right: {
        "all operands have gradients": Edit(
            "torch.py", "_called", 'if getattr(each, "requires_grad", False))', "if each.is_floating_point())"
        ),
        "gradients of operands are the next one's": Edit(
            "torch.py", "_Attention.backward", "next(more) if is_needed else None for is_needed in needed",
            "next(more, None) for is_needed in needed",
        ),
        "a captured tensor has to be one of floats": Edit("torch.py", "_kind_reasons", "and not is_captured:", ":"),
        "a Score of the library loses its tensors": Edit(
            "scores/score.py", "_as_array", "isinstance(array, ShapeDtype) or is_differentiated(array)",
            "isinstance(array, ShapeDtype)",
        ),
        "numbers beside a tensor are of its dtype": Edit(
            "scores/library.py", "_beside", 'dtype=sys.modules["torch"].int32, ', ""
        ),
        "a score over other arrays is over its own": Edit(
            "scores/score.py", "Score.with_arrays", "{name: arrays[name] for name in self.arrays}", "dict(self.arrays)"
        ),
    },
    scores_of_jax_are_right: {
        "all operands have a gradient": Edit(
            "jax.py", "_forward", "if each.perturbed)", 'if each.value.dtype.kind == "f")'
        ),
        "zeros that JAX leaves out are ones": Edit("jax.py", "_backward", "jax.numpy.zeros(", "jax.numpy.ones("),
        "plans do not differ by what gradients are asked of": Edit(
            "jax.py", "_Call._found_or_planned", "asked.key(", "asked._replace(wrt=()).key(",
        ),
    },
    writing_is_told: {
        "PyTorch is not told that outputs were written to": Edit(
            "torch.py", "_returned", "increment_version([each for each in outs if each is not None])", "pass"
        ),
        "gradients are constants to PyTorch": Edit(
            "torch.py", "_Attention.backward", "_Gradients.apply if torch.is_grad_enabled() else _gradients",
            "_gradients",
        ),
    },
    bfloat16_is_taken_and_given: {
        "bfloat16 goes by NumPy's DLPack": Edit(
            "layouts.py", "taken", "_bfloat16(value, xp) if _is_bfloat16(value) else", ""
        ),
        "tensors of bfloat16 stay int16": Edit(
            "layouts.py", "_bfloat16", 'xp.from_dlpack(value.view(sys.modules["torch"].int16)).view(BFLOAT16)',
            'xp.from_dlpack(value.view(sys.modules["torch"].int16))',
        ),
        "results of bfloat16 go by DLPack": Edit("torch.py", "_as_tensor", "if array.dtype == BFLOAT16:", "if False:"),
    },
    tensors_without_elements_are_named: {
        "a meta tensor holds data": Edit(
            "layouts.py", "tensor_reasons", 'if value.device.type == "meta":', "if False:"
        ),
        "a nested tensor is dense": Edit("layouts.py", "tensor_reasons", "if value.is_nested:", "if False:"),
        "a quantised tensor is one of numbers": Edit(
            "layouts.py", "tensor_reasons", "if value.is_quantized:", "if False:"
        ),
        "a sparse tensor is dense": Edit(
            "layouts.py", "tensor_reasons", 'if value.layout != sys.modules["torch"].strided:', "if False:"
        ),
        "a tracer has memory": Edit("layouts.py", "tensor_reasons", "if not has_memory:", "if False:"),
        "a negated view holds its values": Edit("layouts.py", "tensor_reasons", "if value.is_neg():", "if False:"),
        "calls for NumPy lose gradients": Edit(
            "layouts.py", "is_on_cuda", "and value.requires_grad", "and False"
        ),
        "a mask with gradients is sent to the call that refused it": Edit(
            "layouts.py", "is_on_cuda", 'if name == "mask":', "if False:"
        ),
        "an output may require gradients": Edit(
            "torch.py", "_kind_reasons", 'name.startswith("out") and not is_captured and tensor.requires_grad', "False"
        ),
    },
    arrays_of_jax_are_right: {
        "cotangents are taken in the other order": Edit(
            "jax.py", "_gradients", "do, dlse, o, lse, q, k, v, *operands = given",
            "dlse, do, o, lse, q, k, v, *operands = given",
        ),
        "gradients of operands are left out": Edit(
            "jax.py", "_gradients", "return *made, *(made[name] for name in wrt)", "return tuple(made)"
        ),
        "gradients of held arrays are traced": Edit(
            "jax.py", "_data", "array.to_concrete_value() if", "None if"
        ),
        "an array of NumPy is one of JAX": Edit(
            "jax.py", "_array_reasons", "if not isinstance(array, jax.Array):", "if False:"
        ),
        "a tracer on a GPU becomes a callback": Edit(
            "jax.py", "_array_reasons", 'if data is None and _platform([array]) != "cpu":', "if False:"
        ),
        "tracers are read": Edit(
            "jax.py", "_run", "if any(isinstance(array, jax.core.Tracer) for array in arrays):", "if False:"
        ),
    },
}  # fmt: skip
