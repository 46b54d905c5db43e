// UndefinedBehaviorSanitizer without its library: kernels compiled with -fsanitize=undefined call these functions, which
// end the launch with a failure, so that Python raises an exception instead of the process ending.
#include "cta.hpp"

namespace {

// The data of every handler begins with the source location.
struct SourceLocation { const char* file; uint32_t line, column; };

[[noreturn]] void undefined(const SourceLocation* at, const char* what) {
  cuflash::sim::launch->in_kernel.store(false, std::memory_order_relaxed);
  cuflash::sim::fail_at(at->file, at->line, "undefined behaviour: %s", what);
}

}  // namespace

#define CUFLASH_SIM_HANDLER(name, what)                                                                       \
  extern "C" void __ubsan_handle_##name(SourceLocation* data) { undefined(data, what); }                      \
  extern "C" void __ubsan_handle_##name##_abort(SourceLocation* data) { undefined(data, what); }

CUFLASH_SIM_HANDLER(add_overflow, "integer overflow in an addition")
CUFLASH_SIM_HANDLER(sub_overflow, "integer overflow in a subtraction")
CUFLASH_SIM_HANDLER(mul_overflow, "integer overflow in a multiplication")
CUFLASH_SIM_HANDLER(negate_overflow, "integer overflow in a negation")
CUFLASH_SIM_HANDLER(divrem_overflow, "integer division by zero, or its quotient does not fit")
CUFLASH_SIM_HANDLER(shift_out_of_bounds, "a shift by less than 0 or by the type's width or more")
CUFLASH_SIM_HANDLER(out_of_bounds, "an index outside its array")
CUFLASH_SIM_HANDLER(pointer_overflow, "a pointer moved past the end of memory, or from null")
CUFLASH_SIM_HANDLER(type_mismatch_v1, "a load or store through a pointer that is null or not aligned for its type")
CUFLASH_SIM_HANDLER(load_invalid_value, "a bool or enum that holds no value of its type")
CUFLASH_SIM_HANDLER(float_cast_overflow, "a float converted to an integer that cannot hold it")
CUFLASH_SIM_HANDLER(nonnull_arg, "null passed where it is forbidden")
CUFLASH_SIM_HANDLER(invalid_builtin, "zero passed to a builtin that counts bits")
CUFLASH_SIM_HANDLER(vla_bound_not_positive, "an array of no or negative length")
CUFLASH_SIM_HANDLER(missing_return, "the end of a function that returns a value, reached without one")
CUFLASH_SIM_HANDLER(builtin_unreachable, "a point declared unreachable")
#undef CUFLASH_SIM_HANDLER
