"""The symbols that blocks' sizes are written in, as the legend explains them (``legend.py``), and shares of some of them."""

from zeroplan.expr import symbols

b, s, T, h, a, d, q, k, v, c, f = symbols("b s T h a d q k v c f")
m, E, t, x, z = symbols("m E t x z")
e, r = symbols("e r")

#: Half of a rank's tokens, and a tensor-parallel rank's share of them; key/value heads; a quarter of each query and each key.
T_2, T_p, k_d, q_4, k_4 = symbols("T/2 T/p k/d q/4 k/4")
