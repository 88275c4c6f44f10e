"""Vector code, written as LLVM instructions: what Numba's own loops do not reach.

An `@intrinsic` function is one that compiled functions call to have instructions written in its place. Addresses are
whole numbers; whoever passes them has checked the shapes and holds the arrays.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir as _ir

from phasesplit.engine.kernels import plain
from phasesplit.engine.kernels.compiling import numba

ir: Any = _ir

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
INT8 = ir.IntType(8)
POINTER = INT8.as_pointer()

Builder = Any
Value = Any
Emit = Callable[[Any, Sequence[Any]], Any]


def whole(number: int) -> Value:
    """Return a 64-bit constant."""
    return ir.Constant(I64, number)


def constant(like: Any, value: float | np.float32) -> Value:
    """Return a float32 constant of a type: one number, or the same in every lane."""
    number = float(value)
    return ir.Constant(like, [number] * like.count if isinstance(like, ir.VectorType) else number)


def vector(lanes: int, element: Any = F32) -> Any:
    """Return a vector type, or the element itself for one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def splat(builder: Builder, value: Value, like: Any) -> Value:
    """Return a vector with the value in every lane."""
    if not isinstance(like, ir.VectorType):
        return value
    single = builder.insert_element(ir.Constant(like, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, like.count), [0] * like.count)
    return builder.shuffle_vector(single, ir.Constant(like, ir.Undefined), zeros)


def _suffix(like: Any) -> str:
    return f"v{like.count}f32" if isinstance(like, ir.VectorType) else "f32"


def called(builder: Builder, name: str, result: Any, *arguments: Value) -> Value:
    """Return the call of a function by its name, declared where it is not yet."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Return a x b + c, rounded once."""
    return called(builder, f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)


def load(builder: Builder, pointer: Value, offset: Value, kind: Any, *, element: Any = F32) -> Value:
    """Return what lies `offset` elements after a pointer."""
    place = builder.gep(pointer, [offset], source_etype=element)
    return builder.load(place, typ=kind, align=_bytes(element))


def store(builder: Builder, value: Value, pointer: Value, offset: Value) -> None:
    """Write a value `offset` float32 after a pointer."""
    place = builder.gep(pointer, [offset], source_etype=F32)
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def _bytes(element: Any) -> int:
    return 4 if element is F32 else int(element.width) // 8


def loop(
    builder: Builder,
    start: Value,
    end: Value,
    step: int,
    carried: Sequence[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """Write a loop whose values are handed from turn to turn in registers, and return the last ones.

    Args:
        builder: Where.
        start: First index.
        end: The index ends below it; start + a multiple of step, or not above start.
        step: Of the index.
        carried: Values of the first turn.
        body: Index and values to the values of the next turn.
    """
    before = builder.block
    head = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", start, end), head, after)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, list(phis))
    following = builder.add(index, whole(step))
    last = builder.block
    index.add_incoming(following, last)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, end), head, after)
    builder.position_at_end(after)
    finals = [builder.phi(value.type) for value in carried]
    for final, value, result in zip(finals, carried, results, strict=True):
        final.add_incoming(value, before)
        final.add_incoming(result, last)
    return finals


def exponential(builder: Builder, x: Value) -> Value:
    """Return e^x as `plain.exponential` does, of one number or in every lane."""
    kind = x.type
    lanes = kind.count if isinstance(kind, ir.VectorType) else 1
    bits = vector(lanes, I32)

    def of(value: float | np.float32) -> Value:
        return constant(kind, value)

    def in_bits(number: int) -> Value:
        return ir.Constant(bits, [number] * lanes if lanes > 1 else number)

    for limit, sign in ((plain.EXP_HIGHEST, ">"), (plain.EXP_LOWEST, "<")):
        x = builder.select(builder.fcmp_ordered(sign, x, of(limit)), of(limit), x)
    shifted = fma(builder, x, of(plain.LOG2_E), of(plain.ROUNDER))
    power = builder.fneg(builder.fsub(shifted, of(plain.ROUNDER)))
    rest = fma(builder, power, of(plain.LN2_LOW), fma(builder, power, of(plain.LN2_HIGH), x))
    series = of(plain.EXP_TERMS[0])
    for term in plain.EXP_TERMS[1:]:
        series = fma(builder, series, rest, of(term))
    near = builder.fadd(fma(builder, series, builder.fmul(rest, rest), rest), of(1.0))
    scale = builder.shl(builder.add(builder.bitcast(shifted, bits), in_bits(127)), in_bits(23))
    return builder.fmul(near, builder.bitcast(scale, kind))


def folded(builder: Builder, lanes: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Return one number of a vector's lanes: first half combined with second half, until one is left."""
    while lanes.type.count > 1:
        half = lanes.type.count // 2
        nothing, kind = ir.Constant(lanes.type, ir.Undefined), ir.VectorType(I32, half)
        starts = [ir.Constant(kind, list(range(start, start + half))) for start in (0, half)]
        lanes = combine(*(builder.shuffle_vector(lanes, nothing, start) for start in starts))
    return builder.extract_element(lanes, ir.Constant(I32, 0))


def larger(builder: Builder, a: Value, b: Value) -> Value:
    """Return the larger of two numbers, in every lane; b where one of them is not a number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def function(
    module: Any, name: str, result: Any, arguments: Sequence[Any], body: Callable[[Builder, list[Value]], Value | None]
) -> Any:
    """Return a function of a module, written where it is not there yet."""
    made = module.globals.get(name)
    if made is None:
        made = ir.Function(module, ir.FunctionType(result, arguments), name)
        made.linkage = "linkonce_odr"
        made.attributes.add("noinline")
        builder = ir.IRBuilder(made.append_basic_block("entry"))
        answer = body(builder, list(made.args))
        if answer is None:
            builder.ret_void()
        else:
            builder.ret(answer)
    return made


_TYPES = {"whole": numba.types.intp, "float32": numba.types.float32, "nothing": numba.types.void}


def intrinsic(arguments: Sequence[str], result: str) -> Callable[[Emit], Callable[..., Any]]:
    """Return a decorator: what it makes is called by compiled functions to have instructions written in its place.

    Args:
        arguments: `whole` or `float32` for each.
        result: `whole`, `float32` or `nothing`.
    """
    signature = _TYPES[result](*(_TYPES[one] for one in arguments))

    def decorator(emit: Emit) -> Callable[..., Any]:
        def generate(context: Any, builder: Builder, _signature: Any, values: Sequence[Value]) -> Value:
            answer = emit(builder, values)
            return context.get_dummy_value() if answer is None else answer

        def typed(_typing: Any, *_arguments: Any) -> Any:
            return signature, generate

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        names = ["typing", *(f"argument{index}" for index in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Numba asks the function how many arguments it takes.
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        made: Callable[..., Any] = numba.extending.intrinsic(typed)
        return made

    return decorator


def pointer(builder: Builder, address: Value) -> Value:
    """Return an address as a pointer."""
    return builder.inttoptr(address, POINTER)


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def address_of(_typing: Any, array: Any) -> Any:
    """Return where a C-contiguous float32 array starts; of others the calling function does not compile."""
    if not (isinstance(array, numba.types.Array) and array.layout == "C" and array.dtype == numba.types.float32):
        return None

    def generate(context: Any, builder: Builder, signature: Any, values: Sequence[Value]) -> Value:
        made = numba.core.cgutils.create_struct_proxy(signature.args[0])(context, builder, value=values[0])
        return builder.ptrtoint(made.data, I64)

    return numba.types.intp(array), generate
