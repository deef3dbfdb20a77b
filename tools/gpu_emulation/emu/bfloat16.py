"""bfloat16 in Triton's interpreter, which stores it as uint16 and calculates with the integers.

Casts, dot and elementwise arithmetic here go through float32 and round to nearest even. Reductions
and scans (tl.sum, tl.max) stay wrong in bfloat16: kernels use float32 for them.
"""

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

TensorHandle = interpreter.TensorHandle


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _as_float32(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def install() -> None:
    builder = interpreter.InterpreterBuilder
    convert, dot, binary, unary = (
        interpreter._convert_float,
        builder.create_dot,
        builder.binary_op,
        builder.unary_op,
    )

    def convert_float(values, source, target, rounding_mode):
        if (source, target) == (tl.bfloat16, tl.float32):
            return _widen(values.view(np.uint16))
        if (source, target) == (tl.float32, tl.bfloat16):
            return _narrow(values.view(np.float32))
        return convert(values, source, target, rounding_mode)

    def create_dot(self, a, b, d, *args):
        return dot(self, _as_float32(a), _as_float32(b), d, *args)

    def binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs):
            return binary(self, lhs, rhs, op)
        result = op(_widen(lhs.data), _widen(rhs.data))
        if result.dtype == np.bool_:
            return TensorHandle(result, tl.int1)
        return TensorHandle(_narrow(result), tl.bfloat16)

    def unary_op(self, arg, op):
        if not _is_bfloat16(arg):
            return unary(self, arg, op)
        return TensorHandle(_narrow(op(_widen(arg.data))), tl.bfloat16)

    interpreter._convert_float = convert_float
    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
