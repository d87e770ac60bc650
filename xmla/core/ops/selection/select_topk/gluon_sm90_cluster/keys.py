"""What rows of one CTA and of clusters share: order keys, how far apart they are, and the pages of columns."""

from xmla.core.lang.gluon import gl, gluon

KEY_OF_NAN = gl.constexpr(-0x7FFFFFFF)  # below all numbers
KEY_OF_INF = gl.constexpr(0x7F800000)


@gluon.jit
def order_key(x):
    """float32 → int32 in the same order; −0 equals +0, NaN is below −inf."""
    bits = (x + 0.0).to(gl.int32, bitcast=True)
    return gl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), KEY_OF_NAN)


@gluon.jit
def value_of(key):
    """The value of an order key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def leading_zeros(x):
    return gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def shift_of(width, LEFT: gl.constexpr):
    """The least shift that leaves at most so many bits of an unsigned width."""
    return gl.maximum(32 - LEFT - leading_zeros(width), 0).to(gl.uint32)


@gluon.jit
def page_of(column, table_row, width, length, PAGE_SIZE: gl.constexpr):
    """The pages of columns; −1 where there is none, or one whose slots are no int32."""
    page = gl.load(table_row + column // PAGE_SIZE, mask=(column < length) & (column // PAGE_SIZE < width), other=-1)
    return gl.where(page < 0x7FFFFFFF // PAGE_SIZE, page, -1)
