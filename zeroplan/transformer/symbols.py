"""The symbols of the size formulas, and fractions of some of them. ``legend.py`` explains each."""

from zeroplan.expr import symbols

b, s, T, h, a, d, q, k, v, c, f = symbols("b s T h a d q k v c f")
m, X, E, G, n, t, x, y, z = symbols("m X E G n t x y z")
u, w, o, V = symbols("u w o V")
j, d_j, Y = symbols("j d_j Y")
A, J, D, I, l = symbols("A J D I l")  # noqa: E741  as the legend has them
Q, Z = symbols("Q Z")
e, r, i = symbols("e r i")

#: Half of a rank's tokens; a tensor-parallel rank's share of tokens and of the vocabulary; key/value heads; a quarter of each head,
#: query and key; half of a head's rotary part; the width of a head of values.
T_2, T_p, V_p, z_p, k_d, d_4, q_4, k_4, q_2, k_2, o_2, c_a = symbols("T/2 T/p V/p z/p k/d d/4 q/4 k/4 q/2 k/2 o/2 c/a")
#: The vocabulary of all tensor-parallel ranks, where V is a rank's share.
V_w = symbols("V_w")[0]
#: Tokens of all ranks that share experts; pairs of a token and an expert that come to a rank whose experts are not visited evenly.
T_g, X_r = symbols("T_g X_r")
#: Tokens of the images to which layers attend, of all sequences and of one; gates and other single numbers are no symbol.
T_x, s_x = symbols("T_x s_x")
#: Widths of one layer's embedding of a token and of all layers', their number, and rows of their table; widths of the keys, and of
#: a head, of the other kind of layers, with a window or without (Gemma 4 E2B and E4B).
h_l, w_l, n_l, V_l, k_o, d_o = symbols("h_l w_l n_l V_l k_o d_o")
