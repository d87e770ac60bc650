"""Conversion of e4m3 and bf16 to float16, whose range is narrower: rows are divided by a power of two first."""

from xmla.core.lang.gluon import gl, gluon


@gluon.jit
def exponent_of(x):
    """The largest integer e with 2**e ≤ |x|, from the bits of float32 `x`, clamped to −100 … 112.

    float16 holds every finite bf16 over 2**112: an infinity times the zeros of an invalid key would be NaN.
    """
    bits = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.minimum(gl.maximum((bits >> 23) - 127, -100), 112)


@gluon.jit
def small_float(x):
    """float32 of an integer within ±2**21, by integer and float32 additions.

    A result of I2F needs a scoreboard, and the wait for it would be one for the loads in flight too.
    """
    return (x + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def finite_abs(x):
    """|x|, and 0 for NaN, which does not count for the power of two."""
    return gl.where(x == x, gl.abs(x), 0.0)


@gluon.jit
def scale_words(words, twice):
    """e4m3 words (four each) times pairs of float16 factors: the low and the high pair of float16 of each word."""
    twice, words = gl.broadcast(twice, words)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .b32 x, y;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mul.f16x2 $0, x, $3;
        mul.f16x2 $1, y, $3;
        }
        """,
        "=r,=r,r,r", [words, twice], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_halves(words, factor):
    """bf16 pairs [N, M] i32 times `factor` [N] f32: float16 pairs [N, M] i32."""
    factor, words = gl.broadcast(gl.expand_dims(factor, 1), words)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y;
        shl.b32 x, $1, 16;
        and.b32 y, $1, 0xFFFF0000;
        mul.f32 x, x, $2;
        mul.f32 y, y, $2;
        cvt.rn.f16x2.f32 $0, y, x;
        }
        """,
        "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def largest_of(pairs):
    """The largest magnitude in each row of bf16 pairs, as the bits of a float32. NaN is larger than any number."""
    return gl.max(gl.maximum(pairs & 0x7FFF0000, (pairs & 0x7FFF) << 16), 1)
